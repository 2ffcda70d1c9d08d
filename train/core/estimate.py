"""Acceptance length estimated from text, without generating: what the decoder would accept at each of its cycles.

A text is walked through as the decoder would: at each root a real draft tree is grown from the true features, every
rule says how far it would have gone, and the walk moves on along the text by as many tokens as the tree foresaw. On the
target's own greedy answers these are the decoder's own cycles for `exact`; for fuzzy rules the next root differs, since
a fuzzy token would have changed the text.

The target reads each text once. Its forward of a tree is needed only behind the node where the way leaves the text.

B texts walked together, L positions of one, N tree nodes, E expanded ones, F width of the features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.acceptance.divergence import Divergence, get_divergence
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.drafting.growth import draft_tree
from eagle_fsd.drafting.tree import DraftTree
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.models.target import TargetModel

LOGITS = {"cpu": 2**25, "cuda": 2**28}  # draft logits held at a time: 128 MB, 1 GB, and about three times that in all
MOST_TEXTS = 16  # walked together: the target's cache holds them
GOLDEN = 0.618034  # its multiples are spread evenly over [0, 1)


def last_answers(documents: Documents, indices: Iterable[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids: the last run of learned tokens of each document, and all before it.

    Documents learned from their start on (plain text) are cut in the middle.
    """
    for index in indices:
        tokens, learned = documents.document(index)
        stops = np.flatnonzero(~learned[: np.flatnonzero(learned)[-1]]) if learned.any() else []
        if not learned.any():
            continue
        start = int(stops[-1]) + 1 if len(stops) else 0
        if start < 2:
            start = len(tokens) // 2
        end = int(np.flatnonzero(learned)[-1]) + 1
        if start >= 2 and end - start >= 4:
            yield tokens[:start].tolist(), tokens[start:end].tolist()


@dataclass(frozen=True)
class Stretch:
    """Part of an answer that is walked.

    Args:
        tokens: the text up to where trees can reach. start: the first root. end: where no root is any more.
    """

    tokens: list[int]
    start: int
    end: int


