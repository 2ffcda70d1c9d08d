"""Answers that are decoded exactly, together: from the beginning, or behind given tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.pair import EagleModel
from eagle_fsd.prompts import decode, end_tokens
from eagle_fsd.serve.engine import Engine
from train.mining.mismatches import Miner, Mismatch

Key = TypeVar("Key")
PLAIN = 4  # times as many answers are decoded together where each has one token in a forward, not a tree


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
    """How answers are decoded: greedily, exactly, and with one tree. In half precision ties fall by the company that an
    answer is decoded in, which is a matter of time.

    Args:
        floor: of `Miner`. max_new_tokens: of an answer, what was given included.
        batch: answers that are drafted together, or a `PLAIN`th of those that are not drafted.
    """

    model: EagleModel
    tree: TreeConfig
    floor: float
    max_new_tokens: int
    batch: int

    def answers(self, waiting: deque[tuple[Key, Run]], mines: bool) -> Iterator[tuple[Key, Answer]]:
        """Take runs out of the queue, which all mine or none does, and give their answers in the order in which they
        end. Who takes an answer may add runs to the queue."""
        model, tree, rows = self.model, self.tree, self.batch
        if not mines:
            model, tree, rows = EagleModel(model.target, None, model.tokenizer), None, PLAIN * rows
        with (ThreadPoolExecutor(rows) as pool,  # a thread waits for each answer
              Engine(model, max_rows=rows, max_waiting=rows, prefixes=rows, tree=tree) as engine):
            going: dict[Future[Answer], Key] = {}
            try:
                while waiting or going:
                    while waiting:
                        key, run = waiting.popleft()
                        going[pool.submit(self._answer, engine, run)] = key
                    for future in wait(going, return_when=FIRST_COMPLETED).done:
                        yield going.pop(future), future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, engine: Engine, run: Run) -> Answer:
        ends, begun = end_tokens(self.model), list(run.begun)
        if len(begun) >= self.max_new_tokens or begun and begun[-1] in ends:
            return Answer(begun, decode(self.model, begun), [], begun[-1] in ends)
        miner = Miner(floor=self.floor, width=self.model.target.hidden_size)
        output = engine.submit(
            [*run.prompt, *begun], acceptance=miner if run.mines else "exact", seed=0,
            max_new_tokens=self.max_new_tokens - len(begun)).result()
        tokens = [*begun, *output.token_ids]
        mismatches = [replace(mismatch, at=len(begun) + mismatch.at) for mismatch in miner.mismatches
                      if len(begun) + mismatch.at < len(tokens)]
        assert all(tokens[mismatch.at] == mismatch.own for mismatch in mismatches)
        return Answer(tokens, decode(self.model, tokens), mismatches, tokens[-1] in ends)
