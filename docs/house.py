"""The annotated tree in docs/architecture.md: every folder and module with the first sentence of its docstring.

    python -m docs.house            # after a module came, went or changed its first sentence
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TOPS = ("eagle_fsd", "train", "eval")
BEGIN, END = "<!-- tree: python -m docs.house -->", "<!-- end of tree -->"


def purpose(module: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", paragraph)[0].removesuffix(".")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """A folder's line, those of its modules, then those of the folders in it."""
    indent = "  " * depth
    found = [f"{indent}{folder.name + '/':{26 - len(indent)}}{purpose(folder / '__init__.py')}"]
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            found.append(f"{indent}  {module.name:{24 - len(indent)}}{purpose(module)}")
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        found += lines(inner, depth + 1)
    return found


def page() -> str:
    """The page with the tree that is on the disk."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tree = "\n".join(line for top in TOPS for line in lines(ROOT / top))
    return f"{before}{BEGIN}\n\n```text\n{tree}\n```\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
