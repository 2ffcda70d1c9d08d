"""The decode loop: draft, verify, accept, commit; with stopping, streaming, statistics and receipts.

B sequences of a batch, L committed positions of one, N tree nodes, A accepted draft tokens of a cycle, T positions that
the draft has not read, D hidden size, F width of the target's features, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .acceptance import Decision, Rule, Verification, Walk, walk
from .budget import Budget, decide_rows
from .config import Choice, TreeConfig
from .draft import DraftHead
from .drafting import draft_tree, extend_draft
from .graphs import GraphCycles
from .noise import gumbel_noise
from .parallel import tensor_of_first
from .sampling import warp_tree, warp_trees
from .target import TargetModel
from .tree import DraftTree, root_only


class Receipt(NamedTuple):
    """How one token came to be.

    Args:
        source: "target" (drawn by the target after the accepted path), "exact" (a draft token that the target
            itself would have drawn there) or "fuzzy" (one that only the rule accepted).
        divergence: between target and draft at the token's position, where the rule computed it; else None.
        logprob: the token's log-probability (nats) under the target, before temperature and other processors.
        regret: that of the target's best token there minus `logprob`: 0 for the best token itself.
        exact_because: why the rule no longer decided, see `Stats`; None where it did, or there was no budget.
    """

    source: str
    divergence: float | None
    logprob: float
    regret: float
    exact_because: str | None = None


@dataclass
class Stats:
    """What a request cost. `accepted_lengths` counts accepted draft tokens per verify cycle, before any cut.

    The seconds of a request in a batch are those that it waited: they pass for all its requests at once.

    With a budget, `budget_spent` is what fuzzy acceptance has cost in nats, and `exact_from` the number of new tokens
    after which decoding returned to exact, with the reason in `exact_because`: "budget" or "repetition".
    `undrafted` counts verify forwards without a draft tree; `plain_because` says why a whole request had none.
    """

    new_tokens: int = 0
    target_forwards: int = 0  # verify forwards; the prefill is not counted
    accepted_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # up to and including the first token
    decode_seconds: float = 0.0
    budget_spent: float | None = None
    exact_from: int | None = None
    exact_because: str | None = None
    undrafted: int = 0
    plain_because: str | None = None
    prefill_tokens: int = 0  # positions that the prefill processed: the prompt without what a `Session` held of it

    @property
    def mean_accepted_length(self) -> float:
        """Acceptance length tau: tokens per verify forward, accepted draft tokens plus the target's own one."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) + 1 if self.accepted_lengths else 1.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over prefill plus decode time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0


@dataclass(frozen=True)
class Settings:
    """One request, checked and resolved. The requests of a batch differ in processors, seed and `max_new_tokens`."""

    rule: Rule
    tree: TreeConfig | None  # None: no drafting
    processors: LogitsProcessorList
    greedy: bool
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    budget: float | None = None  # nats, see `Budget`
    cost: Callable[[int, int], float] | None = None  # see `Choice`; None: drafting never pauses
    pause: Pause | None = None  # of earlier requests; None: one of its own
    choose: Callable[[int], Choice] | None = None  # tree and cost of fewer sequences, as others end; None: the same
    padding: Sequence[int] = ()  # before the prompt, for processors and criteria, which see it in `model.generate`


