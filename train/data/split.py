"""Which documents a run learns from, and which it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_fsd.data.documents import Documents
from train.config import TrainingConfig
from train.estimate import last_answers


@dataclass(frozen=True)
class DocumentSplit:
    """The documents of a run.

    Args:
        documents, learned: the dataset, and which of it are learned.
        held_out, measured: the dataset that tau is measured on, and which of it.
    """

    documents: Documents
    learned: np.ndarray
    held_out: Documents
    measured: np.ndarray

    @classmethod
    def of(cls, config: TrainingConfig) -> DocumentSplit:
        """From `eval_data`, else the last of `data`, which are then not learned.

        Raises:
            ValueError: no datasets, or one that is too small to keep any back.
        """
        documents = Documents.load(Path(config.data))
        count = len(documents)
        if config.eval_data is not None:
            held_out = Documents.load(Path(config.eval_data))
            return cls(documents, np.arange(count), held_out, np.arange(min(config.eval_documents, len(held_out))))
        kept = min(config.eval_documents, count // 10)
        if kept < 1:
            raise ValueError(f"{config.data} has {count} documents, too few to keep some back; give eval_data")
        return cls(documents, np.arange(count - kept), documents, np.arange(count - kept, count))

    def check_answers(self) -> None:
        """Raise now what the first evaluation would raise."""
        if not any(last_answers(self.held_out, self.measured.tolist())):
            raise ValueError("tau cannot be estimated: no held-out document has an answer of four tokens or more; "
                             "give eval_data, or evaluate=false")
