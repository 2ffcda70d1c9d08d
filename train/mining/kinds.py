"""Kinds of tokens, which differ in how much depends on them."""

from __future__ import annotations

import keyword

from eagle_fsd.measure.grading import CODE

KINDS = ("digit", "operator", "name", "keyword", "word", "layout")
OPERATORS = frozenset("+-*/%=<>!&|^~@\u00d7\u00f7")
FENCE = "```"


def kind_of(token: str, in_code: bool) -> str:
    """The kind of a token's text, one of `KINDS`.

    A digit anywhere in it makes it a digit. Letters are a word in prose, in code a keyword of Python or a name. What
    has neither is an operator where it holds nothing else, and layout otherwise: white space, brackets, punctuation,
    end marks.
    """
    text = token.strip()
    if any(map(str.isdigit, text)):
        return "digit"
    if any(map(str.isalpha, text)):
        return ("keyword" if keyword.iskeyword(text) else "name") if in_code else "word"
    return "operator" if text and OPERATORS.issuperset(text) else "layout"


def is_in_code(before: str, answer: str, category: str) -> bool:
    """Whether an answer is in code behind its part `before`: within a fence; if it has none, as a bare program is."""
    return before.count(FENCE) % 2 == 1 if FENCE in answer else category in CODE
