"""One training run in this process: the model, the optimizer, its learning rates and a training step."""

from __future__ import annotations

import datetime
import math
from collections import deque

import numpy as np
import torch
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    PartialState,
)
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import AutoConfig, get_linear_schedule_with_warmup

from eagle_fsd.data.gguf import target_source
from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.utils.files import check_same

from .config import TrainingConfig
from .heads import new_head, set_draft_vocabulary
from .objectives import AlignedLoss
from .prepare_data import answers_of
from .schedule import DocumentSplit, Schedule, feature_noise, split_batch, warmup_steps
from .teacher import Teacher, form_name

SPAN = 50  # losses in a mean by which a run is judged
DIVERGED = 3.0  # times the lowest such mean


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """The run's `Accelerator`.

    Raises:
        ValueError: a setting contradicts accelerate's configuration, or FSDP does not support it.
    """
    tracker = None if config.tracker == "none" else config.tracker
    if tracker and tracker not in [str(name) for name in get_available_trackers()]:
        raise ValueError(f"tracker {tracker} needs the package {tracker}, which is not installed")
    plugin = None
    if config.shard:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="FULL_STATE_DICT")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, gradient_accumulation_steps=config.gradient_accumulation,
        fsdp_plugin=plugin, step_scheduler_with_optimizer=False,  # but once a step, on any number of processes
        cpu=config.cpu, log_with=tracker, project_dir=str(config.output) if tracker else None,
        # The other processes wait while the main process compares speeds.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(hours=6))],
    )
    if plugin and accelerator.distributed_type == DistributedType.MULTI_CPU:  # where accelerate ignores the plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if accelerator.gradient_accumulation_steps != config.gradient_accumulation:
        raise ValueError(
            f"gradient_accumulation is {config.gradient_accumulation}, but accelerate's configuration has "
            f"{accelerator.gradient_accumulation_steps}"
        )
    if accelerator.distributed_type == DistributedType.FSDP and config.clip == "value":
        raise ValueError("FSDP does not support clip value: use clip norm")
    if config.device_map and accelerator.num_processes > 1 and (config.features is None or config.evaluate):
        raise ValueError("device_map spreads the target over all devices, and every process would load it: launch one "
                         "process, or pass --features and --no-evaluate")
    return accelerator


