"""Imports go downwards, with no circle, those inside functions and `TYPE_CHECKING` included."""

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom. The longest name that a module begins with says where it belongs; what shares a line is side by side.
ORDER = (
    "eagle_fsd.utils",
    "eagle_fsd.data",
    "eagle_fsd.models",
    "eagle_fsd.drafting",
    "eagle_fsd.heads",
    "eagle_fsd.export",
    "eagle_fsd.acceptance",
    "eagle_fsd.options",
    "eagle_fsd.decoding",
    "eagle_fsd.captured",
    "eagle_fsd.loading",
    "eagle_fsd.inputs",
    "eagle_fsd.api eagle_fsd.hf eagle_fsd.chat",
    "eagle_fsd.batching",
    "eagle_fsd.measure eagle_fsd.serve",
    "eagle_fsd.cli",
    "eagle_fsd eagle_fsd.__main__",
    "train",
    "eval",
)
LAZY = "eagle_fsd", "eagle_fsd.acceptance"  # packages whose names are imported when they are asked for
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names.split()}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for top in ("eagle_fsd", "train", "eval") for path in (ROOT / top).rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """Our modules that a module names in its imports."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {f"{base}.{each.name}" if f"{base}.{each.name}" in MODULES else base for each in node.names}
    return found & MODULES.keys() - {name}


GRAPH = {name: imports_of(name) for name in MODULES}


def level_of(name: str) -> int:
    while name not in LEVELS:
        name = name.rpartition(".")[0]
    return LEVELS[name]


def test_no_import_goes_upwards():
    assert [f"{name} imports {other}" for name, others in sorted(GRAPH.items()) for other in sorted(others)
            if level_of(other) > level_of(name) and other != "eagle_fsd"] == []  # for the version


def test_no_imports_go_in_a_circle():
    # These packages only hand their modules' names on, when they are asked for.
    TopologicalSorter({name: others - set(LAZY) for name, others in GRAPH.items()}).prepare()


@pytest.mark.parametrize("name", LAZY)
def test_the_names_of_a_package_are_those_that_type_checkers_see(name):
    package = importlib.import_module(name)
    imports = [(node.module, each) for part in ast.parse(MODULES[name].read_text()).body if isinstance(part, ast.If)
               for node in part.body for each in node.names]
    assert sorted(each.name for _, each in imports) == package.__all__ and set(dir(package)) >= set(package.__all__)
    for module, each in imports:  # `as` makes it public for type checkers
        assert each.asname == each.name
        assert getattr(package, each.name) is getattr(importlib.import_module(f"{name}.{module}"), each.name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009 - an expression alone would be useless


def test_neither_the_package_nor_help_imports_torch():
    program = ("import sys, eagle_fsd; from eagle_fsd.cli import main\n"
               "for argv in (['--help'], ['generate', '--help'], ['chat', '--help'], ['serve', '--help']):\n"
               "    try: main(argv)\n    except SystemExit as end: assert not end.code\n"
               "print({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy'})")
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\nset()\n")
