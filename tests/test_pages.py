"""Links lead somewhere, the API page has every public name, and figures and paths are those that there are."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import eagle_fsd
from eagle_fsd.cli import COMMANDS
from eval.benchmark import ALL, method_table

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "eval" / "results"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("checkpoints/**/*.md")]


def test_the_api_page_has_every_public_name():
    named = re.findall(r"^::: eagle_fsd\.(\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    rules = {f"{rule.__module__.removeprefix('eagle_fsd.')}.{rule.__name__}" for rule in eagle_fsd.RULES.values()}
    assert len(named) == len(set(named)) and set(named) == set(eagle_fsd.__all__) | rules


def anchors(page):
    """What the page's headings are called in links, here and on the site."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http:", "https:")):
            path, _, anchor = link.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_the_table_of_the_readme_is_what_was_measured():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    section = readme.split("## What it gives")[1].split("\n## ")[0]
    rows = [re.sub(r" +", " ", line) for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
    record = stored("smollm2-mt-bench")
    measured = [re.sub(r" +", " ", line) for line in method_table(record["rows"][ALL]).splitlines()]
    assert len(rows) >= 5 and rows[0] == measured[0] and set(rows[2:]) <= set(measured[2:])
    assert record["environment"]["command"].split(" --target")[0] in section.replace("\n", " ")


def test_the_changelog_says_where_things_went():
    moved, renamed = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("| before | now |")[1:3]
    for module in re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| \S+ \| (.*) \|$", moved, re.MULTILINE))):
        assert importlib.util.find_spec(module), module
    for module, name in re.findall(r"^\| \S+ \| `([\w.]+)\.(\w+)` \|$", renamed, re.MULTILINE):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_page_of_commands_has_each():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^## eagle-fsd (\w+)$", page, re.MULTILINE) == list(COMMANDS)
