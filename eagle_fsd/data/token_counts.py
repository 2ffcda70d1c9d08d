"""Count the tokens of answers: the most frequent ones are a draft vocabulary (FR-Spec, arXiv 2502.14856).

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

from .conversations import read_records
from .documents import Documents, is_dataset

log = logging.getLogger(__name__)
BLOCK = 1024  # tokens; every tenth block is held out to measure the coverage


@dataclass(frozen=True)
class TokenCounts:
    """Counts of each token in answers.

    counts, held_out: [V], of nine blocks of text in ten, and of the tenth. special: tokens that are always included.
    """

    counts: np.ndarray
    held_out: np.ndarray
    special: tuple[int, ...] = ()

    def ranked(self, counts: np.ndarray) -> np.ndarray:
        """[V] tokens: special ones, then by frequency; tokens that never occur by id, since BPE assigns low ids to
        common ones."""
        counts = counts.copy()
        counts[list(self.special)] = np.iinfo(counts.dtype).max
        return np.argsort(-counts, kind="stable")

    def coverage(self) -> np.ndarray:
        """[V]: at R - 1, the share of the held-out text in the R most frequent tokens of the other text."""
        text = self.held_out if self.held_out.any() else self.counts  # a short text has no held-out block
        return text[self.ranked(self.counts)].cumsum() / text.sum()

    def most_frequent(self, size: int) -> np.ndarray:
        """[R] the most frequent tokens of all text, in order of their ids.

        Raises:
            ValueError: R is above the vocabulary, or below the number of special tokens.
        """
        lowest, highest = max(1, len(self.special)), len(self.counts)
        if not lowest <= size <= highest:
            raise ValueError(f"a draft vocabulary must have {lowest} to {highest} tokens, got {size}")
        return np.sort(self.ranked(self.counts + self.held_out)[:size])

    def size_for(self, coverage: float) -> int:
        """The smallest R with this coverage of the held-out text.

        Raises:
            ValueError: the coverage is not in (0, 1].
        """
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage must be a share in (0, 1], got {coverage!r}")
        return max(len(self.special), int(np.searchsorted(self.coverage(), coverage - 1e-12)) + 1)


def count_tokens(
    sources: Sequence[str], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> TokenCounts:
    """Count the tokens of answers and of plain text.

    Args:
        sources: files for `read_records`, and folders by `prepare_data`, which need no tokenizer.

    Raises:
        ValueError: a source is neither, text has no tokenizer, there are no tokens, or some are beyond the vocabulary.
    """
    counts, seen = np.zeros((2, vocab_size), np.int64), 0
    for source in sources:
        for ids in _tokens_of(Path(source), tokenizer):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"{source} contains token {ids.max()}; the head's vocabulary is 0 to {vocab_size - 1}")
            blocks = np.arange(seen, seen + len(ids)) // BLOCK
            np.add.at(counts, ((blocks % 10 == 9).astype(int), ids), 1)
            seen += len(ids)
    if not seen:
        raise ValueError(f"{', '.join(sources)} must contain answers to count, got none")
    added = tokenizer.added_tokens_decoder if tokenizer else {}
    special = {*(tokenizer.all_special_ids if tokenizer else ()), *(n for n, token in added.items() if token.special)}
    return TokenCounts(counts[0], counts[1], tuple(sorted(number for number in special if number < vocab_size)))


def _tokens_of(source: Path, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[np.ndarray]:
    """The tokens of each answer or plain text, without those of the chat template."""
    if is_dataset(source):
        documents = Documents.load(source)
        yield documents.tokens[documents.learned]
        return
    if not source.is_file():
        raise ValueError(f"{source} is neither a file nor a dataset of prepare_data")
    if tokenizer is None:
        raise ValueError("text needs the target's tokenizer: pass the target")
    bad: Counter[str] = Counter()
    for record in tqdm(read_records(str(source)), desc=source.name, unit="row", disable=None, leave=False):
        if record.reason is not None:
            bad[record.reason] += 1
        answers = [message["content"] for message in record.messages or () if message["role"] == "assistant"]
        for text in answers if record.text is None else [record.text]:
            yield np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    if bad:
        log.warning("%s: %d rows left out, %s", source, bad.total(), dict(bad.most_common()))