def stretches(answers: Sequence[tuple[list[int], list[int]]], most: int, reach: int) -> list[Stretch]:
    """Of each answer all, or its share of `most` tokens, each elsewhere in its answer.

    Args:
        reach: levels of a tree.
    """
    shares, left = {}, most
    for place, number in enumerate(sorted(range(len(answers)), key=lambda number: len(answers[number][1]))):
        shares[number] = min(len(answers[number][1]), max(1, left // (len(answers) - place)))
        left -= shares[number]
    found = []
    for number, (prompt, answer) in enumerate(answers):
        start = len(prompt) + int((len(answer) - shares[number]) * (number * GOLDEN % 1))
        end = start + shares[number]
        found.append(Stretch((prompt + answer)[: end + reach + 1], start, end))
    return found


class TextWalk:
    """Some texts being walked together, each from root to root along its stretch.

    Args:
        highest: the largest threshold that matters.
    """

    def __init__(
        self, target: TargetModel, head: DraftHead, parts: Sequence[Stretch], tree: TreeConfig, highest: float
    ) -> None:
        self.target, self.head, self.parts, self.config, self.highest = target, head, list(parts), tree, highest
        self.device = target.output_device
        self.divergence = get_divergence("js", None if head.names_all else head.target_tokens)
        lengths = [len(part.tokens) for part in parts]
        self.cache = target.new_cache(max(lengths) + tree.nodes, len(parts), stale=True)
        self.draft_cache = head.new_cache(max(lengths) + tree.nodes + tree.depth * tree.top_k, len(parts))
        self.place = max(lengths)  # of the keys of tree nodes, behind all texts
        self.features = torch.zeros(len(parts), self.place, target.feature_size, dtype=target.dtype, device=self.device)
        # What is beyond a text's end is foreseen by no tree.
        self.tokens = torch.full((len(parts), self.place + tree.depth + 1), -1, device=self.device)
        self.read = [0] * len(parts)  # features that the draft has read
        self.roots = [part.start for part in parts]

    def begin(self, proceed: Callable[[], object]) -> None:
        """The target reads the texts."""
        for row, part in enumerate(self.parts):
            proceed()
            ids = torch.tensor([part.tokens], device=self.device)
            self.tokens[row, : len(part.tokens)] = ids
            with self.cache.one_row(row):
                features = self.target.prefill(ids.to(self.target.device), self.cache)
            self.features[row, : len(part.tokens)] = features[0]

    def cycle(self) -> tuple[Tensor, int]:
        """One cycle of each text: the least threshold that takes each step of its way down the tree, [B, depth] (0: an
        exact step, inf: none), and by how many tokens all have advanced."""
        config, roots = self.config, torch.tensor(self.roots, device=self.device)
        tree, draft_logits = draft_tree(
            self.head, self.target,
            [self.features[row, read:root] for row, (read, root) in enumerate(zip(self.read, self.roots, strict=True))],
            [self.tokens[row, read + 1 : root + 1]
             for row, (read, root) in enumerate(zip(self.read, self.roots, strict=True))],
            self.draft_cache, config,
        )
        positions = roots[:, None] + tree.depths
        foreseen = tree.tokens == self.tokens.gather(1, positions)
        foreseen[:, 0] = True
        on_text = (foreseen[:, None] | ~tree.ancestors).all(-1)
        steps = Steps(tree, draft_logits, self.divergence, self.target.logits, self.highest)
        rows = torch.arange(len(roots), device=self.device)
        left = steps.follow(rows, torch.zeros_like(roots), on_text,
                            lambda rows, nodes: self.features[rows, positions[rows, nodes]])
        if left.any():
            rows = left.nonzero()[:, 0]
            below = tree.ancestors.gather(2, left[:, None, None].expand(-1, tree.ancestors.shape[1], 1))[..., 0]
            found, order = self.verify(tree, positions, below & (left > 0)[:, None], positions.gather(1, left[:, None]))
            steps.follow(rows, left[rows], torch.ones_like(on_text),
                         lambda rows, nodes: found[rows, order[rows, nodes]])
        self.read = list(self.roots)
        advance = (torch.where(on_text, tree.depths, 0).amax(1) + 1).tolist()
        self.roots = [root + more for root, more in zip(self.roots, advance, strict=True)]
        return steps.needed, sum(advance)

    def verify(
        self,
        tree: DraftTree,
        positions: Tensor,  # [B, N]
        wanted: Tensor,  # [B, N] bool, nodes of one branch
        first: Tensor,  # [B, 1], the position of the branch's first node: the text before it is seen
    ) -> tuple[Tensor, Tensor]:
        """Features [B, n, F] of the wanted nodes, and where each node is among them [B, N]."""
        count = int(wanted.sum(1).max())
        chosen = wanted.sort(dim=1, descending=True, stable=True).indices[:, :count]
        inside = (tree.ancestors & wanted[:, None]) | torch.eye(wanted.shape[1], dtype=torch.bool, device=self.device)
        ancestors = inside.gather(1, chosen[..., None].expand(-1, -1, wanted.shape[1]))
        ancestors = ancestors.gather(2, chosen[:, None].expand(-1, count, -1))
        places = torch.arange(self.place, device=self.device)
        self.cache.pin(first[:, 0], places < first)
        features = self.target.verify(tree.tokens.gather(1, chosen), positions.gather(1, chosen), ancestors, self.cache)
        self.cache.truncate(self.place)
        order = torch.zeros_like(positions).scatter_(
            1, chosen, torch.arange(count, device=self.device).expand_as(chosen))
        return features.to(self.device), order

    def keep_unfinished(self) -> bool:
        """Forget the texts that are at their ends; whether any is left."""
        rows = [row for row, (part, root) in enumerate(zip(self.parts, self.roots, strict=True))
                if root < part.end and root + 1 < len(part.tokens)]
        if rows and len(rows) < len(self.parts):
            self.cache.keep_rows(rows)
            self.draft_cache.keep_rows(rows)
            self.features, self.tokens = self.features[rows], self.tokens[rows]
            self.parts, self.read, self.roots = (
                [values[row] for row in rows] for values in (self.parts, self.read, self.roots))
        return bool(rows)


@dataclass
class Steps:
    """The ways down a batch of trees by the target's preference among each node's children.

    Greedily, `exact` and `fsd` of any threshold go the same way, and differ in where they stop: a step is taken where
    the child is the target's choice, or the divergence at its parent is within the threshold.
    """

    tree: DraftTree
    draft_logits: Tensor  # [B, E, R]
    divergence: Divergence  # [*, V], [*, R] -> [*]
    logits: Callable[[Tensor], Tensor]  # of the target: [*, F] -> [*, V]
    highest: float

    def __post_init__(self) -> None:
        shape = len(self.tree.tokens), max(1, self.tree.max_depth)
        self.needed = torch.full(shape, math.inf, device=self.tree.tokens.device)

    def follow(
        self,
        rows: Tensor,  # [b] of the batch
        nodes: Tensor,  # [b], where their ways start
        inside: Tensor,  # [B, N] bool, nodes whose features are known
        features: Callable[[Tensor, Tensor], Tensor],  # (rows [b], nodes [b]) -> [b, F]
    ) -> Tensor:  # [B]
        """Follow ways as far as they stay inside and a threshold goes; the first node outside, 0 where none."""
        tree, outside = self.tree, torch.zeros_like(self.tree.tokens[:, 0])
        while len(rows):
            logits = self.logits(features(rows, nodes))  # [b, V]
            children = (tree.parents[rows] == nodes[:, None]) & (tree.depths[rows] > 0)
            liked = torch.where(children, logits.gather(1, tree.tokens[rows]), -math.inf)
            best = liked.argmax(1)
            some, exact = children.any(1), tree.tokens[rows, best] == logits.argmax(1)
            needed = torch.where(some & exact, 0.0, math.inf)
            fuzzy = (some & ~exact).nonzero()[:, 0]
            if len(fuzzy) and self.highest > 0:
                at, node = rows[fuzzy], nodes[fuzzy]
                divergence = self.divergence(logits[fuzzy], self.draft_logits[at, tree.draft_rows[at, node]])
                needed[fuzzy] = divergence.clamp_min(torch.finfo(divergence.dtype).tiny)  # threshold 0 is exact
            self.needed[rows[some], tree.depths[rows, nodes][some]] = needed[some]
            going = needed <= self.highest
            staying = inside[rows, best]
            outside[rows[going & ~staying]] = best[going & ~staying]
            rows, nodes = rows[going & staying], best[going & staying]
        return outside


def accepted_lengths(
    needed: Tensor,  # [*, depth]
    threshold: float,
) -> Tensor:  # [*]
    """Steps taken from the root on at this threshold."""
    return (needed.cummax(-1).values <= threshold).sum(-1)


@torch.inference_mode()
def estimate_tau(
    target: TargetModel, head: DraftHead, documents: Documents, indices: Iterable[int],
    thresholds: Mapping[str, float], tree: TreeConfig, *, most_tokens: int = 2**62,
    proceed: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Estimated acceptance length (tokens per target forward) at each threshold, over the cycles of all answers.

    Args:
        head: of the target's device and dtype, with its embeddings.
        thresholds: by name, of greedy `fsd` with its defaults; 0 is `exact`.
        most_tokens: of answers that are walked, in all.
        proceed: called every second or so; what it raises ends the estimate.

    Raises:
        ValueError: no document has an answer that is long enough.
    """
    answers = list(last_answers(documents, indices))
    if not answers:
        raise ValueError("tau cannot be estimated: no held-out document has an answer of four tokens or more")
    parts = stretches(answers, most_tokens, tree.depth)
    highest = max(thresholds.values())
    accepted: dict[str, list[Tensor]] = {name: [] for name in thresholds}
    total = sum(part.end - part.start for part in parts)
    with Progress(desc="tau", unit="token", total=total, leave=False) as progress:
        for batch in batches(target, head, parts, tree):
            walk = TextWalk(target, head, [parts[number] for number in batch], tree, highest)
            walk.begin(proceed)
            unfinished = True
            while unfinished:
                proceed()
                needed, advance = walk.cycle()
                for name, threshold in thresholds.items():
                    accepted[name].append(accepted_lengths(needed, threshold))
                progress.update(advance)
                unfinished = walk.keep_unfinished()
    return {name: torch.cat(lengths).double().mean().item() + 1 for name, lengths in accepted.items()}


def batches(
    target: TargetModel, head: DraftHead, parts: Sequence[Stretch], tree: TreeConfig
) -> Iterator[list[int]]:
    """Which stretches are walked together: like ones, and as many as memory allows."""
    expanded = 1 + tree.top_k * (tree.depth - 1)
    room = LOGITS.get(target.output_device.type, LOGITS["cuda"])
    together = max(1, min(MOST_TEXTS, room // (expanded * head.draft_vocab_size)))
    for group in target.batches([len(part.tokens) for part in parts]):
        group = sorted(group, key=lambda number: len(parts[number].tokens))
        yield from (group[first : first + together] for first in range(0, len(group), together))
