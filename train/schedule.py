"""The documents of a run and of each of its steps, the noise of a step, and the length of the warm-up.

All are functions of the settings and the step, so that a run can resume, and run on any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_fsd.data.documents import Documents

from .config import TrainingConfig

GOLDEN = 0.618034  # fractional parts of its multiples are spread evenly over [0, 1)
HELD_OUT = 10  # one document of so many is held out


def check_size(count: int, place: str, unit: str) -> None:
    """Raise ValueError if there are too few to hold one out."""
    if count < HELD_OUT:
        raise ValueError(f"{place} has {count} {unit}, and {HELD_OUT} are needed to hold one out for evaluation: add "
                         "some, or pass --eval-data or --no-evaluate")


@dataclass(frozen=True)
class DocumentSplit:
    """The documents of a run.

    Args:
        documents, learned: the training dataset, and the indices of the documents to learn.
        held_out, measured: the evaluation dataset, and the indices of the documents that measure tau.
    """

    documents: Documents
    learned: np.ndarray
    held_out: Documents
    measured: np.ndarray

    @classmethod
    def of(cls, config: TrainingConfig) -> DocumentSplit:
        """Evaluate on `eval_data`, or else on the last documents of `data`, which are then not learned. Without
        evaluation all of `data` is learned.

        Raises:
            ValueError: a folder is not a dataset, or the dataset is too small to hold documents out.
        """
        documents = Documents.load(config.data)
        count = len(documents)
        if config.eval_data is not None:
            held_out = Documents.load(config.eval_data)
            return cls(documents, np.arange(count), held_out, np.arange(min(config.eval_documents, len(held_out))))
        if not config.evaluate:
            return cls(documents, np.arange(count), documents, np.arange(0))
        check_size(count, str(config.data), "documents")
        kept = min(config.eval_documents, count // HELD_OUT)
        return cls(documents, np.arange(count - kept), documents, np.arange(count - kept, count))

    def __str__(self) -> str:
        measured = f"{self.measured[0]} to {self.measured[-1]}" if len(self.measured) else "none"
        return f"learned 0 to {len(self.learned) - 1}, held out {measured}"

    def prompts(self, tokens: int) -> list[list[int]]:
        """Token ids of each held-out document up to where decoding begins, in its last answer.

        Args:
            tokens: number of tokens to decode. In longer answers decoding begins at different places; plain text is
                split in the middle.

        Raises:
            ValueError: no document has an answer.
        """
        prompts = []
        for number, index in enumerate(self.measured.tolist()):
            ids, learned = self.held_out.document(index)
            answer = np.flatnonzero(learned)
            if not len(answer):
                continue
            end = int(answer[-1]) + 1
            before = np.flatnonzero(~learned[:end])
            start = int(before[-1]) + 1 if len(before) else 0
            if start < 2:
                start = end // 2
            start += int(max(0, end - start - tokens) * (number * GOLDEN % 1))
            if start >= 2:
                prompts.append(ids[:start].tolist())
        if not prompts:
            raise ValueError("tau cannot be measured: no held-out document has an answer; pass eval_data, or "
                             "--no-evaluate")
        return prompts


def warmup_steps(config: TrainingConfig, steps: int) -> int:
    """The steps of the warm-up, after which a run must have steps at the peak rate and below."""
    return config.warmup if config.warmup < steps else steps // 10


class Schedule:
    """The documents of each step: batches of similar length, in a different order in every epoch."""

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
        """The documents of a step, a function of the step alone. Every epoch has as many batches as the first one."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._epoch(epoch)
        return self.batches[position % len(self.batches)]


def split_batch(batch: np.ndarray, parts: int) -> list[np.ndarray]:
    """Split a batch into `parts` forward passes: interleaved, so that all have similar lengths."""
    return [batch[part::parts] for part in range(parts)]


def feature_noise(
    indices: np.ndarray, lengths: Sequence[int], features: Tensor, amplitude: float, seed: int
) -> Tensor:
    """Uniform noise [T, F] in +- amplitude * 512 / length for a pack of documents, a function of (seed, document) and
    so the same for any split of the batch over processes."""
    parts, generator = [], torch.Generator(features.device)
    for document, length in zip(indices.tolist(), lengths, strict=True):
        generator.manual_seed(hash((seed, document)) % 2**63)
        drawn = torch.rand(length, features.shape[1], generator=generator, device=features.device)
        parts.append((drawn * 2 - 1) * (amplitude * 512 / length))
    return torch.cat(parts).to(features.dtype)
