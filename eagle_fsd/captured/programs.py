"""The programs of a cycle: functions of fixed shapes, from buffers to buffers. None waits for the device.

A cycle is draft, verify, walk and keep; after the draft, copies may join the trees. A draft may run again with the same
result: what it reads changes when the walk keeps a path.

B rows, N tree nodes, P steps of a path, T positions that the drafter has not processed, K nodes of a level, M slots of
a bucket, V vocabulary of the target, D size of the drafter's states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import LogitsProcessorList

from ..acceptance import Rule
from ..acceptance.walk import Within, descend, emitted
from ..decoding.cycle import VerifiedTrees
from ..drafting.config import TreeConfig
from ..drafting.drafter import Drafter
from ..drafting.noise import Coupling
from ..drafting.sizing import Plan
from ..drafting.tree import Unread, candidates_of, grow, rerank
from ..models.cache import BucketCache
from ..models.target import TargetModel
from .buffers import Buffers, first_nodes, store_tree


@dataclass(frozen=True)
class Settings:
    """What the programs of a cycle depend on besides their shapes.

    Args:
        tree: None: decoding is plain. copying: whether copies may join trees.
        rule: its threshold is ignored, unless it is lossless. processors: kinds and numbers of the warpers.
        coupled: whether drafts are coupled to the target's draws.
        budgeted: whether a row has a budget. marked: whether the rule decides only in places: a row has marks between
            which it applies, or is exact.
    """

    tree: TreeConfig | None
    copying: bool
    rule: Rule
    greedy: bool
    processors: tuple
    coupled: bool
    budgeted: bool
    marked: bool

    @property
    def lossless(self) -> bool:
        """Whether the rule reads nothing of the draft."""
        return self.rule.is_lossless(self.greedy)


def draft(
    buffers: Buffers, target: TargetModel, drafter: Drafter, settings: Settings, warpers: LogitsProcessorList,
    bucket: int, unread: int,
) -> None:
    """The drafter reads the accepted tokens, of which there are at most `unread`, and grows and ranks the trees."""
    features = buffers.fed_features[:, :unread] if buffers.reads_features else None
    fed = Unread(buffers.fed_tokens[:, :unread], features, buffers.counts, buffers.draft_lengths + buffers.counts)
    cache = BucketCache(buffers.draft_storage, buffers.draft_lengths, bucket)
    coupling = None
    if settings.coupled:
        named = drafter.draft_vocab_size if buffers.draft_tokens is None else buffers.draft_tokens
        coupling = Coupling(buffers.seeds, buffers.lengths, buffers.temperatures.float(), buffers.noise_weights,
                            [warpers] * buffers.rows, named)
    plan = Plan(buffers.config)  # the whole tree: without prices
    scored, logits = grow(drafter, target, fed, cache, plan, coupling)
    store_tree(buffers.tree, rerank(scored, plan))
    if buffers.wide:
        store_tree(buffers.wide_tree, rerank(scored, plan, buffers.wide))
    if not settings.lossless:
        for mine, level in zip(buffers.draft_logits(), logits, strict=True):
            mine.copy_(level)


def join_copies(buffers: Buffers, size: int, path: int) -> None:
    """Copies, at most `size` in a row, join the trees, whose paths have at most P = `path` steps."""
    tree = candidates_of(buffers.wide_tree, *buffers.copies(size), path - 1).best(buffers.most, path - 1)
    store_tree(buffers.tree, tree)
    buffers.origins.copy_(tree.origins.masked_fill(tree.depths == 0, -1))


def verify(buffers: Buffers, target: TargetModel, bucket: int, nodes: int) -> None:
    """The target's features of the trees; keys and values go to the slots after each row's text."""
    tree = first_nodes(buffers.tree, nodes)
    cache = BucketCache(buffers.storage, buffers.lengths, bucket)
    features = target.verify(tree.tokens, tree.depths + buffers.lengths[:, None], tree.ancestors, cache)
    buffers.features[:, :nodes].copy_(features)


def walk_and_keep(
    buffers: Buffers, target: TargetModel, settings: Settings, processors: LogitsProcessorList, nodes: int, path: int,
    joined: bool,
) -> None:
    """Walk down the trees, keep the paths in the target's cache, and feed them to the drafter's next read. The table
    gets a line for each of the P = `path` steps.

    Args:
        joined: whether copies may be in the trees.
    """
    features, lengths = buffers.features[:, :nodes], buffers.lengths
    tree = replace(first_nodes(buffers.tree, nodes), max_depth=path - 1)
    if not joined:
        tree = replace(tree, origins=None)
    verified = VerifiedTrees(tree, target.logits(features), () if settings.lossless else buffers.draft_logits(),
                             buffers.draft_tokens, settings.greedy, buffers.seeds, lengths, processors)
    left, within, fuzzy = buffers.left if settings.budgeted else None, None, buffers.fuzzy
    if settings.marked:
        within = Within(buffers.inside_marks & fuzzy, buffers.opening.masked_fill(~fuzzy, -1), buffers.closing)
    walked = descend(settings.rule, verified, buffers.threshold, left, within, path)
    if settings.marked:
        walked = walked._replace(divergence=walked.divergence.masked_fill(~fuzzy[:, None], math.nan))
    integers, numbers, _ = emitted(walked, verified.raw)
    node, token, count = integers[..., 0], integers[..., 1], integers[..., 4].sum(1)

    # The first `count` slots of the path are kept; what is written after them is stale.
    ahead, rows = torch.arange(path, device=lengths.device), torch.arange(len(lengths), device=lengths.device)[:, None]
    kept = buffers.storage[:, :, rows, :, lengths[:, None] + node]  # [B, P, layers, 2, H, D]
    buffers.storage[:, :, rows, :, lengths[:, None] + ahead] = kept
    if buffers.config is None:
        buffers.tree.tokens.copy_(token)  # the next root
    else:
        buffers.fed_tokens[:, :path].copy_(token)
        buffers.draft_lengths.copy_(lengths + buffers.lead)
        buffers.counts.copy_(count)
    if buffers.reads_features:
        buffers.fed_features[:, :path].copy_(features.gather(1, node[..., None].expand(-1, -1, features.shape[-1])))
    lengths.add_(count)
    buffers.table(path).copy_(torch.cat([integers.double(), numbers], -1))
