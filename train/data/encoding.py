"""From records to a tokenised dataset: token ids, what of them is learned, packing, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle_fsd.data.conversations import BadRow, Record
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.progress import Progress
from train.data.chat_mask import encode_conversation


def encode_record(
    record: Record, tokenizer: PreTrainedTokenizerBase, max_length: int, long: str
) -> list[tuple[list[int], list[bool]]]:
    """The documents of a record: one per conversation; plain text is cut into as many as it takes.

    Raises:
        BadRow: the record is bad, over-long under `long="drop"`, or nothing to learn is left of it.
    """
    if record.reason is not None:
        raise BadRow(record.reason)
    if record.text is not None:
        ids = tokenizer(record.text, add_special_tokens=False)["input_ids"]
        first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        last = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ids, body = ids + last, max_length - len(first)
        pieces = [first + ids[i : i + body] for i in range(0, len(ids), body)]
        pieces = [piece for piece in pieces if len(piece) > 2]  # nothing could be learned from less
        return [(piece, [False] * len(first) + [True] * (len(piece) - len(first))) for piece in pieces]
    encoded = encode_conversation(tokenizer, record.messages or [])
    if long == "drop" and any(len(ids) > max_length for ids, _ in encoded):
        raise BadRow("over-long")
    cut = [(ids[:max_length], learned[:max_length]) for ids, learned in encoded]
    # Position i pairs a feature with the next token and learns the one after: two tokens have to precede.
    cut = [(ids, learned) for ids, learned in cut if any(learned[2:])]
    if not cut:
        raise BadRow("nothing to learn within the length")
    return cut


def pack(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], max_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Join consecutive documents, each its tokens and their learned marks, as long as `max_length` is not exceeded."""
    joined: list[tuple[np.ndarray, np.ndarray]] = []
    for document in documents:
        if joined and sum(len(ids) for ids, _ in joined) + len(document[0]) > max_length:
            yield tuple(map(np.concatenate, zip(*joined, strict=True)))
            joined = []
        joined.append(document)
    if joined:
        yield tuple(map(np.concatenate, zip(*joined, strict=True)))


def encode_dataset(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, long: str = "truncate",
    packed: bool = False,
) -> tuple[Documents, dict]:
    """The dataset of `records` and its summary: how many there were, and how many were bad, by reason.

    Raises:
        ValueError: not one record can be used.
    """
    bad: Counter[str] = Counter()
    documents: list[tuple[np.ndarray, np.ndarray]] = []  # lists would take five times the memory
    count = truncated = 0
    for record in Progress(records, desc="rows", unit="row"):
        count += 1
        try:
            encoded = encode_record(record, tokenizer, max_length, long)
        except BadRow as error:
            bad[str(error)] += 1
        else:
            documents += [(np.asarray(ids, np.uint32), np.asarray(learned)) for ids, learned in encoded]
            truncated += record.text is None and len(encoded[-1][0]) == max_length
    if not documents:
        raise ValueError(f"none of {count} rows can be used: {dict(bad) or 'there are none'}")
    if packed:
        documents = list(pack(documents, max_length))
    summary = {
        "rows": count, "bad_rows": sum(bad.values()), "bad_reasons": dict(bad.most_common()),
        "at_full_length": truncated, "max_length": max_length, "packed": packed,
    }
    return Documents.of(documents), summary