class Cycle(NamedTuple):
    """What one forward of the target emitted for a sequence; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False


SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles that decide about a pause


class Pause:
    """Stops drafting for a while where it does not pay, and tries again: ever more rarely, as long as it fails.

    Requests may share one, so that each begins with what the last one learned.
    """

    def __init__(self) -> None:
        self.gain = 1.0  # running mean of what a drafted cycle emits beyond its cost
        self.left, self.length = 0, SHORTEST_PAUSE // 2

    def begin(self) -> None:
        """A new request: try at once, and not too rarely. No success is trusted for long."""
        self.left, self.length, self.gain = 0, min(self.length, LONGEST_PAUSE // 2), min(self.gain, 1.0)

    def drafts(self) -> bool:
        """Whether the next cycle drafts."""
        self.left -= 1
        return self.left < 0

    def learn(self, gain: float) -> None:
        """Take note of a drafted cycle: tokens emitted, less its cost in cycles without drafting."""
        self.gain += (gain - self.gain) / MEMORY
        if gain > 0:
            self.length = max(self.length // 2, SHORTEST_PAUSE // 2)
        elif self.gain < 0:
            self.left = self.length = min(2 * self.length, LONGEST_PAUSE)


class Row:
    """One sequence of a batch: what is known of its text, and the answer so far."""

    def __init__(self, prompt: Sequence[int], settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.prompt = list(prompt)
        self.padding = list(settings.padding)
        self.tokens = list(prompt)  # prompt and all emitted tokens; the last one is the root once decoding has begun
        self.features: Tensor | None = None  # [T, F] of the positions before the last T tokens: the draft's next input
        self.budget = None if settings.budget is None else Budget(settings.budget)
        self.new: list[int] = []  # the answer
        self.receipts: list[Receipt] = []
        self.stats = Stats()
        self.reason: str | None = None  # why it ended

    @property
    def context(self) -> list[int]:
        """What processors see of the text before the root."""
        return [*self.padding, *self.tokens[:-1]]

    def unread(self, device: torch.device) -> Tensor:
        """[T] tokens that the draft has not read, each the one after its feature."""
        assert self.features is not None
        return torch.tensor(self.tokens[-len(self.features) :], device=device)

    def take(self, cycle: Cycle, stop_check: Callable | None, streamer: BaseStreamer | None) -> None:
        """Add what a cycle emitted to the answer, as far as it belongs to it."""
        kept, self.reason = cut(
            cycle.tokens, self.padding + self.prompt, self.new, self.settings, stop_check, self.device)
        for logit in cycle.logits[:kept]:  # behind an end a processor may have nothing to say
            require_drawable(logit)
        self.new += cycle.tokens[:kept]
        self.receipts += cycle.receipts[:kept]
        if streamer is not None:
            if hasattr(streamer, "on_receipts"):
                streamer.on_receipts(cycle.receipts[:kept])
            streamer.put(torch.tensor(cycle.tokens[:kept]))

    def count(self, cycle: Cycle) -> Cycle:
        """Note what a verify forward did; returns the cycle, its receipts with why the rule no longer decided."""
        if self.budget is not None and self.budget.ended:
            receipts = [receipt._replace(exact_because=self.budget.ended) for receipt in cycle.receipts]
            cycle = cycle._replace(receipts=receipts)
            if self.stats.exact_because is None:
                self.stats.exact_from, self.stats.exact_because = len(self.new), self.budget.ended
        self.stats.accepted_lengths.append(len(cycle.tokens) - 1)
        self.stats.target_forwards += 1
        self.stats.undrafted += not cycle.drafted
        return cycle

    def output(self) -> Output:
        """The answer, ended."""
        assert self.reason is not None
        self.stats.new_tokens = len(self.new)
        self.stats.budget_spent = None if self.budget is None else self.budget.spent
        return Output(self.new, self.reason, self.settings.seed, self.stats, self.receipts)


class Decoder:
    """Requests being decoded together: holds both caches and the rows, and advances cycle by cycle.

    Without a head or a tree it decodes plainly, one token per forward, with the same engine and the same noise.

    Args:
        earlier: the decoder of an earlier request to the same models, for a single request; its caches are taken over,
            with as much of what they hold as is the beginning of this prompt. It cannot go on itself.
        graphs: caches and cycles of static shapes, for a single request; what they do not serve runs without.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]],
        settings: Sequence[Settings], earlier: Decoder | None = None, graphs: GraphCycles | None = None,
    ) -> None:
        self.target, self.head, self.settings = target, head, settings[0]
        self.device = target.output_device  # trees, logits and features live there
        self.rows = [Row(prompt, own, target.device) for prompt, own in zip(prompts, settings, strict=True)]
        self.seeds = torch.tensor([own.seed for own in settings], device=self.device)
        self.tree, self.cost = self.settings.tree, self.settings.cost
        self.pause = self.settings.pause or Pause()
        self.pause.begin()
        self.graphs: GraphCycles | None = None
        trees = [self.tree]
        if self.settings.choose is not None:
            trees += [self.settings.choose(count).tree for count in range(1, len(self.rows))]
        nodes = max(tree.nodes if tree else 1 for tree in trees)
        drafted = max(tree.depth * tree.top_k if tree else 0 for tree in trees)
        longest = max(len(row.prompt) + row.settings.max_new_tokens for row in self.rows)
        room = longest + nodes
        if earlier is not None:
            self._take_over(earlier, room, room + drafted)
            return
        if graphs is not None and len(self.rows) == 1 and graphs.serve(longest, trees):
            self.graphs = graphs
            self.cache, self.draft_cache = graphs.reset()
            return
        self.cache = target.new_cache(room, len(self.rows))
        if head is not None:
            self.draft_cache = head.new_cache(room + drafted, len(self.rows))

    def _take_over(self, earlier: Decoder, room: int, draft_room: int) -> None:
        """Go on with the caches of an earlier request.

        Of the positions that the prompts share, the draft needs the last one's feature again: it reads each feature
        with the token after it, and that token is new. Where it had read the feature already (a prompt that departs
        from the earlier one before its last cycle), the target processes that position once more.
        """
        if earlier.target is not self.target or earlier.head is not self.head:
            raise ValueError("the session was begun with another model: one Session per model")
        (row,), (before,) = self.rows, earlier.rows
        held = before.tokens[: earlier.cache.length]
        kept = shared_prefix(held, row.tokens[:-1])  # the last token's logits are wanted
        if self.target.limit_of(len(row.tokens)) != self.target.limit_of(len(before.tokens)):
            kept = 0  # the keys of a short text and those of a long one differ
        if self.head is not None:
            read = earlier.draft_cache.length
            if read < kept:
                row.features = before.features[: kept - read]
            else:
                kept = max(0, kept - 1)
                earlier.draft_cache.truncate(kept)
            self.draft_cache = earlier.draft_cache.with_room(draft_room)
        earlier.cache.truncate(kept)
        self.cache = earlier.cache.with_room(room)

    def prefill(self) -> list[Cycle]:
        """The target reads each prompt as far as its cache does not hold it, and draws the first token."""
        return [self._prefill(number, row) for number, row in enumerate(self.rows)]

    def _prefill(self, number: int, row: Row) -> Cycle:
        with self.cache.one_row(number):
            prompt = torch.tensor([row.tokens[self.cache.length :]], device=self.device)
            features = self.target.prefill(prompt.to(self.target.device), self.cache).to(self.device)  # [1, L, F]
        row.stats.prefill_tokens = prompt.shape[1]
        raw = self.target.logits(features[:, -1:])  # [1, 1, V]
        root = root_only(prompt[:, -1])
        warped = warp_tree(row.settings.processors, row.context, root, raw)
        noise = 0 if self.settings.greedy else self._noise(root, [len(row.tokens) - 1], self.seeds[number, None])
        token = tensor_of_first(self.target.group, (warped + noise).argmax(-1)).item()
        logprobs = raw.log_softmax(-1)[0, 0]
        logprob = logprobs[token].item()
        row.tokens.append(token)
        row.features = features[0] if row.features is None else torch.cat([row.features, features[0]])
        if self.head is not None and self.tree is not None and len(row.features) > 1:
            with self.draft_cache.one_row(number):
                extend_draft(self.head, [row.features[:-1]], [row.unread(self.device)[:-1]], self.draft_cache)
            row.features = row.features[-1:].clone()
        receipt = Receipt("target", None, logprob, logprobs.amax().item() - logprob)
        return Cycle([token], [receipt], [warped[0, 0, token].item()])

    def step(self) -> list[Cycle]:
        """One cycle; each row emits its accepted draft tokens and one token of the target."""
        lengths, place = self.cache.lengths, self.cache.length  # L of each row: the root is the token there
        drafts = self.head is not None and self.tree is not None and self.pause.drafts()
        graphs = self.graphs if self.graphs and self.graphs.failed is None else None
        forwards = None if graphs is None else self._replay(graphs, drafts)
        if forwards is None:
            tree, draft_logits = self._draft() if drafts else self._plain()
            positions = tree.depths + torch.tensor(lengths, device=self.device)[:, None]
            features = self.target.verify(tree.tokens, positions, tree.ancestors, self.cache)  # [B, N, F]
        else:
            place, tree, draft_logits, features = forwards
        logits = self.target.logits(features)
        processors = [row.settings.processors for row in self.rows]
        warped = warp_trees(processors, [row.context for row in self.rows], tree, logits)
        noise = None if self.settings.greedy else self._noise(tree, lengths, self.seeds)
        verification = Verification(tree, logits, warped, draft_logits, noise)
        decision = self._decide(verification)
        walked = walk(verification, decision)
        paths, cycles = read_walk(verification, decision.divergence, walked, self.target.group)
        self.cache.commit(lengths, [[place + node for node in path] for path in paths])
        if drafts and self.cost is not None:
            emitted = sum(len(cycle.tokens) for cycle in cycles) / len(cycles)
            self.pause.learn(emitted - self.cost(tree.tokens.shape[1], max(1, tree.max_depth)))
        for number, (row, path, cycle) in enumerate(zip(self.rows, paths, cycles, strict=True)):
            own = features[number, path]  # [A + 1, F]
            row.features = own if drafts or self.head is None else torch.cat([row.features, own])
            row.tokens += cycle.tokens
        return cycles

    def keep(self, numbers: Sequence[int]) -> None:
        """Go on with these rows only, ascending."""
        self.rows = [self.rows[number] for number in numbers]
        self.seeds = self.seeds[list(numbers)]
        self.cache.keep_rows(numbers)
        if self.head is not None:
            self.draft_cache.keep_rows(numbers)
        if self.settings.choose is not None:
            choice = self.settings.choose(len(numbers))
            self.tree, self.cost = choice.tree, choice.cost

    @property
    def _keep_logits(self) -> bool:
        return self.settings.rule.reads_draft and not self.settings.rule.is_lossless(self.settings.greedy)

    def _draft(self) -> tuple[DraftTree, Tensor]:
        unread = [row.unread(self.device) for row in self.rows]
        return draft_tree(
            self.head, self.target, [row.features for row in self.rows], unread, self.draft_cache, self.tree,
            keep_logits=self._keep_logits,
        )

    def _replay(self, graphs: GraphCycles, drafts: bool) -> tuple[int, DraftTree, Tensor, Tensor] | None:
        """Draft and verify by graphs: where the nodes' keys lie, tree, draft's logits and features.

        None where they cannot be captured: nothing is lost then, and all goes on without.
        """
        (row,), length = self.rows, self.cache.length
        read = self.draft_cache.length if self.draft_cache is not None else 0
        try:
            cycle = graphs.of(self.tree if drafts else None, drafts and self._keep_logits, length)
            if drafts:
                unread = row.unread(self.device)
                before = len(unread) - cycle.most  # what was emitted without drafting
                if before > 0:
                    extend_draft(self.head, [row.features[:before]], [unread[:before]], self.draft_cache)
                    row.features, unread, read = row.features[before:], unread[before:], self.draft_cache.length
                tree, draft_logits = cycle.draft(row.features, unread, read, length)
                self.draft_cache.commit([read], [range(cycle.place, cycle.place + len(unread))])
            else:
                tree = cycle.begin(row.tokens[-1], length)
                draft_logits = torch.zeros(1, 1, self.target.vocab_size, device=self.device)
            return cycle.place, tree, draft_logits, cycle.verify()
        except RuntimeError as error:  # of a capture; errors of the device itself come again without graphs
            graphs.fail(error)
            self.cache.commit([length], [[]])
            if self.draft_cache is not None:
                self.draft_cache.commit([read], [[]])
            return None

    def _plain(self) -> tuple[DraftTree, Tensor]:
        root = root_only(torch.tensor([row.tokens[-1] for row in self.rows], device=self.device))
        return root, torch.zeros(len(self.rows), 1, self.target.vocab_size, device=self.device)

    def _decide(self, verification: Verification) -> Decision:
        if self.settings.budget is None:
            return self.settings.rule(verification)
        new_tokens = [row.tokens[len(row.prompt) :] for row in self.rows]
        return decide_rows([row.budget for row in self.rows], self.settings.rule, verification, new_tokens)

    def _noise(self, tree: DraftTree, lengths: Sequence[int], seeds: Tensor) -> Tensor:
        """[B, N, V] Gumbel noise for the token after each node, keyed by seed and that token's absolute position."""
        levels = torch.arange(1, tree.max_depth + 2, device=self.device)
        positions = torch.tensor(lengths, device=self.device)[:, None] + levels
        noise = gumbel_noise(seeds, positions, self.target.vocab_size)  # [B, levels, V]
        return noise[torch.arange(len(seeds), device=self.device)[:, None], tree.depths]


