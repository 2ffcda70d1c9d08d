"""Bounds of what is rendered and tokenised: no more than the target has positions for."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

ALWAYS = 1 << 16  # characters that are tokenised in any case: it takes no time
_longest: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()  # token of a tokenizer


def most_characters(tokenizer: PreTrainedTokenizerBase, positions: int) -> int:
    """No text of more characters fits so many positions, were it made of the longest token."""
    if tokenizer not in _longest:
        _longest[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    return max(ALWAYS, positions * _longest[tokenizer])


def check_rendering(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], most: int, tools: list[dict] | None = None
) -> None:
    """Raise ValueError where the tokenizer's chat template makes more than `most` characters of a chat.

    Templates are programs from the hub, and what `transformers` renders has no bound. This renders piece by piece, and
    stops; what else is wrong with chat or template is left to be said by `apply_chat_template`.
    """
    length = 0
    try:
        for piece in _bounded(tokenizer.get_chat_template(tools=tools)).generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **tokenizer.special_tokens_map
        ):
            length += len(piece)
            if length > most:
                break
    except MemoryError:
        length = most + 1
    except Exception:  # anything that a template may raise
        return
    if length > most:
        raise ValueError(f"the tokenizer's chat template makes more than {most} characters of the chat, which are more "
                         "than the target has positions for")


@functools.lru_cache(maxsize=8)
def _bounded(source: str) -> Any:
    """The jinja template in the environment that `transformers` makes for templates, where texts are multiplied up to a
    bound."""
    environment = chat_template_utils._compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = frozenset("*")
    environment.call_binop = _multiplied
    return environment.from_string(source)


def _multiplied(context: object, operator: str, left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int) and len(sequence) * count > 1 << 24:
            raise MemoryError
    return left * right
