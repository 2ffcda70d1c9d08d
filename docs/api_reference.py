"""Writes docs/api.md from the docstrings and signatures of everything that eagle_fsd exports, and the command line.

    python -m docs.api_reference
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import eagle_fsd
from eagle_fsd.cli.app import build_parser

PAGE = Path(__file__).with_name("api.md")
ORDER = (
    "load", "generate", "custom_generate", "Chat", "Session", "Output", "Stats", "Receipt", "TreeConfig", "EagleModel",
    "make_rule", "RULES", "Verification", "Decision", "load_head", "save_head", "DraftHead",
)
SECTION = re.compile(r"(Args|Returns|Raises):")
ITEM = re.compile(r"([\w, ]+): ")


def page() -> str:
    """The whole page.

    Raises:
        ValueError: ORDER does not hold what is exported.
    """
    if set(ORDER) != set(eagle_fsd.__all__):
        raise ValueError(f"not both in ORDER and exported: {set(ORDER) ^ set(eagle_fsd.__all__)}")
    contents = ", ".join(f"[{name}](#{name.lower()})" for name in ORDER)
    parts = [
        "# API reference",
        "Made from docstrings by `python -m docs.api_reference`; do not edit. What each name refuses, by example: "
        "`tests/test_hostile.py`.",
        f"{contents}, [command line](#command-line).",
        *(described(name) for name in ORDER),
        command_line(),
    ]
    return "\n\n".join(parts) + "\n"


def described(name: str) -> str:
    """The section of one exported name."""
    if name == "RULES":
        return rules()
    thing = getattr(eagle_fsd, name)
    node, lines = source(thing)
    if isinstance(node, ast.FunctionDef):
        return f"## {name}\n\n{code(signature(node, lines))}\n\n{markdown(inspect.getdoc(thing))}"
    own = [each for base in reversed(thing.__mro__) if base.__module__.startswith("eagle_fsd")
           for each in field_lines(*source(base))]
    parts = [f"## {name}", *([code("\n".join(own))] if own else []), markdown(inspect.getdoc(thing))]
    for member in node.body:
        documented = isinstance(member, ast.FunctionDef) and ast.get_docstring(member)
        if documented and not member.name.startswith("_"):
            parts += [f"### {name}.{member.name}", code(signature(member, lines)), markdown(ast.get_docstring(member))]
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            parts.insert(1, code(signature(member, lines)))
    return "\n\n".join(parts)


def source(thing: object) -> tuple[ast.FunctionDef | ast.ClassDef, list[str]]:
    """The definition as a syntax tree, and the lines of its source."""
    text = textwrap.dedent(inspect.getsource(thing))
    return ast.parse(text).body[0], text.splitlines()


def signature(node: ast.FunctionDef, lines: list[str]) -> str:
    """The lines from the decorators to the body: with the comments that give shapes."""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : max(first, node.body[0].lineno - 1)]))


def field_lines(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """The fields of a dataclass or named tuple."""
    own = [each for each in node.body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each)]
    return [textwrap.dedent("\n".join(lines[each.lineno - 1 : each.end_lineno])) for each in own]


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def markdown(docstring: str) -> str:
    """A docstring with its sections as lists."""
    out, inside = [], None
    for line in docstring.splitlines():
        heading = SECTION.fullmatch(line)
        if heading:
            inside = heading[1]
            out += [f"**{inside}**", ""]
        elif inside and line.strip():
            text = line.removeprefix("    ")
            if text.startswith("    "):  # goes on
                out.append("  " + text.strip())
            elif line == text:  # behind the section
                inside = None
                out.append(line)
            elif inside == "Returns":
                out.append(text)
            else:
                out.append("- " + ITEM.sub(lambda found: f"`{found[1]}`: ", text, count=1))
        else:
            out.append(line)
    return "\n".join(out).strip()


def rules() -> str:
    rows = []
    for name, rule in eagle_fsd.RULES.items():
        upper, closed = rule.threshold_limit
        lossless = {(True, True): "at 0", (True, False): "at 0, greedy", (False, False): "never"}
        at_zero = "always" if upper == 0 else lossless[rule().is_lossless(True), rule().is_lossless(False)]
        dial = "0" if upper == 0 else f"0 to {upper:g}" + ("" if closed else ", exclusive")
        options = ", ".join(f"`{each.name}`" for each in fields(rule) if each.name != "threshold") or "none"
        rows.append(f"| `{name}` | {inspect.getdoc(rule).splitlines()[0]} | {dial} | {at_zero} | {options} |")
    table = "\n".join(["| rule | | threshold | lossless | options |", "|---|---|---|---|---|", *rows])
    return f"## RULES\n\nThe classes of the rules by name; `make_rule` makes one from checked options.\n\n{table}"


def command_line() -> str:
    parser = build_parser()
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    parts = ["## Command line"]
    purposes = {each.dest: each.help for each in commands._choices_actions}
    for name, command in commands.choices.items():
        rows = [f"| `{shown(each)}` | {default(each)} | {explained(each)} |" for each in command._actions
                if not isinstance(each, argparse._HelpAction)]
        about = (command.description or purposes[name]).replace("%%", "%")
        parts += [f"### eagle-fsd {name}", about[0].upper() + about[1:] + ("" if about.endswith(".") else "."),
                  "\n".join(["| argument | default | |", "|---|---|---|", *rows])]
    parts.append("Bad arguments and input end with exit status 2 and one line on standard error, Ctrl-C with 130.")
    return "\n\n".join(parts)


def shown(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or action.dest
    return name if action.nargs == 0 or not action.option_strings else f"{name} {action.metavar or action.dest.upper()}"


def default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.default is None or action.nargs == 0:
        return ""
    return f"`{' '.join(action.default) if isinstance(action.default, list) else action.default}`"


def explained(action: argparse.Action) -> str:
    text = (action.help or "") % vars(action)
    choices = ", ".join(f"`{each}`" for each in action.choices or ())
    return "; ".join(part for part in (text, choices and f"one of {choices}") if part).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
