"""The decode step: draft, verify, accept, commit, emit.

Shapes: B requests of a batch, L committed positions of a request, N tree nodes, A accepted draft tokens of a cycle, F
width of the target's features, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..acceptance import Rule
from ..acceptance.walk import Step, Within, walk
from ..captured.cycle import CapturedCycles, Walked, log_uncaptured, obstacle
from ..drafting.drafter import Drafter
from ..drafting.sizing import Drafting
from ..drafting.tree import DraftTree, root_only
from ..models.target import TargetModel
from .forwards import Forwards
from .output import Receipt
from .processing import VerifiedTrees, couple
from .request import EXACT, Emission, Request

STEP = 256  # new tokens that caches have room for at first, unless cycles are captured, which need fixed addresses
# A captured cycle takes about half as long as another, however many rows it has (14.1 and 27.3 ms on an H100). Beside
# rows that cannot be captured, MANY times as many others run WAIT captured cycles for one of those: 4 of the many and 1
# of the few in 84 ms, in which 3 of all would run. With fewer, or without waiting, there would be fewer tokens in all.
MANY, WAIT = 3, 4
OUT_OF_MEMORY = (MemoryError, RuntimeError)  # what an allocation that fails raises: PyTorch's on a CPU, the second


class Decoder:
    """The decode loop, not a transformer stack: decodes requests together, cycle by cycle.

    Without a drafter, a tree or copies, decoding is plain: one token per forward, with the same noise.

    Args:
        drafting: the policy, new for each decoder.
        earlier: for a single request, the decoder of an earlier request to the same models, which cannot be used
            afterwards. Its caches are reused up to the first token that differs from the prompt.
        forwards: `Forwards` with empty caches, which the caller enlarges; None: they grow with the texts. Where cycles
            are captured, they have room for the longest text and the largest tree from the start.
        captured: runs those cycles of these models that can be captured; None: no cycle is captured.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, requests: Sequence[Request],
        drafting: Drafting, *, earlier: Decoder | None = None, forwards: Forwards | None = None,
        captured: CapturedCycles | None = None,
    ) -> None:
        self.target, self.drafter, self.requests = target, drafter, list(requests)
        self.captured, self.waited = captured, 0  # the latter: cycles since the last one of the others, see `step`
        self.device = target.output_device  # of trees, logits and features
        for request in self.requests:
            request.begin(target)
        self.drafting = drafting
        drafting.begin(self.requests, has_drafter=drafter is not None)
        self.draft_tokens = None if drafter is None else drafter.draft_tokens
        self.observe: Callable[[DraftTree, list[Tensor], list[list[int]]], None] | None = None
        # Positions of a row for the longest text and the largest cycle; None: the caller makes room.
        self._most: int | None = None
        self.forwards = forwards or self._forwards(earlier)

    def _forwards(self, earlier: Decoder | None) -> Forwards:
        """`Forwards` with room for the prompts and the next tokens, or for the whole texts if cycles are captured."""
        copying = any(request.copying for request in self.requests)
        self._nodes, self._levels = self.drafting.room(self.requests, copying)
        self._most = room = max((request.positions for request in self.requests), default=0) + self._nodes
        captured = self.captured is not None and self.captured.support(self.target, self.drafter)
        if not captured:
            room = min(room, max((len(request.prompt) for request in self.requests), default=0) + STEP + self._nodes)
        if earlier is not None:
            if earlier.target is not self.target or earlier.drafter is not self.drafter:
                raise ValueError("the session belongs to another model: use one Session per model")
            forwards = earlier.forwards
            (before,), (request,), limit = earlier.requests, self.requests, self.target.position_limit
            same = limit(len(before.prompt)) == limit(len(request.prompt))  # else its keys are others
            forwards.take_over(request, before.tokens if same else [])
            forwards.make_room(room, self._levels)
            return forwards
        count, draft_room = len(self.requests), 0 if self.drafter is None else room + self._levels
        if captured and count:
            return self.captured.forwards(room, draft_room, count)
        draft_cache = self.drafter.new_cache(draft_room, count) if draft_room else None
        return Forwards(self.target, self.drafter, self.target.new_cache(room, count), draft_cache)

    def prefill(self) -> list[list[Receipt]]:
        """Process the part of each prompt that is not cached, and draw the first token.

        Returns:
            For each request, receipts of the new tokens of its answer.
        """
        return [self.prefill_chunk(number) for number in range(len(self.requests))]

    def prefill_chunk(self, number: int = 0, most: int | None = None) -> list[Receipt]:
        """Process at most this many further tokens of a prompt (None: all); after the prompt's last one, draw the first
        token of the answer."""
        request = self.requests[number]
        features = self.forwards.prefill(number, request, most)  # [L, F]
        request.stats.prefill_tokens += len(features)
        complete = self.forwards.lengths[number] == len(request.prompt)
        emission = self._first(request, features[-1]) if complete else None
        if self.drafting.uses_drafter:
            self.forwards.prefill_draft(number, request)
        return [] if emission is None else request.append(emission)

    def _first(self, request: Request, features: Tensor) -> Emission:
        """Draw the first token, from the features [F] of the prompt's last token: a walk on a tree with only a root."""
        root = root_only(torch.tensor(request.prompt[-1:], device=self.device))
        logits = self.target.logits(features[None, None])  # [1, 1, V]
        ((_, emission),) = self._walk(EXACT, VerifiedTrees.of([request], [len(request.prompt) - 1], root, logits))
        return emission

    def step(self) -> list[list[Receipt]]:
        """Run one cycle. Each request emits its accepted draft tokens and one token of the target. If memory runs out,
        the longest request ends with this error, and the others continue with the next cycle.

        On a GPU, few requests that cannot be captured run in a cycle of their own, every `WAIT` cycles of the others.
        They move behind the others in `requests`.

        Returns:
            For each request, receipts of the new tokens of its answer; none if it was left out, or if an error ended
            it, see `Request.error`.
        """
        count, all_rows = self._captured_rows(), len(self.requests)
        emitted = self._step(slice(0, count))
        if count == all_rows:
            return emitted
        self.waited = (self.waited + 1) % WAIT
        return emitted + ([[]] * (all_rows - count) if self.waited else self._step(slice(count, all_rows)))

    def _step(self, rows: slice) -> list[list[Receipt]]:
        """A cycle of some rows."""
        requests = self.requests[rows]
        try:
            if self._most is not None:
                longest = max(len(request.tokens) for request in requests)
                self.forwards.make_room(longest + self._nodes, self._levels, self._most)
            with self.forwards.only(rows):
                return self._cycle(requests)
        except OUT_OF_MEMORY as error:
            max(requests, key=lambda request: len(request.tokens)).finish("error", error)
            return [[] for _ in requests]

    def _captured_rows(self) -> int:
        """How many rows run in a cycle without the others: those that can be captured, moved to the front; or all."""
        count, drafting = len(self.requests), self.drafting
        if self.captured is None or self.observe is not None:
            return count
        rules = [request.current_rule() for request in self.requests]
        tree = drafting.choice.tree if drafting.has_drafter else None
        obstacles = [obstacle(*row, tree is not None) for row in zip(self.requests, rules, strict=True)]
        for what in filter(None, obstacles):
            log_uncaptured(what)
        front = [number for number, what in enumerate(obstacles) if what is None]
        captured, able = len(front), [self.requests[number] for number in front]
        if captured == count or captured < MANY * (count - captured):
            return count
        if not self.captured.captures(able, [rules[number] for number in front], drafting.choice.plan(tree)) or (
                tree is not None and not all(self.forwards.has_positions(request, tree.depth) for request in able)):
            return count  # the others cannot be captured either
        for number in [number for number in range(captured) if obstacles[number] is not None]:
            other = front.pop()
            try:
                self.forwards.swap_rows(number, other)
            except OUT_OF_MEMORY:
                return count
            self.requests[number], self.requests[other] = self.requests[other], self.requests[number]
        return captured

    def _cycle(self, requests: Sequence[Request]) -> list[list[Receipt]]:
        """Draft, verify, accept and commit."""
        rules = [request.current_rule() for request in requests]
        lengths = self.forwards.lengths  # L of each: the position of the root
        copies = [request.draft_copies(rule) for request, rule in zip(requests, rules, strict=True)]
        plan = self.drafting.next(copies)
        if self.captured is not None and self.observe is None:
            walked = self.captured.step(requests, self.forwards, rules, plan, copies)
            if walked is not None:
                return [self._accept_walked(*row) for row in zip(requests, walked, strict=True)]
        coupling = None
        if plan.uses_drafter:
            vocabulary = self.drafter.draft_vocab_size if self.draft_tokens is None else self.draft_tokens
            coupling = couple(requests, rules, lengths, vocabulary, self.device)
        tree, draft_logits = self.forwards.draft(requests, plan, copies, coupling)
        if plain := [number for number, request in enumerate(requests) if not request.params.speculative]:
            tree = tree.without_drafts(plain)
        features = self.forwards.verify(tree)  # [B, N, F]
        logits = self.target.logits(features)  # [B, N, V]
        paths, emissions = self._accept(
            rules, VerifiedTrees.of(requests, lengths, tree, logits, draft_logits, self.draft_tokens))
        self.forwards.commit(lengths, paths, features, tree, plan.tree.top_k if draft_logits else 0)
        emitted = [len(emission.receipts) for emission in emissions]
        self.drafting.learn(plan, tree.tokens.shape[1], len(draft_logits), emitted, copied=any(copies))
        if plan.uses_drafter and self.observe is not None:
            self.observe(tree, draft_logits, paths)
        for request in requests:
            request.stats.draft_forwards += len(draft_logits) if request.params.speculative else 0
        return [request.append(emission) for request, emission in zip(requests, emissions, strict=True)]

    def _accept_walked(self, request: Request, walked: Walked) -> list[Receipt]:
        """Accept the path of a captured cycle."""
        request.stats.draft_forwards += walked.levels
        return request.append(_emission(walked.steps, walked.origins, request))

    def drop_finished(self) -> None:
        """Remove the requests that have ended."""
        going = [number for number, request in enumerate(self.requests) if request.reason is None]
        if len(going) < len(self.requests):
            self.requests = [self.requests[number] for number in going]
            self.forwards.keep_rows(going)
            self.drafting.resize(self.requests)

    def join(self, other: Decoder) -> None:
        """Add the requests of another decoder of the same models. The caches must have room for them."""
        if not self.requests:
            self.drafting.pause.begin()
        self.requests = [*self.requests, *other.requests]
        self.forwards.join(other.forwards)
        self.drafting.resize(self.requests)

    def _accept(self, rules: Sequence[Rule], verified: VerifiedTrees) -> tuple[list[list[int]], list[Emission]]:
        """The accepted path and the emission of each request. One walk serves all requests with the same rule."""
        requests, groups = verified.requests, []  # of rows
        for number, request in enumerate(requests):
            same = [rows for rows in groups if requests[rows[0]].params.greedy == request.params.greedy
                    and _differ_in_threshold_only(rules[rows[0]], rules[number])]
            if same:
                same[0].append(number)
            else:
                groups.append([number])
        results: dict[int, tuple[list[int], Emission]] = {}
        for rows in groups:
            results |= dict(zip(rows, self._walk(rules[rows[0]], verified.take(rows)), strict=True))
        paths, emissions = zip(*(results[number] for number in range(len(requests))), strict=True)
        return list(paths), list(emissions)

    def _walk(self, rule: Rule, verified: VerifiedTrees) -> list[tuple[list[int], Emission]]:
        """The accepted path and the emission of each of the requests, which share a rule. If a user's rule
        fails, only those requests get its error for which it also fails alone."""
        requests, errors = verified.requests, verified.errors
        top = max(request.params.top_logprobs for request in requests)
        try:
            walks = walk(rule, verified, *self._limits(requests), top)
        except Exception as error:
            if len(requests) == 1:
                return [([0], Emission([], [], error))]
            return [self._walk(rule, verified.take([row]))[0] for row in range(len(requests))]
        origins = verified.tree.origin_names()
        results = []
        for row, (request, steps) in enumerate(zip(requests, walks, strict=True)):
            path, emission = [step.node for step in steps], _emission(steps, origins[row], request)
            if row in errors:  # at the last node: the tokens before may end the answer
                path = path[:-1] or path
                emission = emission._replace(receipts=emission.receipts[:-1], logits=emission.logits[:-1],
                                             error=errors[row])
            results.append((path, emission))
        return results

    def _limits(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor | None, Within | None]:
        """The thresholds, budgets and marks of the requests, see `descend`."""
        left = within = None
        # Not the current rule's: that rule is either this one or `exact`, which reads no threshold.
        threshold = self._per_row([request.params.rule.threshold for request in requests])
        if any(request.params.budget is not None for request in requests):
            left = self._per_row([request.remaining_budget for request in requests])
        if any(request.params.within is not None for request in requests):
            marks = [(request.inside_marks, *(request.params.within or (-1, -1))) for request in requests]
            inside_marks, opening, closing = torch.tensor(marks, device=self.device).unbind(1)
            within = Within(inside_marks.bool(), opening, closing)
        return threshold, left, within

    def _per_row(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _differ_in_threshold_only(rule: Rule, other: Rule) -> bool:
    """Whether two rules are equal except for the threshold; False if a user's rule cannot be compared."""
    try:
        return type(rule) is type(other) and bool(replace(rule, threshold=other.threshold) == other)
    except Exception:
        return False


def _emission(steps: Sequence[Step], origins: Sequence[str | None], request: Request) -> Emission:
    """The emission of an accepted path. Its last token is the target's own, not a draft token.

    Args:
        origins: of each node, see `DraftTree.origin_names`.
    """
    by = [origins[step.node] for step in steps[1:]]  # for the tokens before the last one
    receipts = [
        Receipt(step.token, ("target" if step is steps[-1] else "exact") if step.is_exact else "fuzzy",
                None if math.isnan(step.divergence) else step.divergence, step.logprob, step.regret,
                request.exact_because or ("budget" if step.closed else None), drafter,
                (step.top or ())[: request.params.top_logprobs])
        for step, drafter in zip(steps, [*by, None], strict=True)
    ]
    return Emission(receipts, [step.logit for step in steps], proposed=Counter(filter(None, origins)))


@dataclass(eq=False)
class Session:
    """Keeps the caches of a request for the next one, which then processes only the new part of its prompt.

    All requests are to one model, one after the other. The text does not depend on the session. An error empties it.
    """

    decoder: Decoder | None = None  # of the last request
    weights: tuple | None = None  # of both models in the last request, see `weights_key`