def require_drawable(logit: float) -> None:
    """Raise where the token drawn has no probability: no other had any either, or a NaN came out on top."""
    if not logit > -math.inf:
        raise ValueError(f"no token can be drawn: after the logits processors the best logit is {logit}")


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(eq=False)
class Session:
    """Keeps the caches of one request for the next, which then processes only what its prompt adds.

    For requests to one model, one after the other. The text does not depend on it. After an error it is empty.
    """

    decoder: Decoder | None = None  # of the last request


def read_walk(
    verification: Verification,
    divergence: Tensor | None,  # [B, N]
    walked: Walk,
    group: dist.ProcessGroup | None = None,  # processes that all go by the first one's walk
) -> tuple[list[list[int]], list[Cycle]]:
    """Of each row the accepted path as node indices (A + 1) and what it emits: the cycle's one host copy."""
    tree, logits = verification.tree, verification.target_logits
    last = walked.last[:, None]
    final = walked.choice.gather(1, last)  # [B, 1]
    # Column i is the step into node i; the last one is the step out of the path's end.
    step_from = torch.cat([tree.parents, last], 1)  # [B, N + 1]
    step_to = torch.cat([tree.tokens, final], 1)
    step = step_from * logits.shape[-1] + step_to
    taken = logits.flatten(1).gather(1, step)
    nothing = torch.full_like(taken, torch.nan)
    columns = tensor_of_first(group, torch.stack([
        torch.nn.functional.pad(walked.accepted, (0, 1), value=True).double(),
        step_to.double(),
        torch.nn.functional.pad(verification.is_exact, (0, 1)).double(),
        (nothing if divergence is None else divergence.gather(1, step_from)).double(),
        (taken - logits.logsumexp(-1).gather(1, step_from)).double(),  # log-probability
        (logits.amax(-1).gather(1, step_from) - taken).double(),  # regret
        verification.warped_logits.flatten(1).gather(1, step).double(),
    ], 1)).tolist()  # [B, 7, N + 1]
    paths, cycles = [], []
    for on_path, tokens, exact, gates, logprobs, regrets, drawn in columns:
        path = [i for i, kept in enumerate(on_path[:-1]) if kept]  # by level: from the root down
        steps = [*path[1:], len(on_path) - 1]
        receipts = [
            Receipt(
                "target" if i == steps[-1] else "exact" if exact[i] else "fuzzy",
                None if gates[i] != gates[i] else gates[i],
                logprobs[i],
                regrets[i],
            )
            for i in steps
        ]
        paths.append(path)
        cycles.append(Cycle([int(tokens[i]) for i in steps], receipts, [drawn[i] for i in steps], tree.max_depth > 0))
    return paths, cycles


