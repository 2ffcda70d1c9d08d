"""The requests that an engine decodes at the moment: how they join, go on and leave. For one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..acceptance.budget import EXACT_RULE
from ..drafting.config import Choice, TreeConfig
from ..engine.decoder import Decoder
from ..engine.emission import Emission
from ..engine.forwards import Forwards
from ..engine.request import BatchSettings, Request
from ..pair import EagleModel
from .jobs import Job
from .prefixes import Prefixes
from .room import Room


@dataclass
class EngineStats:
    """Counters since the engine began; they only grow.

    Args:
        requests: taken by `submit`. finished: by finish_reason, "error" and "cancelled" included.
        prompt_tokens: of prompts that were read; reused_tokens: those of them that were copied from other requests.
        tokens: new ones. fuzzy: those of them that only a rule accepted.
        cycles: of the loop. forwards: verify forwards, counted for each request of a cycle; undrafted: those of them
            without a draft tree. accepted: draft tokens; tau is accepted / forwards + 1.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    fuzzy: int = 0
    cycles: int = 0
    forwards: int = 0
    undrafted: int = 0
    accepted: int = 0


class Rows:
    """Requests in one batch whose members change between cycles.

    A prompt is read in caches of its own, a part at a time, and joins the batch with its first token.

    Args:
        tree: of fuzzy requests, whose text depends on it. chooses: whether lossless ones get the model's own choice.
        kept: recent rows whose caches are kept for prompts that begin alike.
    """

    def __init__(
        self, model: EagleModel, tree: TreeConfig, room: Room, stats: EngineStats, *, chooses: bool, kept: int
    ) -> None:
        self.model, self.tree, self.room, self.stats, self.chooses = model, tree, room, stats, chooses
        self.levels = levels_of(model, tree)
        self.prefixes = Prefixes(kept, room.tokens // 2)
        self.jobs: list[Job] = []  # of the decoder's requests
        self.reading: tuple[Job, Decoder] | None = None  # the prompt that is being read
        self.decoder: Decoder | None = Decoder(
            model.target, model.draft, [], BatchSettings(lambda count: self._choice(self.jobs)), [])

    def choose_trees(self) -> None:
        """Make the choices now that take seconds to make, so that no request waits for them."""
        if self.chooses and self.model.draft is not None:
            assert self.model.trees is not None
            for temperature in sorted({entry.temperature for entry in self.model.trees.logs} or {0.0}):
                for power in range((self.room.rows - 1).bit_length() + 1):
                    self.model.trees.of(EXACT_RULE, temperature, min(1 << power, self.room.rows))

    def release(self) -> None:
        """Let go of the caches, behind the last cycle: decoder and rows hold each other, and would stay for long."""
        self.prefixes.kept.clear()
        self.decoder = None

    def __len__(self) -> int:
        return len(self.jobs) + (self.reading is not None)

    def _choice(self, jobs: Sequence[Job]) -> Choice:
        """The tree for these. A fuzzy rule's text depends on its tree and on pauses: it has always the same, and no
        pauses. That of others does not."""
        if not jobs or self.model.draft is None:
            return Choice(None)
        if self.chooses and all(job.settings.lossless for job in jobs):
            assert self.model.trees is not None
            return self.model.trees.of(EXACT_RULE, jobs[0].temperature, len(jobs))
        return Choice(self.tree)

    def fits(self, job: Job) -> bool:
        """Whether it can begin now."""
        if self.reading is not None:
            return False
        jobs = [*self.jobs, job]
        batches = self.model.target.batches([len(each.prompt) for each in jobs])
        return len(batches) == 1 and self.room.of([each.positions for each in jobs]) is not None

    def begin(self, job: Job) -> None:
        """Let a request that fits in; what ends it before its prompt is read ends it alone."""
        try:
            self._make_room([*self.jobs, job])
            target, head, length = self.model.target, self.model.draft, len(job.prompt)
            draft_cache = None if head is None else head.new_cache(length)
            forwards = Forwards(target, head, target.new_cache(length), draft_cache)
            batch = BatchSettings(lambda count: self._choice([*self.jobs, job]))
            alone = Decoder(target, head, [job.prompt], batch, [job.settings], forwards=forwards)
            self.prefixes.begin(alone.requests[0], forwards, self.decoder.forwards, self.decoder.requests)
            self.reading = job, alone
        except Exception as error:
            self.end(job, error)

    def _make_room(self, jobs: Sequence[Job]) -> None:
        """Caches that these fit into."""
        positions = [job.positions for job in jobs]
        cache, size = self.decoder.forwards.cache, self.room.of(positions)
        assert size is not None, "it was asked whether they fit"
        if cache.batch < len(jobs) or cache.capacity < max(positions) + self.room.nodes:
            rows, each = size
            self.decoder.forwards.resize(rows, each, each + self.levels)

    def read(self, most: int) -> int:
        """Read so many tokens of the prompt that is being read; returns how many it were."""
        assert self.reading is not None
        job, alone = self.reading
        request = alone.requests[0]
        before = alone.forwards.lengths[0]
        try:
            emission = alone.read(0, most)
            count = alone.forwards.lengths[0] - before
            if emission is None:
                return count
            request.take(emission, job)
        except Exception as error:
            self.reading = None
            self.end(job, error)
            return most
        self.stats.prompt_tokens += len(request.prompt)
        self.stats.reused_tokens += len(request.prompt) - request.stats.prefill_tokens
        self._count(request, 0)
        if request.reason is not None:
            self._remember(alone.forwards, 0, request)
            self.reading = None
            self.end(job, request)
        else:
            self.reading = None
            self.jobs.append(job)
            self.decoder.join(alone)
        return count

    def _remember(self, forwards: Forwards, number: int, request: Request) -> None:
        """Keep what a row leaves, where there is memory for what is not needed."""
        with suppress(RuntimeError):
            self.prefixes.add(forwards, number, request)

    def cycle(self) -> None:
        """One cycle of those that are being decoded; those that end leave."""
        emissions = self.decoder.step()
        self.stats.cycles += 1
        self.stats.forwards += len(emissions)
        ended: dict[int, Request | Exception] = {}
        for number, emission in enumerate(emissions):
            outcome = self._take(self.decoder.requests[number], self.jobs[number], emission)
            if outcome is not None:
                ended[number] = outcome
        self._leave(ended)

    def _take(self, request: Request, job: Job, emission: Emission) -> Request | Exception | None:
        """Add to an answer what its row emitted; returns the request or its error where it has ended."""
        before = len(request.new)
        self.stats.undrafted += not emission.drafted
        self.stats.accepted += max(0, len(emission.tokens) - 1)
        try:
            request.take(emission, job)
        except Exception as error:
            return error
        finally:
            self._count(request, before)
        return None if request.reason is None else request

    def _count(self, request: Request, before: int) -> None:
        self.stats.tokens += len(request.new) - before
        self.stats.fuzzy += sum(receipt.source == "fuzzy" for receipt in request.receipts[before:])

    def drop_cancelled(self) -> None:
        """Those that nobody waits for leave with what they have."""
        if self.reading is not None and self.reading[0].answer.cancelled:
            (job, _), self.reading = self.reading, None
            self.end(job, None)
        ended = {number: self.decoder.requests[number] for number, job in enumerate(self.jobs) if job.answer.cancelled}
        for request in ended.values():
            request.reason = "cancelled"
        self._leave(ended)

    def _leave(self, ended: dict[int, Request | Exception]) -> None:
        if not ended:
            return
        forwards, jobs = self.decoder.forwards, self.jobs
        for number, outcome in ended.items():
            if isinstance(outcome, Request):
                self._remember(forwards, number, outcome)
            else:
                forwards.erase(number)
        going = [number for number in range(len(jobs)) if number not in ended]
        self.jobs = [jobs[number] for number in going]
        try:
            self.decoder.keep(going)
        finally:  # they have ended, whatever becomes of the others
            for number, outcome in ended.items():
                self.end(jobs[number], outcome)

    def end(self, job: Job, outcome: Request | BaseException | None) -> None:
        """Hand on an answer or an error; None: it was cancelled before its first token."""
        if isinstance(outcome, BaseException):
            self.stats.finished["error"] += 1
            job.fail(outcome)
        else:
            self.stats.finished["cancelled" if outcome is None else str(outcome.reason)] += 1
            job.finish(outcome)

    @property
    def going(self) -> list[Job]:
        """All that are being read or decoded."""
        reading = self.reading
        return [*self.jobs, *([] if reading is None else [reading[0]])]

    def fail(self, error: BaseException) -> None:
        """The loop cannot go on: all end with its error."""
        going, self.jobs, self.reading = self.going, [], None
        for job in going:
            self.end(job, error)


def levels_of(model: EagleModel, tree: TreeConfig) -> int:
    """Positions that the draft's cache needs beside those of the target's: of the levels of any tree."""
    trees = [tree] if model.trees is None else [tree, *model.trees.largest]
    return max(each.depth * each.top_k for each in trees)


def nodes_of(model: EagleModel, tree: TreeConfig) -> int:
    """Nodes of the largest tree that may be drafted."""
    trees = [tree] if model.trees is None else [tree, *model.trees.largest]
    return 1 if model.draft is None else max(each.nodes for each in trees)
