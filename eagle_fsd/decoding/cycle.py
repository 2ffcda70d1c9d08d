"""The decode cycle: draft, verify, accept, keep (EAGLE-2, arXiv 2406.16858, section 4).

B rows, L positions of a row in the target's cache, N tree nodes, K expanded nodes of a level, R vocabulary of the
draft, V vocabulary of the target, F width of the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import Rule
from ..acceptance.walk import Step, Within, walk
from ..drafting.copies import Copies
from ..drafting.noise import Coupling, gumbel_noise, position_after
from ..drafting.sizing import Plan
from ..drafting.tree import DraftTree, grow, join_copies, rerank, root_only
from ..models.target import TargetModel
from .batch import ALLOCATION_ERRORS, Batch
from .output import Receipt
from .processing import WARPERS, processed
from .request import EXACT, Request


def prefill(batch: Batch, number: int, most: int | None = None) -> list[Receipt]:
    """Process what is not cached of a prompt, at most this many tokens; after its last one, draw the first token of the
    answer, which is a walk on a tree with only a root. A text that has become long is continued in the same way, see
    `Batch.drop_finished`.

    Returns:
        Receipts of the new tokens of the answer.
    """
    request = batch.requests[number]
    features = batch.process_prompt(number, most)  # [tokens, F]
    if not request.receipts:
        request.stats.prefill_tokens += len(features)
    steps, error = [], None
    if batch.cache.lengths[number] == len(request.tokens):
        root = root_only(torch.tensor(request.tokens[-1:], device=batch.device))
        logits = batch.target.logits(features[-1][None, None])  # [1, 1, V]
        verified = VerifiedTrees.of([request], [len(request.tokens) - 1], root, logits)
        ((steps, error),) = _accept_group(EXACT, verified)
    if batch.drafting.largest.drafts:
        batch.catch_up(number)
    return request.append(steps, [None], error) if steps or error else []


def step(batch: Batch, joining: Sequence[Request] = ()) -> list[list[Receipt]]:
    """Run one cycle. Each request emits its accepted draft tokens and one token of the target. If memory runs out, the
    longest request ends with this error, and the others continue with the next cycle.

    On a GPU, few requests that cannot be captured move behind the others, and run less often, in a cycle of their own,
    see `CapturedCycles.groups`.

    Args:
        joining: requests that are being prefilled, for which the caches keep room.

    Returns:
        For each request, receipts of the new tokens of its answer; none if it was left out, or if an error ended it,
        see `Request.error`.
    """
    emitted: list[list[Receipt]] = [[] for _ in batch.requests]
    everyone = [(slice(0, len(emitted)), None)]
    for rows, settings in everyone if batch.captured is None else batch.captured.groups(batch):
        try:
            batch.make_room(joining)
            with batch.only(rows):
                emitted[rows] = _cycle(batch, settings)
        except ALLOCATION_ERRORS as error:
            max(batch.requests[rows], key=lambda request: len(request.tokens)).finish("error", error)
    return emitted


def _cycle(batch: Batch, settings: object) -> list[list[Receipt]]:
    requests, drafting = batch.requests, batch.drafting
    rules = [request.current_rule for request in requests]
    copies = [request.draft_copies(rule) for request, rule in zip(requests, rules, strict=True)]
    plan = drafting.plan(copies)
    if batch.captured is not None:
        walks = batch.captured.step(batch, settings, rules, copies)
        if walks is not None:  # else it cannot be captured
            return [request.append(*walk) for request, walk in zip(requests, walks, strict=True)]
    lengths = batch.cache.lengths  # L of each row: the position of its root

    # Draft.
    tree, draft_logits = draft_trees(batch, rules, plan, copies)
    # Verify.
    positions = tree.depths + torch.tensor(lengths, device=batch.device)[:, None]
    features = batch.target.verify(tree.tokens, positions, tree.ancestors, batch.cache)  # [B, N, F]
    logits = batch.target.logits(features)  # [B, N, V]
    # Accept.
    verified = VerifiedTrees.of(requests, lengths, tree, logits, draft_logits, batch.draft_tokens)
    walks = _accept(rules, verified)
    # Keep.
    paths = [[step.node for step in steps[: None if error is None else -1]] or [0] for steps, error in walks]
    batch.keep(lengths, paths, features, tree, plan.tree.top_k if draft_logits else 0)

    drafting.learn(plan, tree.tokens.shape[1], len(draft_logits), list(map(len, paths)), copied=any(copies))
    if plan.drafts and batch.observe is not None:
        batch.observe(tree, draft_logits, paths)
    return [request.append(steps, origins, error) for request, (steps, error), origins
            in zip(requests, walks, tree.origin_names(), strict=True)]


def draft_trees(
    batch: Batch, rules: Sequence[Rule], plan: Plan, copies: Sequence[Copies | None] = ()
) -> tuple[DraftTree, list[Tensor]]:
    """Trees of the drafter's nodes and of copies, and the drafter's logits by level, see `grow`. Without
    either, each tree is only a root.

    Afterwards the drafter has processed all features.
    """
    requests, depth = batch.requests, plan.tree.depth if plan.drafts else 0
    out_of_positions = [number for number in range(len(requests)) if depth and not batch.has_positions(number, depth)]
    if not depth or len(out_of_positions) == len(requests):
        tree = root_only(torch.tensor([request.tokens[-1] for request in requests], device=batch.device))
        logits: list[Tensor] = []
    else:
        coupling = _couple(batch, rules)
        unread = batch.unread(plan.tree, out_of_positions)
        before = batch.draft_cache.lengths
        scored, logits = grow(batch.drafter, batch.target, unread, batch.draft_cache, plan, coupling)
        tree = rerank(scored, plan, wide=any(copies))
        batch.features = [[] for _ in requests]
        if out_of_positions:  # the drafter processed their last tokens only to keep the batch in shape
            batch.draft_cache.lengths = [before[number] if number in out_of_positions else length
                                         for number, length in enumerate(batch.draft_cache.lengths)]
            tree = tree.cut([0 if number in out_of_positions else depth for number in range(len(requests))])
    tree = join_copies(tree, copies, plan) if any(copies) else tree
    return tree.cut([_levels(request, batch.target, tree.max_depth) for request in requests]), logits


def _levels(request: Request, target: TargetModel, most: int) -> int:
    """How many levels of a tree a request may have: none below the token with which a short text becomes long."""
    length, limit = len(request.tokens), target.position_limit
    if not request.options.speculative:
        return 0
    return most if limit(length) == limit(length + most) else limit(length) - length


def _couple(batch: Batch, rules: Sequence[Rule]) -> Coupling | None:
    """Couples drafts to the target's draws; None: no row is coupled."""
    requests = batch.requests
    weights = noise_weights_of(requests, rules)
    if not any(weights):
        return None
    own = [LogitsProcessorList(processor for processor in request.processors if type(processor) in WARPERS)
           for request in requests]
    if shared_processors(requests) is not None:
        own = own[:1] * len(own)
    seeds, positions = torch.tensor([[request.seed for request in requests], batch.cache.lengths], device=batch.device)
    temperatures, scales = torch.tensor(
        [[request.options.temperature for request in requests], weights], dtype=torch.float32, device=batch.device)
    return Coupling(seeds, positions, temperatures, scales, [
        warpers if weight else None for warpers, weight in zip(own, weights, strict=True)],
        batch.drafter.draft_vocab_size if batch.draft_tokens is None else batch.draft_tokens)