@dataclass
class Output:
    """Result of `eagle_fsd.generate`. `token_ids` are the new tokens only, an end token included."""

    token_ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"
    seed: int
    stats: Stats
    receipts: list[Receipt]
    text: str | None = None  # without the stop string; None where the model has no tokenizer


@torch.inference_mode()
def run(
    target: TargetModel,
    head: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Settings],
    *,
    stop_check: Callable | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    graphs: GraphCycles | None = None,
) -> list[Output]:
    """Decode prompts together to their ends. Ending the streamer is up to the caller.

    Args:
        stop_check: function of the new tokens so far; True ends the answer with reason "stop".
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`.
        session: that of earlier requests to these models. It and the streamer serve a single prompt.
        graphs: see `Decoder`; in use by another request, or with a session, which keeps its caches, they are left.
    """
    if graphs is not None and session is None and len(prompts) == 1 and graphs.in_use.acquire(blocking=False):
        try:
            return _run(target, head, prompts, settings, stop_check, streamer, None, graphs)
        finally:
            graphs.in_use.release()
    return _run(target, head, prompts, settings, stop_check, streamer, session, None)


def _run(
    target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]], settings: Sequence[Settings],
    stop_check: Callable | None, streamer: BaseStreamer | None, session: Session | None, graphs: GraphCycles | None,
) -> list[Output]:
    started = time.perf_counter()
    earlier = None
    if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
        earlier, session.decoder = session.decoder, None
    decoder = Decoder(target, head, prompts, settings, earlier, graphs)
    rows = list(decoder.rows)
    cycles = decoder.prefill()
    prefilled = time.perf_counter()
    while True:
        for row, cycle in zip(decoder.rows, cycles, strict=True):
            row.take(cycle, stop_check, streamer)
            if row.reason is not None:
                row.stats.prefill_seconds = prefilled - started
                row.stats.decode_seconds = time.perf_counter() - prefilled
        going = [number for number, row in enumerate(decoder.rows) if row.reason is None]
        if not going:
            break
        if len(going) < len(decoder.rows):
            decoder.keep(going)
        cycles = [row.count(cycle) for row, cycle in zip(decoder.rows, decoder.step(), strict=True)]
    if session is not None:
        session.decoder = decoder
    return [row.output() for row in rows]


