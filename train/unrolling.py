"""Run a head over whole texts as decoding does, from all positions at once.

In step 1 the head reads the target's features. In step s its input at each position is its own prediction from step
s - 1 for the position before. For the last s - 1 positions, attention sees the keys of the steps in which the decoder
would have drafted them (one key of each step); further back, it sees those of the target's features. It is the training
of HASS (arXiv 2408.15766, section 3.2) and EAGLE-3 (arXiv 2503.01840, section 3.2).

Texts are packed: they follow each other in one row, each with positions and attention of its own. Attention to the keys
of step 1 is computed in blocks of queries, and again in the backward pass, so that its memory grows with the length of
the texts and not with its square (as in FlashAttention, arXiv 2205.14135).

T tokens of a pack, N positions of it that predict, D hidden size, F width of the target's features, H query heads,
K key heads, G = H / K, S head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface

from eagle_fsd.heads.eagle import DraftHead

UNROLLED = "eagle_fsd_unrolled"  # name of the attention
# Scores in one block of queries: they stay in a CPU's cache, and make kernels on CUDA large.
BLOCK_SCORES = {"cpu": 2**17, "cuda": 2**26}


@dataclass
class Pack:
    """The texts that follow each other in a row, and the keys and values of the steps so far.

    The query at position i in step s stands for a tree node `back` = s - 1 levels below position i - back, its root.
    Everything is kept in the slot of its root: rolled to the left by `back`. There a query sees the keys of step 1 up
    to its own slot, and of each later step the key in its own slot.

    Args:
        lengths: of the texts.
        positions: [N] position of each in its text.
        keys, values: [1, K, N, S] of each step.
    """

    lengths: Sequence[int]
    positions: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def predicting(
    lengths: Sequence[int],  # tokens of the texts of a pack
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # [N], [N]
    """The slots of a pack that predict, those with two more tokens of the same text after them, and their positions in
    their texts."""
    slots, begin = [], 0
    for length in lengths:
        slots.append(torch.arange(begin, begin + max(0, length - 2)))
        begin += length
    positions = torch.cat([torch.arange(len(part)) for part in slots])
    return torch.cat(slots).to(device), positions.to(device)


def unroll(
    head: DraftHead,
    features: Tensor,  # [T, F] of the target
    tokens: Tensor,  # [T]
    lengths: Sequence[int],  # of the texts, T in all
    steps: int,
) -> Iterator[Tensor]:
    """Yield the head's predictions [N, D] of each step, of the slots that predict (`predicting`). Slot i pairs feature
    i with token i + 1 and predicts feature i + 1, whose logits are for token i + 2."""
    slots, positions = predicting(lengths, tokens.device)
    true, following = head.to_states(features[slots][None]), tokens[slots + 1][None]
    inputs, pack = true, Pack([max(0, length - 2) for length in lengths], positions)
    begins = (positions == 0)[:, None]
    for _ in range(steps):
        before, head.config._attn_implementation = head.config._attn_implementation, UNROLLED
        try:
            predicted = head(inputs, following, positions[None], pack)
        finally:
            head.config._attn_implementation = before
        yield predicted[0]
        # The next step's input at i is this step's prediction for i, made at i - 1; the first of a text stays the true.
        inputs = torch.where(begins, true.to(predicted.dtype), predicted.roll(1, 1))


def unrolled_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, S]
    key: Tensor,  # [1, K, N, S]
    value: Tensor,  # [1, K, N, S]
    pack: Pack,  # in the place of a mask; this step's keys and values are added to it
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:  # [1, N, H, S]
    """Attention of a step: to the keys of step 1 by `TextAttention`, to one key of each later step, and both together
    weighted by their log-sum-exps."""
    back = len(pack.keys)
    pack.keys.append(key.to(value.dtype).roll(-back, 2))
    pack.values.append(value.roll(-back, 2))
    query = query.to(value.dtype).roll(-back, 2).unflatten(1, (key.shape[1], -1))  # [1, K, G, N, S]
    out, lse = TextAttention.apply(query, pack.keys[0], pack.values[0], pack.lengths, back, scaling)
    if back:
        positions, scores = pack.positions.roll(-back), [lse]  # of the queries
        for step, one in enumerate(pack.keys[1:], 1):
            score = (query * one[:, :, None]).sum(-1, dtype=lse.dtype) * scaling  # [1, K, G, N]
            scores.append(score.masked_fill(positions < back - step, -torch.inf))  # before the beginning of the text
        text, *own = torch.stack(scores, -1).softmax(-1)[..., None].to(value.dtype).unbind(-2)  # [1, K, G, N, 1] each
        out = out * text
        for weight, one in zip(own, pack.values[1:], strict=True):
            out = out + weight * one[:, :, None]
    return out.flatten(1, 2).roll(back, 2).transpose(1, 2), None


AttentionInterface.register(UNROLLED, unrolled_attention)


class TextAttention(torch.autograd.Function):
    """Causal attention of each text of a pack to its own keys, in blocks of queries, and the log-sum-exp of the scores.
    The last `back` slots of a text have queries whose roots are before its beginning: they see nothing here."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,  # [1, K, G, N, S]
        key: Tensor,  # [1, K, N, S]
        value: Tensor,  # [1, K, N, S]
        lengths: Sequence[int],
        back: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # [1, K, G, N, S], [1, K, G, N] float32 or wider
        out, wide = torch.zeros_like(query), torch.promote_types(query.dtype, torch.float32)
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        ctx.blocks, ctx.scale = list(blocks(lengths, back, query)), scale
        for rows, keys in ctx.blocks:
            scores = block_scores(query, key, rows, keys, scale, wide)
            part = lse[..., rows] = scores.logsumexp(-1)
            weights = scores.sub_(part[..., None]).exp_().to(value.dtype)
            out[..., rows, :] = (weights.flatten(2, 3) @ value[..., keys, :]).view_as(out[..., rows, :])
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple:
        query, key, value, out, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
        less = (grad_out * out).sum(-1, dtype=lse.dtype) - grad_lse  # [1, K, G, N]
        for rows, keys in ctx.blocks:
            scores = block_scores(query, key, rows, keys, ctx.scale, lse.dtype)
            weights = scores.sub_(lse[..., rows, None]).exp_()  # [1, K, G, rows, keys]
            grads = grad_out[..., rows, :].flatten(2, 3)
            grad_value[..., keys, :] += weights.flatten(2, 3).to(grads.dtype).mT @ grads
            grad = (grads @ value[..., keys, :].mT).to(lse.dtype).view_as(weights)
            grad = grad.sub_(less[..., rows, None]).mul_(weights).mul_(ctx.scale).flatten(2, 3).to(query.dtype)
            grad_query[..., rows, :] = (grad @ key[..., keys, :]).view_as(query[..., rows, :])
            grad_key[..., keys, :] += grad.mT @ query[..., rows, :].flatten(2, 3)
        return grad_query, grad_key, grad_value, None, None, None


