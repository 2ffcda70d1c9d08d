"""The code of the pages runs as it stands, on a tiny pair in the place of the one that a page loads."""

import re
import shlex
from pathlib import Path

import pytest
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.cli import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, *languages):
    found = re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [code for language, code in found if language in languages]


@pytest.mark.parametrize("names", [["README.md", "docs/python.md"], ["docs/index.md"], ["docs/fuzzy.md"]])
def test_python_runs(names, monkeypatch):
    pair = tiny_chat_pair(max_position_embeddings=512)
    monkeypatch.setattr(eagle_fsd, "load", lambda *args, **options: pair)
    namespace = {}
    for name in names:
        for code in blocks(ROOT / name, "python"):
            exec(compile(code, name, "exec"), namespace)
    assert namespace["model"] is pair


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_accepted(page):
    for code in blocks(page, "sh", "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["eagle-fsd"] and "--help" not in words:
                parse(words[1:])