def cut(
    emitted: list[int], prompt: list[int], new: list[int], settings: Settings, stop_check, device: torch.device
) -> tuple[int, str | None]:
    """How many of the emitted tokens belong to the answer, and why it ends with them (None: it goes on)."""
    for count, token in enumerate(emitted, 1):
        if token in settings.eos_ids:
            return count, "eos"
        if token in settings.stop_ids:
            return count, "stop"
        so_far = new + emitted[:count]
        if stop_check is not None and stop_check(so_far):
            return count, "stop"
        if settings.criteria and criteria_met(settings.criteria, prompt + so_far, device):
            return count, "stop"
        if len(so_far) == settings.max_new_tokens:
            return count, "length"
    return len(emitted), None


def criteria_met(criteria: StoppingCriteriaList, tokens: list[int], device: torch.device) -> bool:
    """Whether any of the criteria ends an answer of these tokens, the prompt included; they see them on this device.

    Raises:
        TypeError: a criterion that answers neither with a bool nor with a tensor of one.
    """
    ids = torch.tensor([tokens], device=device)
    for criterion in criteria:
        found = criterion(ids, None)
        if not (isinstance(found, bool) or isinstance(found, Tensor) and found.numel() == 1):
            raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {found!r}")
        if found:
            return True
    return False