def noise_weights_of(requests: Sequence[Request], rules: Sequence[Rule]) -> list[float]:
    """Weights of the target's noise in the drafts of each row."""
    return [request.noise_weight(rule) for request, rule in zip(requests, rules, strict=True)]


# Acceptance ---------------------------------------------------------------------------------------------------------


@dataclass
class VerifiedTrees:
    """The draft trees of rows that share a rule, with the logits of draft and target: `acceptance.walk.Verified`.

    A processor that may depend on the text, or is the user's, is called row by row. Its exception becomes the error of
    this row, in `errors`.

    Args:
        raw: [B, N, V] float32, the target's logits. draft_logits: for each drafted level [B, K, R], raw logits.
        draft_tokens: [R] long; None: 0 to R - 1.
        seeds, lengths: [B] long, of each row; the position of its root.
        processors: of all rows; None: each of the `requests` has its own.
    """

    tree: DraftTree
    raw: Tensor
    draft_logits: Sequence[Tensor]
    draft_tokens: Tensor | None
    greedy: bool
    seeds: Tensor
    lengths: Tensor
    processors: LogitsProcessorList | None
    requests: Sequence[Request] = ()
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(
        cls, requests: Sequence[Request], lengths: Sequence[int], tree: DraftTree, raw: Tensor,
        draft_logits: Sequence[Tensor] = (), draft_tokens: Tensor | None = None,
    ) -> VerifiedTrees:
        """Those of requests."""
        seeds = [request.seed for request in requests]
        return cls(tree, raw, draft_logits, draft_tokens, requests[0].options.greedy,
                   *torch.tensor([seeds, lengths], device=raw.device), shared_processors(requests), requests)

    def select(self, rows: Sequence[int]) -> VerifiedTrees:
        """Some of the rows (ascending)."""
        if len(rows) == len(self.requests):
            return self
        requests = [self.requests[row] for row in rows]
        return replace(
            self, tree=self.tree.each(lambda part: part[rows]), raw=self.raw[rows],
            draft_logits=[level[rows] for level in self.draft_logits], seeds=self.seeds[rows],
            lengths=self.lengths[rows], requests=requests, errors={}, greedy=requests[0].options.greedy,
            processors=shared_processors(requests))

    def noise(self, depth: int) -> Tensor | None:
        """Noise [B, V] for the tokens after nodes of this depth, by seed and absolute position; None: greedy."""
        if self.greedy:
            return None
        return gumbel_noise(self.seeds, position_after(self.lengths[:, None], depth), self.raw.shape[-1])[:, 0]

    def warp(self, raw: Tensor, node: Tensor, path: Sequence[Tensor], going: Tensor) -> Tensor:
        """Processed logits [B, V], with the path of each row as context."""
        if self.processors is not None:
            return self.processors(None, raw.clone()) if self.processors else raw
        warped, paths = raw.clone(), torch.stack(list(path), 1)  # [B, depth + 1]
        for row in going.nonzero()[:, 0].tolist():
            request = self.requests[row]
            if row in self.errors or not request.processors:
                continue
            try:
                if request.complete_with(paths[row, 1:].tolist()):
                    continue
                before = torch.tensor([request.context], dtype=torch.long, device=raw.device)
                context = torch.cat([before, paths[row, None]], 1)
                warped[row] = processed(request.processors, context, raw[row, None].clone())[0]
            except Exception as error:
                self.errors[row] = error
        return warped