def blocks(lengths: Sequence[int], back: int, query: Tensor) -> Iterator[tuple[slice, slice]]:
    """The slots of each block of queries, and of the keys of its text up to the last query or a little after. Numbers
    are round where they can be, since oneDNN compiles a product for each new shape and keeps it in memory."""
    most, begin = BLOCK_SCORES.get(query.device.type, BLOCK_SCORES["cuda"]) // (query.shape[1] * query.shape[2]), 0
    for length in lengths:
        first, end = begin, begin + length - back
        while first < end:
            rows = 2 ** (most // (first - begin + 64)).bit_length() // 2
            last = min(end, first + max(16, rows))
            yield slice(first, last), slice(begin, min(begin + length, last + (begin - last) % 256))
            first = last
        begin += length


def block_scores(
    query: Tensor, key: Tensor, rows: slice, keys: slice, scale: float, dtype: torch.dtype
) -> Tensor:  # [1, K, G, rows, keys]
    """Causal scores of a block of queries."""
    scores = (query[..., rows, :].flatten(2, 3) @ key[..., keys, :].mT).to(dtype).mul_(scale)
    scores = scores.unflatten(2, (query.shape[2], -1))
    shape = rows.stop - rows.start, keys.stop - rows.start
    later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
    scores[..., rows.start - keys.start :].masked_fill_(later, -torch.inf)
    return scores
