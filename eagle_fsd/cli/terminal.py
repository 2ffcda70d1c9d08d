"""Terminal output of an answer: its text in colour, and a line of statistics."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..utils.text import StreamedText

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..decoding.output import Output, Receipt

COLOURS = {"target": "", "exact": "\033[32m", "fuzzy": "\033[33m"}
RESET, BOLD, DIM = "\033[0m", "\033[1m", "\033[2m"


def use_colour() -> bool:
    """Whether to write colours: on a terminal, unless NO_COLOR is set; FORCE_COLOR overrides both."""
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def coloured(text: str, code: str) -> str:
    """The text in a colour, if `use_colour`."""
    return f"{code}{text}{RESET}" if text and code and use_colour() else text


def legend() -> str:
    """Legend of the colours of an answer."""
    return (f"{coloured('Green', COLOURS['exact'])}: drafted, and the model's own choice. "
            f"{coloured('Yellow', COLOURS['fuzzy'])}: drafted, accepted by the rule only. Plain: the model's own.")


class SourceStreamer:
    """Writes tokens as they arrive, coloured by source; tokens of `model.generate` are plain.

    Args:
        stop: strings that end the answer. Text that may be the beginning of one is withheld.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.text = StreamedText(tokenizer, stop)
        self.sources: list[str] = []
        self.is_prompt = True

    def on_receipts(self, receipts: Sequence[Receipt]) -> None:
        self.sources = [receipt.source for receipt in receipts]

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        tokens = value.tolist()
        for token, source in zip(tokens, self.sources or ["target"] * len(tokens), strict=True):
            sys.stdout.write(coloured(self.text.add([token]), COLOURS[source]))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write(coloured(self.text.withheld(), COLOURS[self.sources[-1] if self.sources else "target"]) + "\n")


def describe_output(output: Output) -> str:
    """One line: length, speed, token sources and finish reason."""
    stats, sources = output.stats, [receipt.source for receipt in output.receipts]
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.mean_accepted_length:.2f} "
        f"tokens per forward, {sources.count('target')} by the target, {sources.count('exact')} drafted and "
        f"exact, {sources.count('fuzzy')} fuzzy, ended by {output.finish_reason}, seed {output.seed}"
    )
