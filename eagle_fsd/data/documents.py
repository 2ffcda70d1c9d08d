"""Tokenised documents on disk and in memory, and their batches.

A dataset is a folder of three memory-mapped arrays, `tokens.npy`, `learned.npy` and `ends.npy`, and a `summary.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

ARRAYS = ("tokens", "learned", "ends")
FILES = {*(f"{name}.npy" for name in ARRAYS), "summary.json"}


@dataclass(frozen=True)
class Documents:
    """Tokenised documents. Each is a separate sequence; documents never share a context.

    Args:
        tokens: [total] unsigned, all documents concatenated.
        learned: [total] bool, the tokens that are training targets: answers and plain text, but not questions.
        ends: [documents] the end of each document in `tokens`.
    """

    tokens: np.ndarray
    learned: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[tuple[list[int], list[bool]]]) -> Documents:
        """Concatenate documents, each a list of token ids and a list of learned marks."""
        documents = list(documents)
        if not documents:
            raise ValueError("a dataset needs at least one document")
        tokens = np.concatenate([np.asarray(ids, np.uint32) for ids, _ in documents])
        tokens = tokens.astype(np.uint16) if tokens.max() < 2**16 else tokens
        learned = np.concatenate([np.asarray(marks, bool) for _, marks in documents])
        return cls(tokens, learned, np.cumsum([len(ids) for ids, _ in documents]))

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[documents] tokens in each document."""
        return np.diff(self.ends, prepend=0)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and learned marks of one document."""
        end = self.ends[index]
        start = self.ends[index - 1] if index else 0
        return self.tokens[start:end], self.learned[start:end]

    def digest(self) -> str:
        """A hash of the content, which ties derived files to their dataset."""
        hasher = hashlib.sha256()
        for name in ARRAYS:
            hasher.update(np.ascontiguousarray(getattr(self, name)).data)
        return hasher.hexdigest()[:16]

    def save(self, directory: Path, summary: dict | None = None) -> dict:
        """Write the dataset atomically, replacing a dataset in the same folder; return `summary` with its counts.

        Raises:
            ValueError: see `check_folder`.
        """
        check_folder(directory)
        part = directory.with_name(directory.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name in ARRAYS:
            np.save(part / f"{name}.npy", getattr(self, name))
        summary = {**(summary or {}), "documents": len(self), "tokens": len(self.tokens),
                   "learned_tokens": int(self.learned.sum()), "longest": int(self.lengths.max())}
        (part / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        part.replace(directory)
        return summary

    @classmethod
    def load(cls, directory: Path) -> Documents:
        """Open the dataset in a folder, memory-mapped.

        Raises:
            ValueError: the folder is not a dataset, or its arrays do not match.
        """
        if not is_dataset(directory):
            raise ValueError(f"{directory} is not a dataset of prepare_data: it needs {', '.join(ARRAYS)}.npy")
        documents = cls(*(np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS))
        if len(documents) == 0 or not documents.ends[-1] == len(documents.tokens) == len(documents.learned):
            raise ValueError(f"{directory} is damaged: its arrays differ in length")
        return documents

    def batches(self, size: int, seed: int) -> list[np.ndarray]:
        """Document indices of one epoch's batches of at most `size` tokens, padding included, in random order.

        A batch has documents of similar length, which keeps padding small. A document longer than `size` is a batch by
        itself.
        """
        rng = np.random.default_rng(seed)
        lengths, batches = self.lengths, []
        order = rng.permutation(len(lengths))
        for chunk in np.array_split(order, max(1, len(order) // 4096)):
            batches += split_by_size(chunk[np.argsort(lengths[chunk], kind="stable")], lengths, size)
        return [batches[i] for i in rng.permutation(len(batches))]

    def collate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens [B, T] int64, padded at the end with 0, and learned [B, T] bool."""
        ends, lengths = self.ends[indices], self.lengths[indices]
        column = np.arange(lengths.max())
        inside = column < lengths[:, None]
        where = np.where(inside, (ends - lengths)[:, None] + column, 0)
        return np.where(inside, self.tokens[where], 0).astype(np.int64), inside & self.learned[where]

    def pack(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """tokens [T] int64 and learned [T] bool of documents, one after the other."""
        tokens, learned = zip(*map(self.document, indices), strict=True)
        return np.concatenate(tokens).astype(np.int64), np.concatenate(learned)

    def learnable(self, indices: Iterable[int]) -> int:
        """Number of positions from which a head learns: learned tokens with at least two tokens before them."""
        return sum(int(self.document(index)[1][2:].sum()) for index in indices)


def is_dataset(directory: Path) -> bool:
    """Whether a folder has the arrays of a dataset."""
    return all((directory / f"{name}.npy").is_file() for name in ARRAYS)


def check_folder(directory: Path) -> None:
    """Raise ValueError unless the path is free, an empty folder, or a dataset that may be replaced."""
    if directory.is_dir():
        names = {path.name for path in directory.iterdir()}
        if not names or "ends.npy" in names and names <= FILES:
            return
        raise ValueError(f"{directory} contains {min(names - FILES or names)}; only an empty folder or a dataset of "
                         "prepare_data can be replaced: choose another folder or empty this one")
    if directory.exists():
        raise ValueError(f"{directory} is not a folder")


def split_by_size(rows: np.ndarray, lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Split `rows`, sorted by length, into batches of at most `size` tokens, padding included."""
    batches, first = [], 0
    for position in range(1, len(rows) + 1):
        if position == len(rows) or lengths[rows[position]] * (position - first + 1) > size:
            batches.append(rows[first:position])
            first = position
    return batches
