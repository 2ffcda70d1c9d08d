"""The pages say what the code does: the API page has every public name, the guides' code runs, links lead somewhere."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tiny import tiny_pair, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle_fsd
from eagle_fsd.cli.app import build_parser

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "eval" / "results"
GUIDES = ["../README.md", "install.md", "from_generate.md", "from_eagle.md", "from_servers.md", "fuzzy.md"]
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("checkpoints/**/*.md")]


def blocks(guide, *languages):
    text = (DOCS / guide).read_text(encoding="utf-8")
    return [code for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL) if language in languages]


def test_the_api_page_has_every_public_name():
    named = re.findall(r"^::: eagle_fsd\.(\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    rules = {f"{rule.__module__.removeprefix('eagle_fsd.')}.{rule.__name__}" for rule in eagle_fsd.RULES.values()}
    assert len(named) == len(set(named)) and set(named) == set(eagle_fsd.__all__) | rules


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


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_in_the_guides_are_known(guide):
    """Shell syntax; our commands' arguments, and that our modules exist. Other programs are not run."""
    for code in blocks(guide, "bash", "sh"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["eagle-fsd"]:
                build_parser().parse_args(words[1:])
            elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("eval", "train"):
                assert importlib.util.find_spec(words[2]), line


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


def cells(speed, tau, right, unchanged):
    return [f"{speed:.2f}x", f"{tau:.2f}", "cannot be told" if right is None else f"{right:.1%}", f"{unchanged:.0%}"]


def test_the_table_of_the_readme_is_what_was_measured():
    """Up to six rows; speed is time per finished answer."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")]
            for line in re.findall(r"^(\| `\w+`.*)$", readme.split("## What it gives")[1], re.MULTILINE)]
    sweep = stored("sweep-greedy")
    baseline = next(row for row in sweep["baselines"] if row["setting"] == "model.generate")
    measured = {}
    for row in sweep["rows"]:
        speed = baseline["seconds_per_answer"] / row["seconds_per_answer"]
        measured[row["setting"], "300 tasks"] = cells(speed, row["tau"], row["accuracy"], 1 - row["differing"])
    for name, setting in (("mt-bench-exact", "exact"), ("mt-bench-fsd", "fsd 0.3")):
        row = stored(name)["rows"][-1]
        speed = row["baseline_seconds_per_question"] / row["seconds_per_question"]
        measured[setting, "MT-Bench"] = cells(speed, row["tau"], None, row["same"])
    assert 1 <= len(rows) <= 6
    for row in rows:
        assert row[2:6] == measured[row[0].replace("`", ""), row[1]], row
        assert "`" in row[6]  # its command
    shown = next(row[6] for row in rows if row[1] == "300 tasks").strip("`")
    assert sweep["environment"]["command"].startswith(shown)


def test_the_changelog_says_where_things_went():
    moved, renamed = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("| before | now |")[1:3]
    for module in re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| \S+ \| (.*) \|$", moved, re.MULTILINE))):
        assert importlib.util.find_spec(module), module
    for module, name in re.findall(r"^\| \S+ \| `([\w.]+)\.(\w+)` \|$", renamed, re.MULTILINE):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
