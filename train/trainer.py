"""One training run in this process: what is trained, and a step of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from train.core.config import TrainingConfig
from train.core.new_heads import VOCABULARY, limit_output, new_head, start_output, text_config
from train.core.objectives import AlignedLoss
from train.core.schedule import DocumentSplit, Schedule, feature_noise, learning_rate, shares
from train.core.teacher import Teacher


class Run:
    """One training run; `train.train_draft_head` drives it.

    Raises:
        ValueError: settings, data, features, head and target that do not fit together; before any long work where it
            can be known.
    """

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.output = config, accelerator, Path(config.output)
        self.split = DocumentSplit.of(config)
        self.documents = self.split.documents
        head = load_head(config.init_from).train() if config.init_from else new_head(config)
        highest = int(self.documents.tokens.max())
        if highest >= head.config.vocab_size:
            raise ValueError(f"{config.data} has token {highest}, the head's vocabulary ends before "
                             f"{head.config.vocab_size}: it was prepared for another target")
        layers = head.target_layers(text_config(config).num_hidden_layers)
        self.teacher = Teacher.of(config, accelerator, self.documents, layers)
        self._prepare(head)
        self.schedule = Schedule(self.documents, self.split.learned, config)
        self.step, self.steps = 0, self.schedule.steps

    def _prepare(self, head: DraftHead) -> None:
        """Join the head with the teacher, and hand it to accelerate with its loss and optimiser."""
        config, ends, device = self.config, self.teacher.ends, self.accelerator.device
        wanted = tuple(ends.lm_head.weight.shape)
        if (head.config.vocab_size, head.config.hidden_size) != wanted:
            raise ValueError(f"the head is made for vocabulary and hidden size "
                             f"{(head.config.vocab_size, head.config.hidden_size)}, the target's are {wanted}")
        head.share_embeddings(ends.embed_tokens)
        head.to(device)
        if not isinstance(head, Eagle3Head):
            limit_output(head, config.head.get(VOCABULARY), self.documents, ends)
        elif not config.init_from:
            start_output(head, self.documents, ends)
        if device.type == "cpu":
            head.config._attn_implementation = "eager"  # its backward takes half of the time that sdpa's takes there
        self.head_kind, self.head_config, self.head_bias = type(head), head.config, head.fc.bias is not None
        self.token_map = head.token_map
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        loss = AlignedLoss(head, config.objective, ends.logits)
        self.model, self.optimizer = self.accelerator.prepare(loss, optimizer)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]  # sharding has replaced the head's own

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns what is logged, as global means."""
        config, accelerator, step = self.config, self.accelerator, self.step
        rate = learning_rate(config, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch, parts = self.schedule.batch(step), accelerator.num_processes * accelerator.gradient_accumulation_steps
        # Every process knows the whole batch, and so by how many positions the sum has to be divided.
        count = max(1, self.documents.learnable(batch))
        loss_module = accelerator.unwrap_model(self.model)
        loss_module.start(step, self.steps)
        sums = torch.zeros(1 + loss_module.steps, device=accelerator.device)
        for indices in shares(batch, parts)[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.accumulate(self.model):
                loss, agreement = self.loss(indices, batch)
                # Data parallelism and accumulation take means over parts; this makes a sum of them.
                accelerator.backward(loss * parts / count)
                if accelerator.sync_gradients:
                    clip = accelerator.clip_grad_norm_ if config.clip == "norm" else accelerator.clip_grad_value_
                    clip(self.trained, config.clip_at)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += torch.cat([loss.detach()[None], agreement]).float()
        loss, *agreement = (accelerator.reduce(sums, "sum") / count).tolist()
        self.step += 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}; a lower lr or clip_at may help")
        tokens = int(self.documents.lengths_of(batch).sum())
        return {"step": self.step, "loss": loss, "top1": agreement, "lr": rate, "tokens": tokens}

    def loss(self, indices: np.ndarray, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sums over the learned positions of some documents; of none where this process's share is empty."""
        empty, device = len(indices) == 0, self.accelerator.device
        indices = batch[:1] if empty else indices
        tokens, learned = (torch.from_numpy(array).to(device) for array in self.documents.collate(indices))
        if empty:
            learned = torch.zeros_like(learned)
        features = self.teacher.features(indices, tokens).to(device)
        if self.accelerator.mixed_precision == "no":
            features = features.to(self.trained[0].dtype)
        noise = None
        if self.config.objective.noise:
            lengths = self.documents.lengths_of(indices)
            seed = self.config.seed * 1_000_003 + self.step
            noise = feature_noise(indices, lengths, features, self.config.objective.noise, seed)
        with self.accelerator.autocast():
            return self.model(features, tokens, learned, noise)

    def current_head(self) -> DraftHead | None:
        """A copy of the head in float32 on the main process; None on others. All processes must call it."""
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        head, target = self.head_kind(self.head_config, bias=self.head_bias), self.teacher.target
        head.config._attn_implementation = "sdpa"
        head.share_embeddings(
            self.teacher.ends.embed_tokens if target is None else target.embeddings_on(target.output_device)
        )
        head.load_state_dict({name.removeprefix("head."): value.to("cpu") for name, value in state.items()})
        if self.token_map is not None:
            head.limit_vocabulary(self.token_map)
            head.output_rows = (target.output_rows if target else self.teacher.ends.rows)(self.token_map)
        return head.eval()

    def close(self) -> None:
        """Let go of the model while its process group lives: gloo's, when it goes with the model, can wait forever."""
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
