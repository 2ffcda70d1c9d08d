"""Tokenised documents on disk and in memory, and their batches.

A dataset is a folder with `tokens.npy`, `learned.npy` and `ends.npy`, which are memory-mapped, and `summary.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ARRAYS = ("tokens", "learned", "ends")
FILES = {*(f"{name}.npy" for name in ARRAYS), "summary.json"}


@dataclass(frozen=True)
class Documents:
    """Tokenised documents. Each is a sequence of its own: nothing of another is ever in its context.

    tokens: [total] unsigned, all documents one after the other; learned: [total] bool, tokens that are training
    targets (answers and plain text are, questions are not); ends: [documents] where each ends.
    """

    tokens: np.ndarray
    learned: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[tuple[list[int], list[bool]]]) -> Documents:
        """From token ids with a mark for each token that is learned."""
        documents = list(documents)
        if not documents:
            raise ValueError("a dataset needs at least one document")
        tokens = np.concatenate([np.asarray(ids, np.uint32) for ids, _ in documents])
        tokens = tokens.astype(np.uint16) if tokens.max() < 2**16 else tokens
        learned = np.concatenate([np.asarray(marks, bool) for _, marks in documents])
        return cls(tokens, learned, np.cumsum([len(ids) for ids, _ in documents]))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """[documents] tokens of each."""
        return np.diff(self.ends, prepend=0)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and learned marks of one document."""
        end = self.ends[index]
        start = self.ends[index - 1] if index else 0
        return self.tokens[start:end], self.learned[start:end]

    def digest(self) -> str:
        """A hash of the content, by which derived files know what they were made from."""
        hasher = hashlib.sha256()
        for name in ARRAYS:
            hasher.update(np.ascontiguousarray(getattr(self, name)).data)
        return hasher.hexdigest()[:16]

    def save(self, directory: Path, summary: dict | None = None) -> None:
        """Write the dataset; the folder appears when it is complete, in place of a dataset that was there.

        Raises:
            ValueError: see `check_place`.
        """
        check_place(directory)
        part = directory.with_name(directory.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name in ARRAYS:
            np.save(part / f"{name}.npy", getattr(self, name))
        counts = {
            "documents": len(self), "tokens": len(self.tokens), "learned_tokens": int(self.learned.sum()),
            "longest": int(self.lengths.max()),
        }
        (part / "summary.json").write_text(json.dumps({**(summary or {}), **counts}, indent=1) + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        part.replace(directory)

    @classmethod
    def load(cls, directory: Path) -> Documents:
        """The dataset of a folder, memory-mapped.

        Raises:
            ValueError: the folder is no dataset, or its arrays do not belong together.
        """
        if not is_dataset(directory):
            raise ValueError(f"{directory} is no dataset of train.prepare_data: it holds no {', '.join(ARRAYS)}.npy")
        documents = cls(*(np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS))
        if len(documents) == 0 or not documents.ends[-1] == len(documents.tokens) == len(documents.learned):
            raise ValueError(f"{directory} is damaged: its arrays differ in length")
        return documents

    def batches(self, size: int, seed: int) -> list[np.ndarray]:
        """Document indices of one epoch's batches of at most `size` tokens, padding included, in random order.

        Documents of a batch are alike in length, so that little is padded. A document longer than `size` is a
        batch of its own.
        """
        rng = np.random.default_rng(seed)
        lengths = self.lengths
        batches = []
        order = rng.permutation(len(lengths))
        for chunk in np.array_split(order, max(1, len(order) // 4096)):
            batches += split_rows(chunk[np.argsort(lengths[chunk], kind="stable")], lengths, size)
        return [batches[i] for i in rng.permutation(len(batches))]

    def collate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens [B, T] int64, padded at the end with 0, and learned [B, T] bool."""
        ends, lengths = self.ends[indices], self.lengths_of(indices)
        column = np.arange(lengths.max())
        inside = column < lengths[:, None]
        where = np.where(inside, (ends - lengths)[:, None] + column, 0)
        return np.where(inside, self.tokens[where], 0).astype(np.int64), inside & self.learned[where]

    def learned_tokens(self) -> Iterator[np.ndarray]:
        """The tokens that are training targets, in order, in pieces that fit into memory."""
        for start in range(0, len(self.tokens), 1 << 20):
            piece = slice(start, start + (1 << 20))
            yield self.tokens[piece][self.learned[piece]]

    def learnable(self, indices: Iterable[int]) -> int:
        """How many positions of the given documents a head learns from: a learned token needs two others before it."""
        return sum(int(self.document(index)[1][2:].sum()) for index in indices)

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """[B] tokens of the given documents."""
        starts = np.where(indices > 0, self.ends[indices - 1], 0)
        return self.ends[indices] - starts


def is_dataset(directory: Path) -> bool:
    """Whether a folder holds the arrays of a dataset."""
    return all((directory / f"{name}.npy").is_file() for name in ARRAYS)


def check_place(directory: Path) -> None:
    """Raise ValueError where a dataset must not be put: something is there that is no dataset."""
    if directory.is_dir():
        found = {path.name for path in directory.iterdir()}
        if not found or "ends.npy" in found and found <= FILES:
            return
        raise ValueError(f"{directory} exists and holds {min(found - FILES or found)}: only an empty folder or a "
                         "dataset of train.prepare_data is replaced; choose another folder or empty it")
    if directory.exists():
        raise ValueError(f"{directory} is no folder")


def split_rows(rows: np.ndarray, lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut `rows`, sorted by length, into batches of at most `size` tokens, padding included."""
    batches, first = [], 0
    for position in range(1, len(rows) + 1):
        if position == len(rows) or lengths[rows[position]] * (position - first + 1) > size:
            batches.append(rows[first:position])
            first = position
    return batches
