"""What the command line writes while an answer is made, and about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..text import GrowingText

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..acceptance import Rule
    from ..engine.receipts import Output, Receipt

COLOURS = {"target": "", "exact": "\033[32m", "fuzzy": "\033[33m"}
RESET, BOLD, DIM = "\033[0m", "\033[1m", "\033[2m"


class SourceStreamer:
    """Writes tokens as they come, coloured by where they come from; a streamer as `transformers` has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, colour: bool) -> None:
        self.text, self.colour = GrowingText(tokenizer), colour
        self.written = 0  # tokens
        self.sources: list[str] = []
        self.is_prompt = True

    def on_receipts(self, receipts: Sequence[Receipt]) -> None:
        self.sources = [receipt.source for receipt in receipts]

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        for token, source in zip(value.tolist(), self.sources, strict=True):
            self.written += 1
            self._write(self.text.add(token), source)
        sys.stdout.flush()

    def end(self) -> None:
        if self.written:
            self._write(self.text.pending(), self.sources[-1])
            sys.stdout.write("\n")

    def _write(self, piece: str, source: str) -> None:
        colour = COLOURS[source] if self.colour else ""
        sys.stdout.write(f"{colour}{piece}{RESET}" if colour and piece else piece)


def describe_rule(rule: Rule, temperature: float) -> str:
    """A rule and its dial, such as "tilt, threshold 0.5"."""
    dial = f", threshold {rule.threshold:g}" if max(rule.threshold, rule.threshold_limit[0]) else ""
    dial += "".join(f", {gate.name} {gate.threshold:.3g}" for gate in rule.parts[1:])
    own = " (the text stays the model's own)" if rule.is_lossless(temperature == 0) else ""
    return f"{rule.name}{dial}{own}"


def use_colour() -> bool:
    """On a terminal, unless NO_COLOR is set; FORCE_COLOR overrides."""
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def describe_output(output: Output) -> str:
    """One line: length, speed, token sources and the end."""
    stats, sources = output.stats, [receipt.source for receipt in output.receipts]
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.mean_accepted_length:.2f} "
        f"tokens per step, {sources.count('target')} target, {sources.count('exact')} exact, "
        f"{sources.count('fuzzy')} fuzzy, ended by {output.finish_reason}, seed {output.seed}"
    )
