"""Training the demo target: a deep, narrow Llama, grown from a shallow one.

A shallow model of the same width sees several times as many tokens per second. It is then deepened: new layers
are put between the trained ones with zero output projections, so the deep model starts as the same function.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import save_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One stretch of target training at a fixed depth, with `batch` tokens per step, padding included."""

    layers: int
    steps: int
    lr: float
    decay: float = 0.0  # the last share of the steps, over which the rate falls linearly to zero
    warmup: int = 50
    batch: int = 12_288


def build_target(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised target in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).float()


def grow(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model of `layers` layers that computes the same function as `model`.

    Each trained layer is followed by its share of new ones: copies of it whose output projections
    (`o_proj`, `down_proj`) are zero, so that they add nothing to the residual stream until they are trained.
    """
    old = model.config.num_hidden_layers
    if layers < old or layers % old:
        raise ValueError(f"cannot grow {old} layers to {layers}: a multiple of {old} is needed")
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    deep = LlamaForCausalLM(config).float()
    copies = layers // old
    state = {}
    for name, value in model.state_dict().items():
        if not name.startswith("model.layers."):
            state[name] = value
            continue
        index, rest = name.removeprefix("model.layers.").split(".", 1)
        for copy in range(copies):
            new = rest.endswith(("o_proj.weight", "down_proj.weight")) and copy > 0
            state[f"model.layers.{int(index) * copies + copy}.{rest}"] = torch.zeros_like(value) if new else value
    deep.load_state_dict(state)
    return deep


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or ".layers." not in n]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learned_loss(model: LlamaForCausalLM, tokens: Tensor, learned: Tensor) -> Tensor:
    """Mean cross-entropy over the learned tokens; logits are computed at those positions only.

    Args:
        tokens: [B, T] long.
        learned: [B, T] bool; whether a token is a training target.
    """
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    chosen = learned[:, 1:]
    return nn.functional.cross_entropy(model.lm_head(hidden[chosen]), tokens[:, 1:][chosen])


def stage_rate(stage: Stage, step: int) -> float:
    """Learning rate of 0-based `step`."""
    to_end = (stage.steps - step) / max(1, stage.decay * stage.steps)
    return stage.lr * min(1.0, (step + 1) / stage.warmup, to_end)


def train_step(
    model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], rate: float, tokens: Tensor, learned: Tensor
) -> float:
    """One step on a batch [B, T]; returns its loss."""
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = rate
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = learned_loss(model, tokens, learned)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.item()


def train_stage(
    model: LlamaForCausalLM, stage: Stage, documents: Documents, *, seed: int, checkpoint: Path,
    device: str = "cpu", save_seconds: float = 240,
) -> LlamaForCausalLM:
    """Train in place for one stage; continues from `checkpoint` where it holds an unfinished one.

    Args:
        seed: of the order of the documents.
        checkpoint: file of the running state (model, optimisers, step), written every `save_seconds`.
    """
    batches = documents.batches(stage.batch, seed)
    if device == "cpu":
        model.set_attn_implementation("eager")  # its backward takes half of the time that sdpa's takes there
    model.to(device).train()
    opts = optimizers(model, stage.lr)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step = state["step"]
        log.info("continuing %s at step %d", checkpoint, step)

    def save() -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step}
        save_atomically(checkpoint, lambda part: torch.save(state, part))

    saved_at, loss_mean = time.time(), None
    bar = tqdm(total=stage.steps, initial=step, desc=f"target, {stage.layers} layers", unit="step", disable=None,
               mininterval=5)
    try:
        while step < stage.steps:
            rate, batch = stage_rate(stage, step), documents.collate(batches[step % len(batches)])
            value = train_step(model, opts, rate, *(torch.from_numpy(array).to(device) for array in batch))
            step += 1
            loss_mean = value if loss_mean is None else 0.98 * loss_mean + 0.02 * value
            bar.update()
            bar.set_postfix(loss=f"{loss_mean:.4f}", refresh=False)
            if step % 50 == 0:
                log.info("layers %d step %d loss %.4f lr %.2e", stage.layers, step, loss_mean, rate)
            if time.time() - saved_at > save_seconds or step == stage.steps:
                save()
                saved_at = time.time()
    except KeyboardInterrupt:
        save()
        raise
    finally:
        bar.close()
    return model
