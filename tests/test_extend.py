"""What docs/architecture.md shows is enough: its file and its line, put into a copy of the package, add a rule."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DECODE = """
import eagle_fsd
from tiny import PROMPT, tiny_pair

pair, wide = tiny_pair(), eagle_fsd.TreeConfig(total_tokens=5, depth=1, top_k=4)

def ask(**options):
    return eagle_fsd.generate(PROMPT, pair, tree=wide, max_new_tokens=48, temperature=1.0, seed=2, **options)

exact = ask(acceptance="exact")
assert ask(acceptance="runner_up").token_ids == exact.token_ids
assert "fuzzy" in [receipt.source for receipt in ask(acceptance="runner_up", threshold=100.0).receipts]
"""


def test_the_page_adds_a_rule(tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    path, rule = re.search(r"New file `(\S+?)`.*?```py\n(.*?)```", page, re.DOTALL).groups()
    line = re.search(r"One line in `RULE_CLASSES`.*?```py\n(.*?)```", page, re.DOTALL)[1]
    shutil.copytree(ROOT / "eagle_fsd", tmp_path / "eagle_fsd", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / path).write_text(rule, encoding="utf-8")
    registry = tmp_path / "eagle_fsd" / "acceptance" / "__init__.py"
    lines = registry.read_text(encoding="utf-8").replace("RULE_CLASSES = {", "RULE_CLASSES = {\n" + line, 1)
    registry.write_text(lines, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", DECODE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
