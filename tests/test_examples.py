"""The examples that are shown, on the pair that they are shown for: the answers are looked at, and not only made."""

import re
import shlex
from pathlib import Path

import pytest

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.data.bundled import default_pair, small_pair

ROOT = Path(__file__).parents[1]
ANSWERS = {"capital of France": "Paris", "And of Italy": "Rome", "plants make their food": "photosynthesis"}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    default_pair() == small_pair(), reason="SmolLM2-135M-Instruct is not installed (make demo), or its head")]


@pytest.fixture(scope="module")
def smollm2():
    return eagle_fsd.load(device="cpu", tree=eagle_fsd.TreeConfig(8, 3, 2))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/chat.md"])
def test_python(page, smollm2, monkeypatch, capsys):
    monkeypatch.setattr(eagle_fsd, "load", lambda *args, **options: smollm2)
    looked_at = 0
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), {})
        shown = capsys.readouterr().out
        for question, answer in ANSWERS.items():
            if question in code:
                assert answer in shown, code
                looked_at += 1
    assert looked_at


def test_the_command_line(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: smollm2)
    lines = [line for page in ("README.md", "docs/commands.md") for line in re.findall(
        r'eagle-fsd generate --chat "[^"]*"[^\n`]*', (ROOT / page).read_text(encoding="utf-8"))]
    assert len(lines) >= 2
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
        assert "Paris" in capsys.readouterr().out
