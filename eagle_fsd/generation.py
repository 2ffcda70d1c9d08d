"""The decode loop: draft, verify, accept, commit; with stopping, streaming, statistics and receipts.

B batch (1 for now), L committed positions, N tree nodes, A accepted draft tokens of a cycle, D hidden size,
V vocabulary.
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

from .acceptance import Rule, Verification, walk
from .budget import Budget
from .config import TreeConfig
from .draft import DraftHead
from .drafting import draft_tree
from .noise import gumbel_noise
from .parallel import tensor_of_first
from .sampling import warp_tree
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
    """One request, checked and resolved."""

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
    cost: Callable[[int, int], float] | None = None  # see `Pause`


class Cycle(NamedTuple):
    """What one forward of the target emitted; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False


LONGEST_PAUSE = 64  # cycles without drafting
MEMORY = 8  # drafted cycles that decide about a pause


class Pause:
    """Stops drafting for a while where it does not pay, and tries again: ever more rarely, as long as it fails.

    Args:
        cost: of a cycle with so many nodes and levels, in cycles without drafting; None: drafting never stops.
    """

    def __init__(self, cost: Callable[[int, int], float] | None) -> None:
        self.cost = cost
        self.gain = 1.0  # running mean of what a drafted cycle emits beyond its cost
        self.left, self.length = 0, MEMORY // 2

    def drafts(self) -> bool:
        """Whether the next cycle drafts."""
        self.left -= 1
        return self.left < 0

    def learn(self, emitted: int, nodes: int, levels: int) -> None:
        """Take note of a drafted cycle."""
        if self.cost is None:
            return
        self.gain += (emitted - self.cost(nodes, max(1, levels)) - self.gain) / MEMORY
        if self.gain < 0:
            self.length = min(2 * self.length, LONGEST_PAUSE)
            self.left, self.gain = self.length, 0.0  # one more failure pauses again
        elif self.gain > 0.5:
            self.length = MEMORY // 2


