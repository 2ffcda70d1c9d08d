"""The pages say what the code does: the guides' code runs."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tiny import tiny_pair, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle_fsd
from eagle_fsd.cli import parse

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ["../README.md", "install.md", "from_generate.md", "from_eagle.md", "from_servers.md", "fuzzy.md"]


def blocks(guide, *languages):
    text = (DOCS / guide).read_text(encoding="utf-8")
    return [code for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL) if language in languages]


@pytest.mark.parametrize("guide", GUIDES)
def test_python_in_the_guides_runs(guide, monkeypatch):
    """On a tiny pair, whatever pair the guide names."""
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    monkeypatch.setattr(eagle_fsd, "load", lambda *args, **options: pair)
    monkeypatch.setattr(eagle_fsd, "load_head", lambda source: pair.draft)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: pair.target.model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: pair.tokenizer)
    names = {}
    for code in blocks(guide, "python"):
        exec(compile(code, guide, "exec"), names)
    assert names or not blocks(guide, "python")


@pytest.mark.parametrize("guide", ["../README.md", "../CONTRIBUTING.md", *sorted(map(str, DOCS.glob("*.md")))])
def test_commands_in_the_guides_are_known(guide):
    """Shell syntax; our commands' arguments, and that our modules exist. Other programs are not run."""
    for code in blocks(guide, "bash", "sh"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["eagle-fsd"]:
                parse(words[1:])
            elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("eval", "train"):
                assert importlib.util.find_spec(words[2]), line
