"""The decode step: draft, verify, accept, commit.

B sequences of a batch, L committed positions of one, N tree nodes, A accepted draft tokens of a cycle, T positions that
the draft has not read, D hidden size, F width of the target's features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..acceptance import Decision, Verification, Walk, walk
from ..acceptance.budget import decide_rows
from ..heads.eagle import DraftHead
from ..models.parallel import tensor_of_first
from ..models.target import TargetModel
from ..trees.growth import draft_tree, extend_draft
from ..trees.tree import DraftTree, root_only
from .graphs import GraphCycles
from .noise import gumbel_noise
from .pause import Pause
from .receipts import Receipt
from .request import Emission, Request, Settings
from .sampling import warp_tree, warp_trees


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
        self.rows = [Request(prompt, own, target.device) for prompt, own in zip(prompts, settings, strict=True)]
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

    def prefill(self) -> list[Emission]:
        """The target reads each prompt as far as its cache does not hold it, and draws the first token."""
        return [self._prefill(number, row) for number, row in enumerate(self.rows)]

    def _prefill(self, number: int, row: Request) -> Emission:
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
        return Emission([token], [receipt], [warped[0, 0, token].item()])

    def step(self) -> list[Emission]:
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
) -> tuple[list[list[int]], list[Emission]]:
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
        said = [int(tokens[i]) for i in steps]
        cycles.append(Emission(said, receipts, [drawn[i] for i in steps], tree.max_depth > 0))
    return paths, cycles
