"""Between the library, training and evaluation imports go one way: `eval` may import `train`, and both the library."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"eagle_fsd": {"train", "eval"}, "train": {"eval"}}
FILES = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
         for folder in ("eagle_fsd", "train", "eval") for path in (ROOT / folder).rglob("*.py")}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 350, 60


def imported(tree: ast.Module) -> set[str]:
    """The first names of all absolute imports."""
    names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] in FORBIDDEN], ids=str)
def test_imports_go_one_way(path):
    assert not imported(FILES[path]) & FORBIDDEN[path.parts[0]]


def test_the_way_is_used():
    """What is looked for is found where it is allowed."""
    assert any("train" in imported(tree) for path, tree in FILES.items() if path.parts[0] == "eval")
    assert imported(ast.parse("import eval.step\nfrom train.tasks import generator")) == {"eval", "train"}


def lines_of(function: ast.FunctionDef) -> int:
    """Without the docstring: that of a public function says much."""
    documented = ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - documented * (
        function.body[0].end_lineno - function.body[0].lineno + 1)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_module_or_function_is_long(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    functions = [node for node in ast.walk(FILES[path]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert not [function.name for function in functions if lines_of(function) > MOST_LINES_OF_A_FUNCTION]
