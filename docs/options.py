"""Writes docs/options.md from the declarations of the options: `python docs/options.py`."""

from pathlib import Path

from eagle_fsd.options.generate import GenerateKeywords
from eagle_fsd.options.load import LoadOptions
from eagle_fsd.options.option import declarations
from eagle_fsd.serve.limits import ServeOptions

PLACE = Path(__file__).with_suffix(".md")
TEXT = """\
# Options

Each option is declared once, in `eagle_fsd/options/` (those of a server in `eagle_fsd/serve/limits.py`), and `python
docs/options.py` writes this page. The flag of `max_new_tokens` is `--max-new-tokens`. The endpoint's `/openapi.json`
lists the fields of a request.
"""
GROUPS = {
    "Decoding": ("Keywords of `generate`, `Chat` and `Engine.submit`, fields of `GenerateOptions`, fields of a request "
                 "to the endpoint, flags.", GenerateKeywords),
    "Loading": ("Keywords of `load`, fields of `LoadOptions`, flags.", LoadOptions),
    "Engine and server": ("Flags of `eagle-fsd serve`; those from `max_rows` on are keywords of `Engine` as well.",
                          ServeOptions),
}


def page() -> str:
    """The text of the page."""
    sections = [TEXT]
    for title, (where, owner) in GROUPS.items():
        lines = [f"## {title}", "", where, "", "| option | default | meaning |", "|---|---|---|"]
        for name, option in declarations(owner).items():
            lines.append(f"| `{name}` | `{option.default!r}` | {option.meaning.replace('<', '&lt;')} |")
        sections.append("\n".join([*lines, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