class Trainer:
    """One training run, driven by `train.train_draft_head`.

    Attributes:
        digests: what the settings name, by its content: data, target, features, head to continue from, form of int8.

    Raises:
        ValueError: settings, data, features, head and target do not match; checked before long work where possible.
    """

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.split = DocumentSplit.of(config)
        self.documents = self.split.documents
        self.prompts = self.split.prompts(config.eval_tokens) if config.evaluate else []  # for evaluations
        text = AutoConfig.from_pretrained(
            target_source(config.target), trust_remote_code=config.trust_remote_code).get_text_config(decoder=True)
        head = load_head(config.init_from).train() if config.init_from else new_head(config, text)
        initial = head.digest() if config.init_from else None
        highest = int(self.documents.tokens.max())
        if highest >= head.config.vocab_size:
            raise ValueError(f"{config.data} has token {highest}, but the head's vocabulary has "
                             f"{head.config.vocab_size} tokens: the dataset was prepared for another target")
        layers = head.target_layers(text.num_hidden_layers)
        self.teacher = Teacher.of(config, accelerator, self.documents, layers)
        if config.conversations:
            check_same(config.data, {"target": answers_of(config.data).get("target")}, {"target": self.teacher.digest})
        self.digests = {
            "data": self.documents.digest(), "eval_data": config.eval_data and self.split.held_out.digest(),
            "split": str(self.split), "target": self.teacher.digest, "features": self.teacher.features.kind,
            "init_from": initial, "quantization": form_name(config.quantization)}
        self.schedule = Schedule(self.documents, self.split.learned, config)
        self.step, self.steps = 0, self.schedule.steps
        self.recent, self.lowest = deque(maxlen=SPAN), math.inf  # losses, and their lowest mean so far
        self._prepare(head)

    def _prepare(self, head: DraftHead) -> None:
        """Connect the head with the teacher, and prepare its loss, optimizer and learning rates with accelerate."""
        config, ends, device = self.config, self.teacher.ends, self.accelerator.device
        sizes, expected = (head.config.vocab_size, head.config.hidden_size), tuple(ends.lm_head.weight.shape)
        if sizes != expected:
            raise ValueError(f"the head has vocabulary and hidden size {sizes}, but the target has {expected}")
        head.share_embeddings(ends.embed_tokens)
        head.to(device)
        set_draft_vocabulary(head, config, self.documents, ends)
        self.head = head  # for its class and config only: sharding replaces its weights
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        rates = get_linear_schedule_with_warmup(optimizer, warmup_steps(config, self.steps), self.steps)
        self.model, self.optimizer, self.rates = self.accelerator.prepare(
            AlignedLoss(head, config.objective, ends.logits), optimizer, rates)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]  # after sharding, not the head's own

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step; return the values to log, as means over all processes."""
        config, accelerator, step = self.config, self.accelerator, self.step
        (rate, *_), batch = self.rates.get_last_lr(), self.schedule.batch(step)
        parts = accelerator.num_processes * config.gradient_accumulation
        # Every process knows the whole batch, and therefore the number of positions for the mean.
        count = max(1, self.documents.learnable(batch))
        accelerator.unwrap_model(self.model).residue = step % config.objective.logit_stride
        sums = torch.zeros(1 + config.objective.aligned_steps, device=accelerator.device)
        for indices in split_batch(batch, parts)[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.accumulate(self.model):
                loss, agreement = self.loss(indices, batch)
                # Data parallelism and accumulation average over parts; this factor turns the average into a sum.
                accelerator.backward(loss * parts / count)
                if accelerator.sync_gradients:
                    clip = accelerator.clip_grad_norm_ if config.clip == "norm" else accelerator.clip_grad_value_
                    clip(self.trained, config.clip_at)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += torch.cat([loss.detach()[None], agreement]).float()
        loss, *agreement = (accelerator.reduce(sums, "sum") / count).tolist()
        self.rates.step()
        self.step += 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}: try a lower lr or clip_at")
        self._check_converges(loss)
        tokens = int(self.documents.lengths[batch].sum())
        return {"step": self.step, "loss": loss, "top1": agreement, "lr": rate, "tokens": tokens}

    def _check_converges(self, loss: float) -> None:
        """Raise FloatingPointError if the losses rose far above what they were, from which runs do not recover."""
        self.recent.append(loss)
        if len(self.recent) < SPAN:
            return
        mean = sum(self.recent) / SPAN
        self.lowest = min(self.lowest, mean)
        if mean > DIVERGED * self.lowest:
            raise FloatingPointError(
                f"the run diverged: the mean loss of the last {SPAN} steps is {mean:.3g} at step {self.step}, and was "
                f"{self.lowest:.3g}. Try a lower lr than {self.config.lr:g} in a new output")

    def loss(self, indices: np.ndarray, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sums over the learned positions of some documents; zero if this process has none."""
        empty, device = len(indices) == 0, self.accelerator.device
        indices = batch[:1] if empty else indices
        tokens, learned = (torch.from_numpy(array).to(device) for array in self.documents.pack(indices))
        if empty:
            learned = torch.zeros_like(learned)
        lengths = self.documents.lengths[indices].tolist()
        features = self.teacher.features(indices).to(device)
        if self.accelerator.mixed_precision == "no":
            features = features.to(self.trained[0].dtype)
        noise = None
        if self.config.objective.noise:
            seed = self.config.seed * 1_000_003 + self.step
            noise = feature_noise(indices, lengths, features, self.config.objective.noise, seed)
        with self.accelerator.autocast():
            return self.model(features, tokens, learned, lengths, noise)

    def current_head(self) -> DraftHead:
        """A copy of the head in float32. All processes must call it."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.distributed_type == DistributedType.FSDP:  # which gives it to the main process only
            state, = broadcast_object_list([state])
        head = type(self.head)(self.head.config, bias=self.head.fc.bias is not None)
        head.share_embeddings(self.teacher.ends.embed_tokens)
        if isinstance(self.head, Eagle3Head) and self.head.lm_head is None:
            head.lm_head = None
        head.load_state_dict({name.removeprefix("head."): value.to("cpu") for name, value in state.items()})
        if self.head.token_map is not None:
            head.limit_vocabulary(self.head.token_map.cpu())
        return head.eval()

    def close(self) -> None:
        """Free the model before its process group ends: gloo can hang when both go together."""
        self.model, self.optimizer, self.rates = self.accelerator.free_memory(self.model, self.optimizer, self.rates)
