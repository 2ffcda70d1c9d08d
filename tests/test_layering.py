"""Imports go down the list of layers, and the library prints nowhere but on the command line."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle_fsd"
LAYERS = [
    {"attention", "cache", "config", "conversations", "divergence", "files", "heads", "noise", "parallel", "questions",
     "tree"},
    {"acceptance", "draft", "grading", "sampling", "target", "vocabulary"},
    {"budget", "checkpoint", "compiled", "drafting"},
    {"calibration", "graphs"},
    {"export", "generation"},
    {"latency", "terminal"},
    {"autotree"},
    {"model"},
    {"api"},
    {"chat", "methods"},
    {"experiment", "tune"},
    {"calibrate", "chat_cli"},
    {"cli", "lm_eval"},
    {"__init__", "__main__"},
]
PROGRAMS = {"chat_cli", "cli"}
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
FILES = {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def module_of(path: Path) -> str:
    """`acceptance/fsd.py` counts as `acceptance`."""
    return path.parts[0].removesuffix(".py")


def imported_modules(path: Path, tree: ast.Module) -> set[str]:
    """Modules of the package that a file imports from outside its own folder."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == len(path.parts):
            names = [node.module] if node.module else [name.name for name in node.names if name.name != "__version__"]
            found |= {name.split(".")[0] for name in names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert not any(name.split(".")[0] == "eagle_fsd" for name in names), f"{path}: import relatively"
    return found


def test_every_module_has_a_layer():
    assert {module_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    above = {name for name in imported_modules(path, FILES[path]) if LEVEL[name] >= LEVEL[module_of(path)]}
    assert not above


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) not in PROGRAMS], ids=str)
def test_the_library_never_prints(path):
    calls = [node.func for node in ast.walk(FILES[path]) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"]
