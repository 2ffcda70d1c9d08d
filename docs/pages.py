"""What `mkdocs build` asks on its way: the pages keep their places in the repository, so that one link serves both, and
the API reference is made of what `eagle_fsd` exports."""

from pathlib import Path

from mkdocs.structure.files import File, Files

import eagle_fsd

ROOT = Path(__file__).parents[1]
SHOWN = ("*.md", "docs/**/*.md", "docs/**/*.svg", "checkpoints/*.md", "checkpoints/*/README.md", "hub/*.md",
         "eval/results/*.md")


def on_files(files, config):
    shown = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
             for pattern in SHOWN for path in sorted(ROOT.glob(pattern))]
    theme = [each for each in files if not each.src_uri.endswith((".md", ".py", ".svg"))]
    return Files([*theme, *shown, File.generated(config, "docs/api.md", content=reference())])


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("eval/results/"):
        page.meta["search"] = {"exclude": True}  # records, linked from docs/results/


def reference():
    """A page of the names that the package exports, and of the rules."""
    exported = [getattr(eagle_fsd, name) for name in sorted(eagle_fsd.__all__, key=str.lower) if name != "RULES"]
    lines = [f"::: {each.__module__}.{each.__qualname__}" for each in (*exported, *eagle_fsd.RULES.values())]
    return "\n\n".join(["# API reference", "The options are on [a page of their own](options.md).", *lines])