def shared_processors(requests: Sequence[Request]) -> LogitsProcessorList | None:
    """The processors of all rows, if one call serves them; None: each row has calls of its own."""
    key, *others = [request.processors_key for request in requests]
    return None if key is None or any(other != key for other in others) else requests[0].processors


def _accept(rules: Sequence[Rule], verified: VerifiedTrees) -> list[tuple[list[Step], Exception | None]]:
    """The steps of each request and the error in the last one. One walk serves all requests with the same rule."""
    requests, groups = verified.requests, []  # of rows
    for number, request in enumerate(requests):
        same = [rows for rows in groups if requests[rows[0]].options.greedy == request.options.greedy
                and _differ_in_threshold_only(rules[rows[0]], rules[number])]
        if same:
            same[0].append(number)
        else:
            groups.append([number])
    walks: dict[int, tuple[list[Step], Exception | None]] = {}
    for rows in groups:
        walks |= dict(zip(rows, _accept_group(rules[rows[0]], verified.select(rows)), strict=True))
    return [walks[number] for number in range(len(requests))]


def _accept_group(rule: Rule, verified: VerifiedTrees) -> list[tuple[list[Step], Exception | None]]:
    """`_accept` for requests that share a rule. If a user's rule fails, only those requests get its error, without
    steps, for which it also fails alone."""
    requests = verified.requests
    top = min(max(request.options.top_logprobs for request in requests), verified.raw.shape[-1])
    try:
        walks = walk(rule, verified, *_limits(requests, verified.raw.device), top)
    except Exception as error:
        if len(requests) == 1:
            return [([], error)]
        return [_accept_group(rule, verified.select([row]))[0] for row in range(len(requests))]
    return [(steps, verified.errors.get(row)) for row, steps in enumerate(walks)]


def _limits(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor | None, Within | None]:
    """The thresholds, budgets and marks of the requests, see `descend`."""
    def per_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    left = within = None
    # Not the current rule's: that rule is either this one or `exact`, which reads no threshold.
    threshold = per_row([request.rule.threshold for request in requests])
    if any(request.options.budget is not None for request in requests):
        left = per_row([request.remaining_budget for request in requests])
    if any(request.marks is not None for request in requests):
        marks = [(request.inside_marks, *(request.marks or (-1, -1))) for request in requests]
        inside_marks, opening, closing = torch.tensor(marks, device=device).unbind(1)
        within = Within(inside_marks.bool(), opening, closing)
    return threshold, left, within


def _differ_in_threshold_only(rule: Rule, other: Rule) -> bool:
    """Whether two rules are equal except for the threshold; False if a user's rule cannot be compared."""
    try:
        return type(rule) is type(other) and bool(replace(rule, threshold=other.threshold) == other)
    except Exception:
        return False
