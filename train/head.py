"""Training a draft head on the target's features.

B batch, T tokens of a row, D hidden size, V vocabulary.

The head is trained as it is used (HASS, arXiv 2408.15766): in step 1 it reads the target's features; in step s its
input at each position is its own prediction of step s - 1 for the position before, and its attention sees, of the
last s - 1 positions, the keys of the step that the decoder would have run there (a diagonal of the step's keys),
and the target's features further back.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from eagle_fsd.draft import DraftHead
from eagle_fsd.target import TargetModel
from train.corpus import Documents

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadTraining:
    """Hyper-parameters of a run.

    Args:
        steps: optimiser steps; the rate rises over `warmup` of them and then falls linearly to zero.
        batch: tokens per step, padding included.
        aligned_steps: how often the head is fed its own features (1 = the published EAGLE-1/2 recipe).
        step_decay: weight of aligned step s is step_decay ** (s - 1).
        feature_weight: of the SmoothL1 loss on features, beside the soft cross-entropy.
    """

    steps: int
    batch: int = 12_288
    lr: float = 1e-3
    warmup: int = 50
    aligned_steps: int = 3
    step_decay: float = 0.8
    feature_weight: float = 0.1


def aligned_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[1, 1, T, step * T] bool mask of aligned step `step` (1-based) over the keys of all steps so far.

    The query at position i stands for a tree node `step - 1` levels below position i - step + 1. It sees target
    features up to there (keys of step 1), then one key of each later step on its own path:
    key i - step + s of step s, for s = 2 .. step.
    """
    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    blocks = [j <= i - (step - 1), *(j == i - (step - s) for s in range(2, step + 1))]
    return torch.cat(blocks, 1)[None, None]


def head_loss(
    head: DraftHead,
    target: TargetModel,
    features: Tensor,  # [B, T, D] of the target
    tokens: Tensor,  # [B, T]
    learned: Tensor,  # [B, T] bool
    training: HeadTraining,
) -> tuple[Tensor, list[Tensor]]:
    """The weighted loss of all aligned steps, and each step's share of positions with the target's argmax."""
    # Position i pairs feature i with token i + 1 and predicts feature i + 1, whose logits are for token i + 2.
    inputs, following = features[:, :-2], tokens[:, 1:-1]
    wanted, chosen = features[:, 1:-1], learned[:, 2:]
    length = inputs.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    with torch.no_grad():
        target_logits = target.lm_head(wanted[chosen]).float()  # [M, V] at the learned positions
        target_probs, best = target_logits.softmax(-1), target_logits.argmax(-1)
    cache, loss, agreement = DynamicCache(), torch.zeros((), device=tokens.device), []
    for step in range(1, training.aligned_steps + 1):
        mask = aligned_mask(length, step, tokens.device) if step > 1 else None
        predicted = head(inputs, following, positions, mask, cache)
        logits = target.lm_head(predicted[chosen]).float()
        soft = -(target_probs * logits.log_softmax(-1)).sum(-1).mean()
        regression = nn.functional.smooth_l1_loss(predicted[chosen], wanted[chosen])
        loss = loss + training.step_decay ** (step - 1) * (soft + training.feature_weight * regression)
        agreement.append((logits.argmax(-1) == best).float().mean().detach())
        # The next step's input at i is this step's prediction for i, made at i - 1; position 0 has none.
        inputs = torch.cat([features[:, :1].to(predicted.dtype), predicted[:, :-1]], 1)
    return loss, agreement


def train_head(
    head: DraftHead, target: TargetModel, documents: Documents, training: HeadTraining, *, checkpoint: Path,
    seed: int = 0, save_seconds: float = 120,
) -> DraftHead:
    """Train in place, features made online by the frozen target; continues from `checkpoint` where it exists."""
    batches = documents.batches(training.batch, seed)
    head.train()
    for parameter in target.model.parameters():
        parameter.requires_grad_(False)
    trained = [p for n, p in head.named_parameters() if not n.startswith("embed_tokens")]
    optimizer = torch.optim.AdamW(trained, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.0)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=head.device, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
        os.replace(part, checkpoint)

    saved_at, device = time.time(), head.device
    bar = tqdm(total=training.steps, initial=step, desc="draft head", unit="step", disable=None, mininterval=5)
    try:
        while step < training.steps:
            to_end = (training.steps - step) / max(1, training.steps - training.warmup)
            rate = training.lr * min((step + 1) / training.warmup, to_end)
            for group in optimizer.param_groups:
                group["lr"] = rate
            x, y = (torch.from_numpy(array).to(device) for array in documents.collate(batches[step % len(batches)]))
            with torch.autocast(device.type, torch.bfloat16):
                with torch.no_grad():
                    features = target.decoder(input_ids=x, use_cache=False).last_hidden_state
                loss, agreement = head_loss(head, target, features, x, y, training)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update()
            if step % 25 == 0:
                shown = " ".join(f"{a.item():.3f}" for a in agreement)
                bar.set_postfix(loss=f"{loss.item():.3f}", top1=shown, refresh=False)
                log.info("head step %d loss %.4f top-1 per aligned step %s lr %.2e", step, loss.item(), shown, rate)
            if time.time() - saved_at > save_seconds or step == training.steps:
                save()
                saved_at = time.time()
    except KeyboardInterrupt:
        save()
        raise
    finally:
        bar.close()
    return head.eval()
