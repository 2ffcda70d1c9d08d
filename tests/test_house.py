"""The page about the architecture names every folder and module that is on the disk, with its own first sentence."""

import ast
import re

import pytest

from docs import house


def named():
    """Path and line of each folder and module in the page's tree, read by its indentation."""
    text = house.PAGE.read_text(encoding="utf-8").split(house.BEGIN)[1].split(house.END)[0]
    folders, found = [], {}
    for line in text.strip().removeprefix("```text\n").removesuffix("```").splitlines():
        name, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name.rstrip("/")] if name.endswith("/") else []
        path = "/".join([*folders, "__init__.py" if name.endswith("/") else name])
        assert path not in found, f"{path} stands there twice"
        found[path] = purpose.strip()
    return found


def test_the_tree_is_what_is_on_the_disk():
    modules = [path for top in house.TOPS for path in (house.ROOT / top).rglob("*.py")]
    on_disk = {path.relative_to(house.ROOT).as_posix() for path in modules}
    assert set(named()) == on_disk, "run python -m docs.house"


def test_every_line_is_the_first_sentence_of_the_docstring():
    for path, purpose in named().items():
        docstring = ast.get_docstring(ast.parse((house.ROOT / path).read_text(encoding="utf-8")))
        assert docstring, f"{path} does not say what it is for"
        rest = " ".join(docstring.split()).removeprefix(purpose)
        assert purpose and rest[:1] in ("", ".", "?", " "), f"{path}: run python -m docs.house"


def test_the_page_is_current():
    assert house.PAGE.read_text(encoding="utf-8") == house.page(), "run python -m docs.house"


@pytest.mark.parametrize("name", ["architecture.md", "extend.md"])
def test_modules_named_in_the_text_are_there(name):
    """Such as `engine/decoder`; what a worked example adds is not."""
    page = (house.ROOT / "docs" / name).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    new = set(re.findall(r"New\sfile\s`(\S+)`", page))
    for path in set(re.findall(r"`([a-z_]+/[\w./]*)`", prose)) - new:
        places = [top / (path + suffix) for top in (house.ROOT, house.ROOT / "eagle_fsd") for suffix in ("", ".py")]
        assert any(place.exists() for place in places), path
