"""The house: imports go down the order of folders and of files within them, and only programs print."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eagle_fsd"

# From the ground up. A module may import what stands before it: folders and modules of the package before its own
# folder, and in its own folder the modules of earlier levels (those of one level do not know each other).
HOUSE: dict[str, list[str]] = {
    "lazy": [],
    "checks": [],
    "data": ["progress bars bundled files sources conversations documents rendering", "questions gguf"],
    "models": ["implementations cache parallel flash", "masks output placement", "attention loading admission",
               "target"],
    "heads": ["catalogue vocabulary token_map eagle", "eagle3", "layouts", "checkpoint", "export", "inspection"],
    "trees": ["config tree largest", "confidence", "growth"],
    "acceptance": ["divergence", "verification", "decision", "rule",
                   "exact fly fsd fsd_paper gated judge lenience prose regret relaxed tilt typical", "afterword",
                   "__init__", "registry", "budget"],
    "quality": ["promises statistics traces judges", "calibrations"],
    "options": [],
    "engine": ["noise sampling drafting receipts compiled", "emission", "request", "forwards", "graphs", "decoder",
               "loop"],
    "tuning": ["latency logs", "measuring fitting replay", "machine choice"],
    "pair": [],
    "prompts": [],
    "text": [],
    "settings": [],
    "api": [],
    "hf": [],
    "chat": [],
    "web": ["limits guards metrics", "protocol server"],
    "serve": ["tickets room prefixes", "jobs", "rows", "engine", "page", "app", "ray"],
    "experiments": ["ifeval", "methods grading records summaries", "experiment cycles", "search"],
    "lm_eval": ["arguments", "model", "__main__"],
    "cli": ["exits terminal", "arguments", "calibrate chat demo generate heads serve tune vocab", "__init__"],
    "__init__": [],
    "__main__": [],
}
STOREY = {name: number for number, name in enumerate(HOUSE)}
LEVEL = {(folder, module): number for folder, levels in HOUSE.items()
         for number, modules in enumerate(levels) for module in modules.split()}
FILES = {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
PROGRAMS = {"cli"}
MANY = {"acceptance"}  # one file per rule
MOST_MODULES = 12


def place(path: Path) -> tuple[str, ...]:
    return path.with_suffix("").parts


def is_for_editors(statement: ast.stmt) -> bool:
    """`if TYPE_CHECKING:`, which never runs."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def imported(path: Path, tree: ast.Module) -> set[tuple[str, ...]]:
    """Places of the package that a file imports, as (folder or module[, module])."""
    found, here = set(), place(path)[:-1]
    for node in [node for statement in tree.body if not is_for_editors(statement) for node in ast.walk(statement)]:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = here[: len(here) - (node.level - 1)]
            named = [tuple(node.module.split("."))] if node.module else [(name.name,) for name in node.names]
            found |= {folder + name for name in named if name != ("__version__",)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert not any(name.split(".")[0] == "eagle_fsd" for name in names), f"{path}: import relatively"
    return found


def level_of(folder: str, module: str) -> int:
    """A name that is no module was imported from the folder's `__init__`."""
    return LEVEL[folder, module if (folder, module) in LEVEL else "__init__"]


def test_every_module_has_its_place():
    found = {place(path) for path in FILES}
    assert {parts[0] for parts in found} == set(HOUSE)
    assert {parts for parts in found if len(parts) > 1 and parts[1] != "__init__"} == {
        parts for parts in LEVEL if parts[1] != "__init__"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    here = place(path)
    for there in imported(path, FILES[path]):
        if there[0] != here[0]:
            assert STOREY[there[0]] < STOREY[here[0]], f"{here} imports {there}"
        else:
            assert level_of(*there[:2]) < LEVEL[here], f"{here} imports {there}"


FOLDERS = [folder for top in (PACKAGE, ROOT / "train") for folder in (top, *top.iterdir()) if folder.is_dir()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_folder_is_crowded(folder):
    assert folder.name in MANY or len(list(folder.glob("*.py"))) <= MOST_MODULES


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] not in PROGRAMS], ids=str)
def test_the_library_never_prints(path):
    calls = [node.func for node in ast.walk(FILES[path]) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"]
