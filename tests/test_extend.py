"""What docs/extend.md shows is enough: its blocks, applied to a copy of the package, add a rule and an option."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
NEW_FILES = re.findall(r"New\sfile\s`(\S+)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
INSERTIONS = re.findall(r"In\s`(\S+)`:\n\n```diff\n(.*?)\n```", PAGE, re.DOTALL)

DECODE = """
import eagle_fsd
from tiny import tiny_pair, tiny_tokenizer

assert eagle_fsd.__file__.startswith(COPY), eagle_fsd.__file__
pair = tiny_pair(tokenizer=tiny_tokenizer())
pair.target.model.generation_config.eos_token_id = pair.tokenizer.eos_token_id
sampled = {"max_new_tokens": 64, "temperature": 1.0, "seed": 2, "ignore_eos": True}
ask = lambda **options: eagle_fsd.generate("hello there", pair, **(sampled | options))
exact = ask(acceptance="exact")

rule = eagle_fsd.RULES["runner_up"]
assert rule().is_lossless(greedy=True) and not rule(0.1).is_lossless(greedy=True)
narrow = eagle_fsd.TreeConfig(total_tokens=5, depth=1, top_k=4)
assert ask(acceptance="runner_up", tree=narrow).token_ids == exact.token_ids
fuzzy = ask(acceptance="runner_up", threshold=100.0, tree=narrow)
assert "fuzzy" in [receipt.source for receipt in fuzzy.receipts]
gated = {"acceptance": "fsd+runner_up", "threshold": 9.0, "tree": narrow}
assert ask(gate_threshold=0.0, **gated).token_ids == exact.token_ids
assert "fuzzy" in [receipt.source for receipt in ask(gate_threshold=100.0, **gated).receipts]

assert pair.tokenizer.eos_token_id not in exact.token_ids[:1]
ended = ask(acceptance="exact", end_bias=1e4, ignore_eos=False)
assert (ended.finish_reason, len(ended.token_ids)) == ("eos", 1)
try:
    ask(end_bias=float("nan"))
except ValueError as error:
    assert "end_bias must be a finite number, got nan" in str(error), error
else:
    raise AssertionError("a NaN was accepted")
"""


def insert(text, block):
    """The text with a block's `+` lines at the place that its other lines name; that place must be the only one."""
    lines = block.splitlines()
    before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
    after = "".join(line[1:] + "\n" for line in lines)
    assert text.count(before) == 1, f"stands there {text.count(before)} times:\n{before}"
    return text.replace(before, after)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with the package, to which the page has been applied."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "eagle_fsd", folder / "eagle_fsd", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in NEW_FILES:
        assert not (folder / path).exists(), path
        (folder / path).write_text(text, encoding="utf-8")
    for path, block in INSERTIONS:
        there = folder / path
        there.write_text(insert(there.read_text(encoding="utf-8"), block), encoding="utf-8")
    return folder


def python(copy, *arguments):
    paths = os.pathsep.join(map(str, (copy, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_adds_a_rule_and_an_option_by_a_file_and_a_line():
    assert [path for path, _ in NEW_FILES] == ["eagle_fsd/acceptance/runner_up.py"]
    added = {path: [line for at, block in INSERTIONS if at == path for line in block.splitlines() if line[:1] == "+"]
             for path, _ in INSERTIONS}
    assert len(added["eagle_fsd/acceptance/__init__.py"]) == 1
    assert len(added["eagle_fsd/api.py"]) == 1
    assert set(added) == {f"eagle_fsd/{path}" for path in
                          ("acceptance/__init__.py", "options.py", "api.py", "engine/sampling.py")}


def test_both_decode(copy):
    python(copy, "-c", f"COPY = {str(copy)!r}\n{DECODE}")


def test_both_are_in_the_help(copy):
    text = python(copy, "-m", "eagle_fsd", "generate", "--help")
    assert "--end-bias" in text and "answers end sooner" in " ".join(text.replace("│", " ").split())
    assert "runner_up" in text