class Decoder:
    """One request being decoded: holds both caches and the tokens, and advances cycle by cycle.

    Without a head or a tree it decodes plainly, one token per forward, with the same engine and the same noise.

    Args:
        earlier: the decoder of an earlier request to the same models; its caches are taken over, with as much of what
            they hold as is the beginning of this prompt. It cannot go on itself.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead | None, prompt: Sequence[int], settings: Settings,
        earlier: Decoder | None = None,
    ) -> None:
        self.target, self.head, self.settings = target, head, settings
        self.device = target.output_device  # trees, logits and features live there
        self.tokens = list(prompt)  # all emitted tokens; the last one is the root once decoding has begun
        self.prompt_length = len(self.tokens)
        self.budget = None if settings.budget is None else Budget(settings.budget)
        self.pause = Pause(settings.cost)
        self.seeds = torch.tensor([settings.seed], device=self.device)
        nodes, drafted = (settings.tree.nodes, settings.tree.depth * settings.tree.top_k) if settings.tree else (1, 0)
        room = len(prompt) + settings.max_new_tokens + nodes
        self.next_features: Tensor | None = None  # of the positions that the draft has not read
        if earlier is not None:
            self._take_over(earlier, room, room + drafted)
            return
        self.cache = target.new_cache(room)
        if head is not None:
            self.draft_cache = head.new_cache(room + drafted)

    def _take_over(self, earlier: Decoder, room: int, draft_room: int) -> None:
        """Go on with the caches of an earlier request.

        Of the positions that the prompts share, the draft needs the last one's feature again: it reads each feature
        with the token after it, and that token is new. Where it had read the feature already (a prompt that departs
        from the earlier one before its last cycle), the target processes that position once more.
        """
        if earlier.target is not self.target or earlier.head is not self.head:
            raise ValueError("the session was begun with another model: one Session per model")
        held = earlier.tokens[: earlier.cache.length]
        kept = shared_prefix(held, self.tokens[:-1])  # the last token's logits are wanted
        if self.target.limit_of(len(self.tokens)) != self.target.limit_of(len(earlier.tokens)):
            kept = 0  # the keys of a short text and those of a long one differ
        if self.head is not None:
            read = earlier.draft_cache.length
            if read < kept:
                self.next_features = earlier.next_features[:, : kept - read]
            else:
                kept = max(0, kept - 1)
                earlier.draft_cache.truncate(kept)
            self.draft_cache = earlier.draft_cache.with_room(draft_room)
        earlier.cache.truncate(kept)
        self.cache = earlier.cache.with_room(room)

    def prefill(self) -> Cycle:
        """The target reads what its cache does not hold of the prompt, and draws the first token."""
        prompt = torch.tensor([self.tokens[self.cache.length :]], device=self.device)
        features = self.target.prefill(prompt.to(self.target.device), self.cache).to(self.device)  # [1, L, D]
        raw = self.target.logits(features[:, -1:])  # [1, 1, V]
        root = root_only(prompt[:, -1])
        warped = warp_tree(self.settings.processors, self.tokens[:-1], root, raw)
        choice = (warped if self.settings.greedy else warped + self._noise(root, len(self.tokens) - 1)).argmax(-1)
        logprobs = raw.log_softmax(-1)[0, 0]
        token = tensor_of_first(self.target.group, choice).item()
        self.tokens.append(token)
        if self.next_features is not None:
            features = torch.cat([self.next_features, features], 1)
        # The draft reads each feature with the token after it.
        next_tokens = torch.tensor([self.tokens[-features.shape[1] :]], device=self.device)
        self.next_features, self.next_tokens = features, next_tokens
        logprob = logprobs[token].item()
        receipt = Receipt("target", None, logprob, logprobs.amax().item() - logprob)
        return Cycle([token], [receipt], [warped[0, 0, token].item()])

    def step(self) -> Cycle:
        """One cycle; emits the accepted draft tokens and one token of the target."""
        length = self.cache.length  # L; the root is the token at this position
        drafts = self.head is not None and self.settings.tree is not None and self.pause.drafts()
        tree, draft_logits = self._draft() if drafts else self._plain()
        features = self.target.verify(tree.tokens, tree.depths + length, tree.ancestors, self.cache)  # [1, N, D]
        logits = self.target.logits(features)
        warped = warp_tree(self.settings.processors, self.tokens[:-1], tree, logits)
        noise = None if self.settings.greedy else self._noise(tree, length)
        verification = Verification(tree, logits, warped, draft_logits, noise)
        if self.budget is None:
            decision = self.settings.rule(verification)
        else:
            decision = self.budget.decide(self.settings.rule, verification, self.tokens[self.prompt_length :])
        walked = walk(verification, decision)
        path, emitted, receipts, drawn = read_walk(verification, decision.divergence, walked, self.target.group)
        if self.budget is not None and self.budget.ended:
            receipts = [receipt._replace(exact_because=self.budget.ended) for receipt in receipts]
        self.cache.commit(length, length + path)
        next_features, next_tokens = features[:, path], torch.tensor([emitted], device=self.device)
        if drafts:
            self.pause.learn(len(emitted), tree.tokens.shape[1], tree.max_depth)
        elif self.head is not None:  # the draft has yet to read what came before
            next_features = torch.cat([self.next_features, next_features], 1)
            next_tokens = torch.cat([self.next_tokens, next_tokens], 1)
        self.next_features, self.next_tokens = next_features, next_tokens
        self.tokens += emitted
        return Cycle(emitted, receipts, drawn, tree.max_depth > 0)

    def _draft(self) -> tuple[DraftTree, Tensor]:
        assert self.head is not None and self.settings.tree is not None
        return draft_tree(
            self.head, self.target, self.next_features, self.next_tokens, self.draft_cache, self.settings.tree
        )

    def _plain(self) -> tuple[DraftTree, Tensor]:
        root = root_only(self.next_tokens[:, -1])
        return root, self.next_features.new_zeros(1, 1, self.target.vocab_size)

    def _noise(self, tree: DraftTree, length: int) -> Tensor:
        """[1, N, V] Gumbel noise for the token after each node, keyed by seed and that token's absolute position."""
        levels = torch.arange(tree.max_depth + 1, device=self.device) + length + 1
        noise = gumbel_noise(self.seeds, levels[None], self.target.vocab_size)  # [1, levels, V]
        return noise[0, tree.depths]


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
    divergence: Tensor | None,  # [1, N]
    walked,
    group: dist.ProcessGroup | None = None,  # processes that all go by the first one's walk
) -> tuple[Tensor, list[int], list[Receipt], list[float]]:
    """The accepted path as node indices [A + 1], the emitted tokens, their receipts and their processed logits: the
    cycle's one host copy."""
    tree, logits = verification.tree, verification.target_logits
    last = walked.last[:, None]
    final = walked.choice.gather(1, last)  # [1, 1]
    # Row i is the step into node i; the last column is the step out of the path's end.
    step_from = torch.cat([tree.parents, last], 1)
    step_to = torch.cat([tree.tokens, final], 1)
    normaliser = logits.logsumexp(-1)
    taken = logits[0, step_from[0], step_to[0]]
    logprobs = taken - normaliser[0, step_from[0]]
    regrets = logits.amax(-1)[0, step_from[0]] - taken
    nothing = torch.full_like(logprobs, torch.nan)
    gate = nothing if divergence is None else divergence[0, step_from[0]]
    warped = verification.warped_logits[0, step_from[0], step_to[0]]
    columns = tensor_of_first(group, torch.stack([
        torch.nn.functional.pad(walked.accepted[0], (0, 1), value=True).double(),
        step_to[0].double(),
        torch.nn.functional.pad(verification.is_exact[0], (0, 1)).double(),
        gate.double(),
        logprobs.double(),
        regrets.double(),
        warped.double(),
    ])).tolist()
    on_path, tokens, exact, gates, logprobs, regrets, drawn = columns
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
    emitted = [int(tokens[i]) for i in steps]
    return torch.tensor(path, device=logits.device), emitted, receipts, [drawn[i] for i in steps]


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
    prompt: Sequence[int],
    settings: Settings,
    *,
    stop_check=None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
) -> Output:
    """Decode one prompt to its end. Ending the streamer is up to the caller.

    Args:
        stop_check: function of the new tokens so far; True ends the answer with reason "stop".
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`.
        session: that of earlier requests to these models.
    """
    stats, receipts, reason = Stats(), [], "length"
    started = time.perf_counter()
    earlier = None
    if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
        earlier, session.decoder = session.decoder, None
    decoder = Decoder(target, head, prompt, settings, earlier)
    stats.prefill_tokens = len(prompt) - decoder.cache.length
    cycle = decoder.prefill()
    stats.prefill_seconds = time.perf_counter() - started
    new: list[int] = []
    while True:
        kept, ended = cut(cycle.tokens, list(prompt), new, settings, stop_check)
        for logit in cycle.logits[:kept]:  # behind an end a processor may have nothing to say
            require_drawable(logit)
        new += cycle.tokens[:kept]
        receipts += cycle.receipts[:kept]
        if streamer is not None:
            if hasattr(streamer, "on_receipts"):
                streamer.on_receipts(cycle.receipts[:kept])
            streamer.put(torch.tensor(cycle.tokens[:kept]))
        if ended:
            reason = ended
            break
        cycle = decoder.step()
        if decoder.budget is not None and decoder.budget.ended and stats.exact_because is None:
            stats.exact_from, stats.exact_because = len(new), decoder.budget.ended
        stats.accepted_lengths.append(len(cycle.tokens) - 1)
        stats.target_forwards += 1
        stats.undrafted += not cycle.drafted
    stats.decode_seconds = time.perf_counter() - started - stats.prefill_seconds
    stats.new_tokens = len(new)
    stats.budget_spent = None if decoder.budget is None else decoder.budget.spent
    if session is not None:
        session.decoder = decoder
    return Output(new, reason, settings.seed, stats, receipts)


def cut(
    emitted: list[int], prompt: list[int], new: list[int], settings: Settings, stop_check
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
        if settings.criteria and criteria_met(settings.criteria, prompt + so_far):
            return count, "stop"
        if len(so_far) == settings.max_new_tokens:
            return count, "length"
    return len(emitted), None


def criteria_met(criteria: StoppingCriteriaList, tokens: list[int]) -> bool:
    """Whether any of the criteria ends an answer of these tokens, the prompt included.

    Raises:
        TypeError: a criterion that answers neither with a bool nor with a tensor of one.
    """
    ids = torch.tensor([tokens])
    for criterion in criteria:
        found = criterion(ids, None)
        if not (isinstance(found, bool) or isinstance(found, Tensor) and found.numel() == 1):
            raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {found!r}")
        if found:
            return True
    return False
