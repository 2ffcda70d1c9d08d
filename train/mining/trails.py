"""How the mismatches of a question are tried: each alone, or in sequence, where a harmless one stays.

A trail is a generator: it asks for answers (`Run`) or for losses (`Losses`), is sent what it asked for, and returns a
`Trail`. So the questions of a group share their batches, see `follow`.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from eagle_fsd.data.questions import Question
from eagle_fsd.measure.grading import CODE, is_right, outcome
from train.mining.kinds import is_in_code, kind_of
from train.mining.likelihood import Loss, losses
from train.mining.mismatches import Mismatch
from train.mining.rollouts import Answer, Decoding, Run

MODES = ("alone", "sequence")


@dataclass(frozen=True)
class Losses:
    """A question to `likelihood.losses`."""

    prompt: Sequence[int]
    answer: Sequence[int]
    substitutions: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Trail:
    """What a question's mismatches were found to be.

    Args:
        about: of the question: id, digest of its prompt, category, mode, whether the own answer is right (None:
            unknown) and whether it ended, its tokens and number of mismatches; and whether going on with nothing
            replaced, from the first place that was tried alone, comes to something else (`again_differs`; None: not
            tried). That is the outcome label's noise: in half precision ties may fall otherwise in another batch.
        rows: of each mismatch that was tried. features: of each, see `Mismatch`.
    """

    about: dict
    rows: list[dict]
    features: list[Tensor]


Steps = Generator[list[Run] | Losses, "list[Answer] | list[Loss]", Trail]


@dataclass(frozen=True)
class Labels:
    """Which labels mismatches get.

    Args:
        outcome: go on exactly behind the substitute; harmful iff the answer comes to something else or, other than the
            own one, does not end. Of an own answer that was cut there is no such label: what it comes to is not known.
        likelihood: harmful iff the rest of the answer loses more than `nats`, see `likelihood.losses`, with what the
            substitutes that were kept before it have lost.
        most: mismatches of a question that are tried.
        run_code: allow programs to be run.
        text_of: of a token.
    """

    outcome: bool
    likelihood: bool
    nats: float
    most: int
    seed: int
    run_code: bool
    text_of: Callable[[int], str]

    def trail(self, question: Question, prompt: Sequence[int], mode: str) -> Steps:
        """The question's trail; whether each mismatch is tried alone or in sequence goes by `mode`."""
        rng = random.Random(f"{self.seed}/{question.id}")
        (own,) = yield [Run(prompt)]
        labels = replace(self, outcome=self.outcome and own.ended)
        wanted = labels._outcome(question, own) if labels.outcome else None
        again = None
        if mode == "sequence" and labels.outcome:
            tried = yield from labels._sequence(question, prompt, own, wanted, rng)
        else:
            most = min(self.most, len(own.mismatches)) if labels.outcome or labels.likelihood else 0
            chosen = sorted(rng.sample(own.mismatches, most), key=lambda m: m.at)
            if mode == "sequence":
                tried = yield from labels._spliced(prompt, own, chosen)
            else:
                tried, again = yield from labels._alone(question, prompt, own, wanted, chosen)
        rows = [self._row(question, own, mismatch, found) for mismatch, found in tried]
        right = None if question.category in CODE and not self.run_code else is_right(
            question, own.text, run_code=self.run_code)
        about = {"question": question.id, "prompt": digest_of(prompt), "category": question.category, "mode": mode,
                 "own_right": right, "own_ended": own.ended, "tokens": len(own.tokens),
                 "mismatches": len(own.mismatches), "again_differs": again}
        return Trail(about, rows, [mismatch.features for mismatch, _ in tried])

    def _alone(
        self, question: Question, prompt: Sequence[int], own: Answer, wanted: object, chosen: list[Mismatch]
    ) -> Steps:
        """Each on the own answer, which comes to `wanted`; and whether the answer without any does not."""
        labels: list[dict] = [{"kept_before": 0} for _ in chosen]
        again_differs = None
        if self.outcome and chosen:
            begun = [[*own.tokens[: m.at], m.substitute] for m in chosen] + [own.tokens[: chosen[0].at + 1]]
            *answers, again = yield [Run(prompt, each, mines=False) for each in begun]
            for label, answer in zip(labels, answers, strict=True):
                label["outcome"] = self._differs(question, answer, wanted)
            again_differs = self._differs(question, again, wanted)
        if self.likelihood and chosen:
            found = yield Losses(prompt, own.tokens, [(m.at, m.substitute) for m in chosen])
            for label, loss in zip(labels, found, strict=True):
                label |= self._lost(loss)
        return list(zip(chosen, labels, strict=True)), again_differs

    def _sequence(
        self, question: Question, prompt: Sequence[int], own: Answer, wanted: object, rng: random.Random
    ) -> Steps:
        """By outcome: behind a harmless substitute the target's own continuation is what is gone on with.

        Nothing is asked about likelihoods: the texts before and behind a kept substitute need not meet again.
        """
        tried: list[tuple[Mismatch, dict]] = []
        text, begin, kept = own, 0, 0
        share = min(1.0, self.most / max(1, len(own.mismatches)))
        while len(tried) < self.most:
            mismatch = next((m for m in text.mismatches if m.at >= begin and rng.random() < share), None)
            if mismatch is None:
                break
            (answer,) = yield [Run(prompt, [*text.tokens[: mismatch.at], mismatch.substitute])]
            label = {"kept_before": kept, "outcome": self._differs(question, answer, wanted)}
            tried.append((mismatch, label))
            begin = mismatch.at + 1
            if not label["outcome"]:
                text, kept = answer, kept + 1
        return tried

    def _spliced(self, prompt: Sequence[int], own: Answer, chosen: list[Mismatch]) -> Steps:
        """By likelihood: a harmless substitute stays in front of the rest of the own answer.

        What is known of a later mismatch is what it was in the own answer.
        """
        tried: list[tuple[Mismatch, dict]] = []
        text, shift, kept, free = list(own.tokens), 0, 0, 0  # place in text = place in the own answer + shift
        carried = 0.0
        for mismatch in chosen:
            if mismatch.at < free:  # the token is no longer there
                continue
            at = mismatch.at + shift
            (loss,) = yield Losses(prompt, text, [(at, mismatch.substitute)])
            label = {"kept_before": kept, **self._lost(loss, carried)}
            tried.append((mismatch, label))
            if not label["likelihood"]:
                carried += loss.nats
                text[at : at + 1 + loss.offset] = [mismatch.substitute]
                shift, kept, free = shift - loss.offset, kept + 1, mismatch.at + 1 + max(0, loss.offset)
        return tried

    def _outcome(self, question: Question, answer: Answer) -> object:
        return outcome(question, answer.text, run_code=self.run_code)

    def _differs(self, question: Question, answer: Answer, wanted: object) -> bool:
        return not answer.ended or self._outcome(question, answer) != wanted

    def _lost(self, loss: Loss, carried: float = 0.0) -> dict:
        return {"likelihood": loss.is_harm(self.nats - carried), "lost_nats": loss.nats, "carried_nats": carried,
                "offset": loss.offset}

    def _row(self, question: Question, own: Answer, mismatch: Mismatch, labels: dict) -> dict:
        before = "".join(map(self.text_of, own.tokens[: mismatch.at]))  # of a changed text nearly the same
        texts = {"own_text": self.text_of(mismatch.own), "text": self.text_of(mismatch.substitute)}
        in_code = is_in_code(before, own.text, question.category)
        return {"at": mismatch.at, "own": mismatch.own, "substitute": mismatch.substitute, **texts,
                "kind": kind_of(texts["own_text"], in_code), "in_code": in_code, **labels, "signals": mismatch.signals}


