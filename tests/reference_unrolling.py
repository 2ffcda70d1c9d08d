"""The aligned steps of one text in dense masks, with all logits at once: slow and obvious."""

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle_fsd.models.masks import additive
from train.objectives import AlignedLoss, logit_sum, regression_sum


def aligned_mask(length: int, step: int) -> Tensor:
    """[1, T, step * T] bool, the keys of all steps so far that each query of aligned step `step` (1-based) sees.

    The query at position i represents a tree node `step - 1` levels below position i - step + 1. It sees the target's
    features up to that position (keys of step 1), then one key of each later step on its own path: key i - step + s of
    step s, for s = 2 .. step.
    """
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    blocks = [j <= i - (step - 1), *(j == i - (step - s) for s in range(2, step + 1))]
    return torch.cat(blocks, 1)[None]


def reference_loss(loss: AlignedLoss, features: Tensor, tokens: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
    """Of one text: features [T, F], tokens [T], learned [T]."""
    head, objective, output = loss.head, loss.objective, loss._logits[0]
    head.config._attn_implementation = "eager"
    inputs, true = head.to_states(features[None, :-2]), features[1:-1, -head.target_hidden_size :]
    first, cache, total, agreed = inputs[:, :1], DynamicCache(), 0.0, []
    positions, chosen = torch.arange(len(tokens) - 2), learned[2:]
    compared = chosen & (positions % objective.logit_stride == loss.residue) & head.names(tokens[2:])
    p = head.target_logits(true[compared], output).softmax(-1)
    for step in range(objective.aligned_steps):
        mask = additive(aligned_mask(len(positions), step + 1), features.dtype)
        predicted = head(inputs, tokens[None, 1:-1], positions[None], mask, cache)
        log_q = head.own_logits(predicted[0, compared], output).log_softmax(-1)
        value = logit_sum(objective, log_q, p) * objective.logit_stride
        if objective.regression:
            value = value + objective.regression * regression_sum(predicted[0, chosen], true[chosen])
        total = total + objective.step_decay**step * value
        agreed.append((log_q.argmax(-1) == p.argmax(-1)).sum() * objective.logit_stride)
        inputs = torch.cat([first, predicted[:, :-1]], 1)
    return total, torch.stack(agreed)
