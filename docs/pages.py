"""What `mkdocs build` asks on its way: which files of the repository are pages, and what `--help` says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = ("*.md", "docs/*.md", "docs/*.svg", "docs/*.ipynb", "checkpoints/**/*.md", "eval/results/*.md",
         "eval/results/*.png")
COMMAND = re.compile(r"^## (eagle-fsd \w+)\n\n(?:.+\n)+", re.MULTILINE)  # a heading and the paragraph below it


def on_files(files, config):
    """Pages at the places that they have in the repository, beside the theme's own files."""
    shown = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
             for pattern in SHOWN for path in sorted(ROOT.glob(pattern))]
    return Files([*(each for each in files if not each.src_uri.endswith((".md", ".py", ".svg", ".ipynb"))), *shown])


def on_page_markdown(markdown, page, config, files):
    """In docs/commands.md, below what stands there of each command, what it says about itself."""
    if page.file.src_uri != "docs/commands.md":
        return markdown
    return COMMAND.sub(lambda found: f"{found[0]}\n```text\n{help_of(found[1])}\n```\n", markdown)


def help_of(command: str) -> str:
    words = [sys.executable, "-m", "eagle_fsd", *command.split()[1:], "--help"]
    plain = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(words, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout.strip()