def digest_of(prompt: Sequence[int]) -> str:
    """What tells a question in any file: of the tokens that it is asked with."""
    return hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:16]


def follow(
    trails: Sequence[Steps], decoding: Decoding, tell: Callable[[], None] = lambda: None
) -> list[Trail]:
    """All trails to their ends, with runs of different trails decoded together: first those that mine, then those that
    do not, then losses.

    Args:
        tell: called behind each answer.
    """
    ends: list[Trail | None] = [None] * len(trails)
    mining, plain = deque(), deque()  # what waits: ((trail, which of its runs), run)
    losing: deque[tuple[int, Losses]] = deque()
    answers: dict[int, list[Answer | None]] = {}

    def advance(number: int, found: list | None) -> None:
        """Send a trail what it asked for; what it asks for next waits."""
        try:
            asked = next(trails[number]) if found is None else trails[number].send(found)
        except StopIteration as end:
            ends[number] = end.value
            return
        if isinstance(asked, Losses):
            losing.append((number, asked))
            return
        answers[number] = [None] * len(asked)
        for place, run in enumerate(asked):
            (mining if run.mines else plain).append(((number, place), run))

    for number in range(len(trails)):
        advance(number, None)
    while mining or plain or losing:
        if mining or plain:
            for (number, place), answer in decoding.answers(mining or plain, mines=bool(mining)):
                answers[number][place] = answer
                tell()
                if all(each is not None for each in answers[number]):
                    advance(number, answers[number])
        else:
            number, asked = losing.popleft()
            advance(number, losses(decoding.model.target, asked.prompt, asked.answer, asked.substitutions))
    return ends
