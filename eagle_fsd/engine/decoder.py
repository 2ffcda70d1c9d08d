"""The decode step: draft, verify, accept, commit, emit.

B requests of a batch, L committed positions of one, N tree nodes, A accepted draft tokens of a cycle, F width of the
target's features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceptance import Decision, Verification, walk
from ..acceptance.budget import EXACT_RULE, decide_rows
from ..heads.eagle import DraftHead
from ..models.parallel import tensor_of_first
from ..models.target import TargetModel
from ..trees.config import Choice
from ..trees.tree import DraftTree, root_only
from .drafting import Drafting
from .emission import Emission, Step, emitted, read_walk, walk_stepwise
from .forwards import Forwards
from .graphs import GraphCycles, GraphForwards
from .noise import gumbel_noise
from .receipts import Receipt
from .request import BatchSettings, Request, RequestSettings
from .sampling import warp_tree, warp_trees

STEPWISE_FROM = 1 << 18  # logits of a tree from which on a walk node by node is faster, on a CPU


class Decoder:
    """Requests being decoded together: holds them and the forwards, and advances cycle by cycle.

    Without a head or a tree it decodes plainly, one token per forward, with the same engine and the same noise.

    Args:
        earlier: the decoder of an earlier request to the same models, for a single request; its caches are taken over,
            with as much of what they hold as is the beginning of this prompt. It cannot go on itself.
        graphs: caches and cycles of static shapes, for a single request; what they do not serve runs without.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]], batch: BatchSettings,
        settings: Sequence[RequestSettings], earlier: Decoder | None = None, graphs: GraphCycles | None = None,
    ) -> None:
        self.target, self.head, self.rule, self.greedy = target, head, batch.rule, batch.greedy
        self.device = target.output_device  # trees, logits and features live there
        self.requests = [Request(prompt, own, target.device) for prompt, own in zip(prompts, settings, strict=True)]
        self.seeds = torch.tensor([own.seed for own in settings], device=self.device)
        choose = batch.choose if head is not None else lambda count: Choice(None)
        self.drafting = Drafting(choose, len(self.requests), batch.pause)
        lossless = batch.rule.is_lossless(batch.greedy)
        self.keeps_draft_logits = batch.rule.reads_draft and not lossless
        self.draft_tokens = None if head is None or head.names_all else head.target_tokens
        # The KL of a cycle's law, which a budget counts when sampling, is a sum over the whole tree.
        local = (lossless or not batch.rule.looks_ahead) and (batch.greedy or settings[0].budget is None)
        self.walks_stepwise = local and self.device.type == "cpu" and target.group is None
        self.forwards = self._forwards(earlier, graphs)

    def _forwards(self, earlier: Decoder | None, graphs: GraphCycles | None) -> Forwards:
        """Forwards with room for the longest text and the largest tree."""
        trees = self.drafting.possible
        nodes = max(tree.nodes if tree else 1 for tree in trees)
        drafted = max(tree.depth * tree.top_k if tree else 0 for tree in trees)
        longest = max(len(request.prompt) + request.settings.max_new_tokens for request in self.requests)
        room, count = longest + nodes, len(self.requests)
        if earlier is not None:
            if earlier.target is not self.target or earlier.head is not self.head:
                raise ValueError("the session was begun with another model: one Session per model")
            earlier.forwards.take_over(self.requests[0], earlier.requests[0], room, room + drafted)
            return earlier.forwards
        if graphs is not None and count == 1 and graphs.serve(longest, trees):
            return GraphForwards(graphs)
        draft_cache = None if self.head is None else self.head.new_cache(room + drafted, count)
        return Forwards(self.target, self.head, self.target.new_cache(room, count), draft_cache)

    def prefill(self) -> list[Emission]:
        """The target reads each prompt as far as its cache does not hold it, and draws the first token."""
        return [self._prefill(number, request) for number, request in enumerate(self.requests)]

    def _prefill(self, number: int, request: Request) -> Emission:
        features = self.forwards.prefill(number, request)  # [L, F]
        request.stats.prefill_tokens = len(features)
        raw = self.target.logits(features[None, -1:])  # [1, 1, V]
        root = root_only(torch.tensor(request.tokens[-1:], device=self.device))
        warped = warp_tree(request.settings.processors, request.context, root, raw)
        noise = 0 if self.greedy else self._noise(root, [len(request.tokens) - 1], self.seeds[number, None])
        token = tensor_of_first(self.target.group, (warped + noise).argmax(-1)).item()
        logprobs = raw.log_softmax(-1)[0, 0]
        logprob = logprobs[token].item()
        receipt = Receipt("target", None, logprob, logprobs.amax().item() - logprob)
        emission = Emission([token], [receipt], [warped[0, 0, token].item()])
        request.advance(emission, None if self.head is None else features)
        if self.drafting.choice.tree is not None:
            self.forwards.read(number, request)
        return emission

    def step(self) -> list[Emission]:
        """One cycle; each request emits its accepted draft tokens and one token of the target."""
        config, lengths = self.drafting.next(), self.forwards.lengths  # L: the root is the token there
        tree, draft_logits = self.forwards.draft(self.requests, config, self.keeps_draft_logits)
        features = self.forwards.verify(tree)  # [B, N, F]
        paths, emissions = self._accept(tree, features, draft_logits, lengths)
        self.forwards.commit(lengths, paths)
        if config is not None:
            self.drafting.learn(tree, [len(emission.tokens) for emission in emissions])
        for number, request in enumerate(self.requests):
            request.advance(emissions[number], None if self.head is None else features[number, paths[number]])
        return emissions

    def keep(self, numbers: Sequence[int]) -> None:
        """Go on with these requests only, ascending."""
        self.requests = [self.requests[number] for number in numbers]
        self.seeds = self.seeds[list(numbers)]
        self.forwards.keep(numbers)
        self.drafting.keep(len(numbers))

    def _accept(
        self, tree: DraftTree, features: Tensor, draft_logits: Tensor, lengths: Sequence[int]
    ) -> tuple[list[list[int]], list[Emission]]:
        """The accepted path of each request, from the target's features [B, N, F] and the draft's logits, and what it
        emits."""
        logits = self.target.logits(features)  # [B, N, V]
        seen = features if self.rule.reads_features else None
        if self.walks_stepwise and logits[0].numel() >= STEPWISE_FROM:
            walks = [self._walk_stepwise(number, tree, seen, logits, draft_logits, at)
                     for number, at in enumerate(lengths)]
            return emitted(walks, tree)
        verification = self._verification(tree, seen, logits, draft_logits, lengths)
        decision = self._decide(verification)
        return read_walk(verification, decision, walk(verification, decision), self.target.group)

    def _verification(
        self, tree: DraftTree, features: Tensor | None, logits: Tensor, draft_logits: Tensor, lengths: Sequence[int]
    ) -> Verification:
        """What rules see: the target's logits, raw and processed, the noise and the memory of each request."""
        processors = [request.settings.processors for request in self.requests]
        warped = warp_trees(processors, [request.context for request in self.requests], tree, logits)
        noise = None if self.greedy else self._noise(tree, lengths, self.seeds)
        return Verification(tree, logits, warped, draft_logits, noise, self.draft_tokens, features, **self._memory())

    def _memory(self) -> dict[str, Tensor]:
        """What a rule with a memory goes by."""
        if not self.rule.remembers:
            return {}
        regret = torch.tensor([request.budget.regret for request in self.requests], dtype=torch.float64)
        said = torch.tensor([len(request.emitted) for request in self.requests])
        return {"regret": regret.to(self.device), "said": said.to(self.device)}

    def _decide(self, verification: Verification) -> Decision:
        """The rule's decision, for each request within its budget."""
        budgets = [request.budget for request in self.requests]
        if budgets[0].limit is None:
            return self.rule(verification)
        return decide_rows(budgets, self.rule, verification, [request.emitted for request in self.requests])

    def _walk_stepwise(
        self, number: int, tree: DraftTree, features: Tensor | None, logits: Tensor, draft_logits: Tensor, length: int
    ) -> list[Step]:
        """One request's walk, within its budget."""
        request, row = self.requests[number], slice(number, number + 1)
        processors, before = request.settings.processors, request.context

        def at(family: Sequence[int], said: Sequence[int]) -> Verification:
            """A node with its children: only its own logits are processed, only its own noise is made."""
            raw = logits[row, family[0], None]  # [1, 1, V]
            alone = root_only(tree.tokens[row, family[0]]) if processors or not self.greedy else None
            warped = warp_tree(processors, [*before, *said[:-1]], alone, raw) if processors else raw
            noise = None if self.greedy else self._noise(alone, [length + len(said) - 1], self.seeds[row])
            seen = None if features is None else features[row, list(family)]  # [1, N, F]
            return Verification(
                tree.family(number, family), raw, warped, draft_logits[row], noise, self.draft_tokens, seen)

        budget = request.budget
        if not budget.allows(request.emitted):
            return walk_stepwise(EXACT_RULE, tree.row(number), at)
        steps = walk_stepwise(self.rule, tree.row(number), at)
        if not budget.pay([step.given_up for step in steps]):
            return walk_stepwise(EXACT_RULE, tree.row(number), at)
        return steps

    def _noise(self, tree: DraftTree, lengths: Sequence[int], seeds: Tensor) -> Tensor:
        """[B, N, V] Gumbel noise for the token after each node, keyed by seed and that token's absolute position."""
        levels = torch.arange(1, tree.max_depth + 2, device=self.device)
        positions = torch.tensor(lengths, device=self.device)[:, None] + levels
        noise = gumbel_noise(seeds, positions, self.target.vocab_size)  # [B, levels, V]
        return noise[torch.arange(len(seeds), device=self.device)[:, None], tree.depths]


@dataclass(eq=False)
class Session:
    """Keeps the caches of one request for the next, which then processes only what its prompt adds.

    For requests to one model, one after the other. The text does not depend on it. After an error it is empty.
    """

    decoder: Decoder | None = None  # of the last request
