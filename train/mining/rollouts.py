"""Answers that are decoded exactly, in batches: from the beginning, or behind given tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import eagle_fsd
from eagle_fsd.pair import EagleModel
from eagle_fsd.prompts import decode, end_tokens
from eagle_fsd.trees.config import TreeConfig
from train.mining.mismatches import Miner, Mismatch, placed


@dataclass(frozen=True)
class Run:
    """What is to be decoded: an answer to a prompt (token ids) that begins with given tokens.

    Args:
        mines: whether its mismatches are asked for; without them nothing is drafted, which is faster in large batches.
    """

    prompt: Sequence[int]
    begun: Sequence[int] = ()
    mines: bool = True


@dataclass(frozen=True)
class Answer:
    """The target's own continuation of a `Run`, with the mismatches behind what was given, if it mines them.

    Args:
        ended: by the target; False: it was cut at the most tokens that an answer may have.
    """

    tokens: list[int]
    text: str
    mismatches: list[Mismatch]
    ended: bool


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded: greedily, exactly, and with one tree, so that they do not depend on the machine's speed.

    Args:
        floor: of `Miner`. max_new_tokens: of an answer, what was given included.
    """

    model: EagleModel
    tree: TreeConfig
    floor: float
    max_new_tokens: int

    def answers(self, runs: Sequence[Run]) -> list[Answer]:
        """The runs' answers, decoded together: all of them mine, or none."""
        ends = end_tokens(self.model)
        found = {number: Answer(list(run.begun), decode(self.model, list(run.begun)), [], run.begun[-1] in ends)
                 for number, run in enumerate(runs)
                 if len(run.begun) >= self.max_new_tokens or run.begun and run.begun[-1] in ends}
        going = [number for number in range(len(runs)) if number not in found]
        lengths = [len(runs[number].prompt) + len(runs[number].begun) for number in going]
        for group in self.model.target.batches(lengths):
            numbers = [going[place] for place in group]
            found |= zip(numbers, self._together([runs[number] for number in numbers], ends), strict=True)
        return [found[number] for number in range(len(runs))]

    def _together(self, runs: Sequence[Run], ends: Collection[int]) -> list[Answer]:
        prompts = [[*run.prompt, *run.begun] for run in runs]
        most = self.max_new_tokens - min(len(run.begun) for run in runs)
        if runs[0].mines:
            miner = Miner(floor=self.floor, width=self.model.target.hidden_size)
            outputs = eagle_fsd.generate(
                prompts, self.model, acceptance=miner, tree=self.tree, seed=0, max_new_tokens=most)
            found = list(placed(miner.cycles, [len(output.stats.accepted_lengths) for output in outputs]))
        else:
            plain = EagleModel(self.model.target, None, self.model.tokenizer)
            outputs = eagle_fsd.generate(prompts, plain, acceptance="exact", seed=0, max_new_tokens=most)
            found = [[] for _ in runs]
        answers = []
        for run, output, mismatches in zip(runs, outputs, found, strict=True):
            tokens = [*run.begun, *output.token_ids][: self.max_new_tokens]
            mismatches = [Mismatch(len(run.begun) + m.at, m.own, m.substitute, m.signals, m.features)
                          for m in mismatches if len(run.begun) + m.at < len(tokens)]
            assert all(tokens[mismatch.at] == mismatch.own for mismatch in mismatches)
            answers.append(Answer(tokens, decode(self.model, tokens), mismatches, tokens[-1] in ends))
        return answers
