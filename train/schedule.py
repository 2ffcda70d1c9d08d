"""What each step of a run learns from, and at which rate: functions of the step alone, so that a run can be resumed."""

from __future__ import annotations

import numpy as np

from eagle_fsd.data.documents import Documents
from train.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """Of 0-based `step`: linear up over the warm-up, then linear down to zero."""
    to_end = (steps - step) / max(1, steps - config.warmup)
    return config.lr * min((step + 1) / max(1, config.warmup), to_end, 1.0)


class Schedule:
    """Which documents each step learns from: length-bucketed batches, another order in every epoch."""

    def __init__(self, documents: Documents, allowed: np.ndarray, config: TrainingConfig) -> None:
        self.documents, self.allowed, self.config = documents, allowed, config
        self.epoch, self.batches = 0, self._epoch(0)
        self.per_epoch = len(self.batches)

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        batches = self.documents.batches(self.config.batch_tokens, seed=self.config.seed * 1_000_003 + epoch)
        kept = [batch[np.isin(batch, self.allowed)] for batch in batches]
        return [batch for batch in kept if len(batch)]

    @property
    def steps(self) -> int:
        return self.config.steps or max(1, round(self.config.epochs * self.per_epoch))

    def batch(self, step: int) -> np.ndarray:
        """The documents of a step; a function of the step alone. Epochs count as many batches as the first has."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._epoch(epoch)
        return self.batches[position % len(self.batches)]


def shares(batch: np.ndarray, parts: int) -> list[np.ndarray]:
    """A batch dealt out to `parts` forwards: every part-th document, so that all get like lengths."""
    return [batch[part::parts] for part in range(parts)]
