"""The decode step: draft, verify, accept, commit, emit.

B requests of a batch, L committed positions of one, N tree nodes, A accepted draft tokens of a cycle, F width of the
target's features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..acceptance import Decision, Verification, walk
from ..acceptance.budget import EXACT_RULE, decide_rows
from ..drafting.config import Choice
from ..drafting.policy import Drafting
from ..drafting.tree import DraftTree, root_only
from ..heads.eagle import DraftHead
from ..models.parallel import tensor_of_first
from ..models.target import TargetModel
from .emission import Emission, Step, emitted, read_walk, walk_stepwise
from .forwards import Forwards
from .graphs import GraphCycles, GraphForwards
from .noise import gumbel_noise
from .receipts import Receipt
from .request import BatchSettings, Request, RequestSettings
from .sampling import warp_tree, warp_trees

NOTHING = Emission([], [], [])
STEPWISE_FROM = 1 << 18  # logits of a tree from which on a walk node by node is faster, on a CPU


class Decoder:
    """Requests being decoded together: holds them and the forwards, and advances cycle by cycle.

    Without a head or a tree it decodes plainly, one token per forward, with the same engine and the same noise.

    Args:
        earlier: the decoder of an earlier request to the same models, for a single request; its caches are taken over,
            with as much of what they hold as is the beginning of this prompt. It cannot go on itself.
        graphs: caches and cycles of static shapes, for a single request; what they do not serve runs without.
        forwards: empty ones, with room as their maker knows it; None: for the longest text and the largest tree.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]], batch: BatchSettings,
        settings: Sequence[RequestSettings], earlier: Decoder | None = None, graphs: GraphCycles | None = None,
        forwards: Forwards | None = None,
    ) -> None:
        self.target, self.head = target, head
        self.device = target.output_device  # trees, logits and features live there
        self.requests = [Request(prompt, own, target.device) for prompt, own in zip(prompts, settings, strict=True)]
        choose = batch.choose if head is not None else lambda count: Choice(None)
        self.drafting = Drafting(choose, len(self.requests), batch.pause)
        self.draft_tokens = None if head is None or head.names_all else head.target_tokens
        self.walks_stepwise = self.device.type == "cpu" and target.group is None
        self._settle()
        self.forwards = forwards or self._forwards(earlier, graphs)

    def _settle(self) -> None:
        """Take note of which requests there are: their seeds, and which of them are decided together."""
        settings = [request.settings for request in self.requests]
        self.seeds = torch.tensor([own.seed for own in settings], dtype=torch.long, device=self.device)
        self.keeps_draft_logits = any(own.rule.reads_draft and not own.lossless for own in settings)
        self.groups: list[list[int]] = []
        for number, own in enumerate(settings):
            alike = next((group for group in self.groups if settings[group[0]].joins(own)), None)
            if alike is None:
                self.groups.append([number])
            else:
                alike.append(number)

    def _forwards(self, earlier: Decoder | None, graphs: GraphCycles | None) -> Forwards:
        """Forwards with room for the longest text and the largest tree."""
        trees = self.drafting.possible
        nodes = max(tree.nodes if tree else 1 for tree in trees)
        drafted = max(tree.depth * tree.top_k if tree else 0 for tree in trees)
        texts = (len(request.prompt) + request.settings.max_new_tokens for request in self.requests)
        longest = max(texts, default=0)
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
        emissions = [self.read(number) for number in range(len(self.requests))]
        return [emission for emission in emissions if emission is not None]

    def read(self, number: int = 0, most: int | None = None) -> Emission | None:
        """The target reads so many further tokens of a prompt; None: there are more to come."""
        request = self.requests[number]
        features = self.forwards.prefill(number, request, most)  # [L, F]
        request.stats.prefill_tokens += len(features)
        whole = self.forwards.lengths[number] == len(request.prompt)
        emission = self._first(number, features) if whole else NOTHING
        request.advance(emission, None if self.head is None else features)
        if self.drafting.choice.tree is not None:
            self.forwards.read(number, request)
        return emission if whole else None

    def _first(self, number: int, features: Tensor) -> Emission:
        """The first token, from the prompt's features [L, F]."""
        request = self.requests[number]
        raw = self.target.logits(features[None, -1:])  # [1, 1, V]
        root = root_only(torch.tensor(request.tokens[-1:], device=self.device))
        warped = warp_tree(request.settings.processors, request.context, root, raw)
        greedy = request.settings.greedy
        noise = 0 if greedy else self._noise(root, [len(request.tokens) - 1], self.seeds[number, None])
        token = tensor_of_first(self.target.group, (warped + noise).argmax(-1)).item()
        logprobs = raw.log_softmax(-1)[0, 0]
        logprob = logprobs[token].item()
        receipt = Receipt("target", None, logprob, logprobs.amax().item() - logprob)
        return Emission([token], [receipt], [warped[0, 0, token].item()])

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
            emissions[number] = request.count(emissions[number])
        return emissions

    def keep(self, numbers: Sequence[int]) -> None:
        """Go on with these requests only, ascending."""
        self.requests = [self.requests[number] for number in numbers]
        self._settle()
        self.forwards.keep(numbers)
        self.drafting.keep(len(numbers))

    def join(self, other: Decoder) -> None:
        """Go on with the requests of another decoder of the same models as well, for which there is room."""
        if not self.requests:
            self.drafting.pause.begin()
        self.requests = [*self.requests, *other.requests]
        self._settle()
        self.forwards.join(other.forwards)
        self.drafting.keep(len(self.requests))

    def _accept(
        self, tree: DraftTree, features: Tensor, draft_logits: Tensor, lengths: Sequence[int]
    ) -> tuple[list[list[int]], list[Emission]]:
        """The accepted path of each request, from the target's features [B, N, F] and the draft's logits, and what it
        emits."""
        logits = self.target.logits(features)  # [B, N, V]
        found: dict[int, tuple[list[int], Emission]] = {}
        for rows in self.groups:
            found |= self._accept_rows(rows, tree, features, logits, draft_logits, lengths)
        paths, emissions = zip(*(found[number] for number in range(len(self.requests))), strict=True)
        return list(paths), list(emissions)

    def _accept_rows(
        self, rows: Sequence[int], tree: DraftTree, features: Tensor, logits: Tensor, draft_logits: Tensor,
        lengths: Sequence[int],
    ) -> dict[int, tuple[list[int], Emission]]:
        """That of requests that are decided together, by their numbers.

        What a rule or a processor raises is the error of the request that it was asked about: of several, each is asked
        again alone.
        """
        requests = [self.requests[number] for number in rows]
        budgets = [copy(request.budget) for request in requests]
        known = tree, features, logits, draft_logits
        try:
            if self.walks_stepwise and requests[0].settings.decides_locally and logits[0].numel() >= STEPWISE_FROM:
                walks = [self._walk_stepwise(row, *known, lengths[row]) for row in rows]
                paths, emissions = emitted(walks, tree)
            else:
                verification = self._verification(rows, *known, lengths)
                decision = self._decide(requests, verification)
                paths, emissions = read_walk(verification, decision, walk(verification, decision), self.target.group)
        except Exception as error:
            for request, budget in zip(requests, budgets, strict=True):
                request.budget = budget
            if len(rows) == 1:
                return {rows[0]: ([0], NOTHING._replace(error=error))}
            alone = [self._accept_rows([row], *known, lengths) for row in rows]
            return {number: own for each in alone for number, own in each.items()}
        return dict(zip(rows, zip(paths, emissions, strict=True), strict=True))

    def _verification(
        self, rows: Sequence[int], tree: DraftTree, features: Tensor, logits: Tensor, draft_logits: Tensor,
        lengths: Sequence[int],
    ) -> Verification:
        """What the rule of these rows sees: the target's logits, raw and processed, the noise and the memory."""
        requests, seeds = [self.requests[row] for row in rows], self.seeds
        if len(rows) < len(self.requests):
            tree, features, logits, draft_logits, seeds = (
                tree.take(rows), features[rows], logits[rows], draft_logits[rows], seeds[rows])
        processors = [request.settings.processors for request in requests]
        warped = warp_trees(processors, [request.context for request in requests], tree, logits)
        rule, greedy = requests[0].settings.rule, requests[0].settings.greedy
        noise = None if greedy else self._noise(tree, [lengths[row] for row in rows], seeds)
        seen = features if rule.reads_features else None
        memory = self._memory(requests) if rule.remembers else {}
        return Verification(tree, logits, warped, draft_logits, noise, self.draft_tokens, seen, **memory)

    def _memory(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """What a rule with a memory goes by."""
        regret = torch.tensor([request.budget.regret for request in requests], dtype=torch.float64)
        said = torch.tensor([len(request.emitted) for request in requests])
        answers = pad_sequence([torch.tensor(request.emitted) for request in requests], True, -1)
        return {"regret": regret.to(self.device), "said": said.to(self.device), "answers": answers.to(self.device)}

    def _decide(self, requests: Sequence[Request], verification: Verification) -> Decision:
        """Their rule's decision, for each request within its budget."""
        budgets, rule = [request.budget for request in requests], requests[0].settings.rule
        if budgets[0].limit is None:
            return rule(verification)
        return decide_rows(budgets, rule, verification, [request.emitted for request in requests])

    def _walk_stepwise(
        self, number: int, tree: DraftTree, features: Tensor, logits: Tensor, draft_logits: Tensor, length: int
    ) -> list[Step]:
        """One request's walk, within its budget."""
        request, row = self.requests[number], slice(number, number + 1)
        processors, before = request.settings.processors, request.context
        rule, greedy = request.settings.rule, request.settings.greedy

        def at(family: Sequence[int], said: Sequence[int]) -> Verification:
            """A node with its children: only its own logits are processed, only its own noise is made."""
            raw = logits[row, family[0], None]  # [1, 1, V]
            alone = root_only(tree.tokens[row, family[0]]) if processors or not greedy else None
            warped = warp_tree(processors, [*before, *said[:-1]], alone, raw) if processors else raw
            noise = None if greedy else self._noise(alone, [length + len(said) - 1], self.seeds[row])
            seen = features[row, list(family)] if rule.reads_features else None  # [1, N, F]
            return Verification(
                tree.family(number, family), raw, warped, draft_logits[row], noise, self.draft_tokens, seen)

        budget = request.budget
        if not budget.allows(request.emitted):
            return walk_stepwise(EXACT_RULE, tree.row(number), at)
        steps = walk_stepwise(rule, tree.row(number), at)
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
