"""Which tokens a draft head should name: those that the target's answers are made of (FR-Spec, arXiv 2502.14856).

V vocabulary of the target, R of the draft.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.conversations import read_records

log = logging.getLogger(__name__)
BLOCK = 1024  # tokens; every tenth block is kept back to measure the coverage on


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs in answers.

    counted, kept_back: [V], of nine blocks of text in ten, and of the others. special: tokens that are always named.
    """

    counted: np.ndarray
    kept_back: np.ndarray
    special: tuple[int, ...] = ()

    def ranked(self, counts: np.ndarray) -> np.ndarray:
        """[V] tokens: special ones, then by how often they occur; those that never do by number, where BPE has what is
        common first."""
        counts = counts.copy()
        counts[list(self.special)] = np.iinfo(counts.dtype).max
        return np.argsort(-counts, kind="stable")

    def coverage(self) -> np.ndarray:
        """[V]: the share of the text kept back that the R most frequent tokens of the other text make up, at R - 1."""
        held = self.kept_back if self.kept_back.any() else self.counted  # of a few tokens nothing is kept back
        return held[self.ranked(self.counted)].cumsum() / held.sum()

    def commonest(self, size: int) -> np.ndarray:
        """[R] the most frequent tokens of all the text, by number.

        Raises:
            ValueError: more than there are, or fewer than the special ones.
        """
        lowest, highest = max(1, len(self.special)), len(self.counted)
        if not lowest <= size <= highest:
            raise ValueError(f"a draft vocabulary must have {lowest} to {highest} tokens, got {size}")
        return np.sort(self.ranked(self.counted + self.kept_back)[:size])

    def size_for(self, coverage: float) -> int:
        """The smallest R that covers so much of the text kept back.

        Raises:
            ValueError: a share that is not in (0, 1].
        """
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage must be a share in (0, 1], got {coverage!r}")
        return max(len(self.special), int(np.searchsorted(self.coverage(), coverage - 1e-12)) + 1)


def count_tokens(
    sources: Sequence[str], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> TokenCounts:
    """Count the tokens of answers, and of plain text.

    Args:
        sources: files that `read_records` reads, and folders of `train.prepare_data`, which need no tokenizer.

    Raises:
        ValueError: neither files nor such folders, text without a tokenizer, nothing to count, or tokens beyond the
            vocabulary.
    """
    counts, seen = np.zeros((2, vocab_size), np.int64), 0
    for source in sources:
        for ids in _tokens_of(Path(source), tokenizer):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"{source} holds token {ids.max()}, the head knows 0 to {vocab_size - 1}")
            blocks = np.arange(seen, seen + len(ids)) // BLOCK
            np.add.at(counts, ((blocks % 10 == 9).astype(int), ids), 1)
            seen += len(ids)
    if not seen:
        raise ValueError(f"there is no answer to count tokens of in {', '.join(sources)}")
    added = tokenizer.added_tokens_decoder if tokenizer else {}
    special = {*(tokenizer.all_special_ids if tokenizer else ()), *(n for n, token in added.items() if token.special)}
    return TokenCounts(counts[0], counts[1], tuple(sorted(number for number in special if number < vocab_size)))


def _tokens_of(source: Path, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[np.ndarray]:
    """The tokens of each answer or plain text, without what the chat template puts around them."""
    if (source / "learned.npy").is_file():
        yield np.load(source / "tokens.npy")[np.load(source / "learned.npy")]
        return
    if not source.is_file():
        raise ValueError(f"{source} is neither a file nor a dataset of train.prepare_data")
    if tokenizer is None:
        raise ValueError("text needs the target's tokenizer: give the target")
    bad: Counter[str] = Counter()
    for record in tqdm(read_records(str(source)), desc=source.name, unit="row", disable=None, leave=False):
        if record.reason is not None:
            bad[record.reason] += 1
        answers = [message["content"] for message in record.messages or () if message["role"] == "assistant"]
        for text in answers if record.text is None else [record.text]:
            yield np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    if bad:
        log.warning("%s: %d rows left out, %s", source, bad.total(), dict(bad.most_common()))
