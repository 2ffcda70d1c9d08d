"""Turn conversations or plain text into a tokenised dataset for head training.

    python -m train.prepare_data --target T --data sharegpt.json --out data/chat --max-length 2048

Answers are learned, questions are not; plain text is learned throughout. Rows that cannot be used are counted with
their reasons in `summary.json`. With `--regenerate` the target answers every question itself, which makes a better
head (it is what the head will have to predict); an interrupted run continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import eagle_fsd
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.conversations import FORMATS, BadRow, Record, read_rows
from eagle_fsd.data.documents import Documents, check_place
from eagle_fsd.data.files import append_lines, read_lines
from eagle_fsd.models.loading import load_target
from eagle_fsd.pair import EagleModel
from train.data.chat_mask import check_tokenizer, encode_conversation, render

log = logging.getLogger("train.prepare_data")

LONG = ("truncate", "drop")


def encode_row(
    row: Record, tokenizer: PreTrainedTokenizerBase, max_length: int, long: str
) -> list[tuple[list[int], list[bool]]]:
    """The documents of a row: one per conversation; plain text is cut into as many as it takes.

    Raises:
        BadRow: the row is bad, over-long under `long="drop"`, or nothing to learn is left of it.
    """
    if row.reason is not None:
        raise BadRow(row.reason)
    if row.text is not None:
        ids = tokenizer(row.text, add_special_tokens=False)["input_ids"]
        first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        last = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ids, body = ids + last, max_length - len(first)
        pieces = [first + ids[i : i + body] for i in range(0, len(ids), body)]
        pieces = [piece for piece in pieces if len(piece) > 2]  # nothing could be learned from less
        return [(piece, [False] * len(first) + [True] * (len(piece) - len(first))) for piece in pieces]
    encoded = encode_conversation(tokenizer, row.messages or [])
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
    """Join consecutive documents into rows of at most `max_length` tokens."""
    row: list[tuple[np.ndarray, np.ndarray]] = []
    for document in documents:
        if row and sum(len(ids) for ids, _ in row) + len(document[0]) > max_length:
            yield np.concatenate([ids for ids, _ in row]), np.concatenate([marks for _, marks in row])
            row = []
        row.append(document)
    if row:
        yield np.concatenate([ids for ids, _ in row]), np.concatenate([marks for _, marks in row])


def prepare(
    rows: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, long: str = "truncate",
    packed: bool = False,
) -> tuple[Documents, dict]:
    """The dataset of `rows` and its summary: how many rows there were, and how many were bad, by reason.

    Raises:
        ValueError: not one row can be used.
    """
    bad: Counter[str] = Counter()
    documents: list[tuple[np.ndarray, np.ndarray]] = []  # lists would take five times the memory
    count = truncated = 0
    for row in tqdm(rows, desc="rows", unit="row", disable=None):
        count += 1
        try:
            encoded = encode_row(row, tokenizer, max_length, long)
        except BadRow as error:
            bad[str(error)] += 1
        else:
            documents += [(np.asarray(ids, np.uint32), np.asarray(learned)) for ids, learned in encoded]
            truncated += row.text is None and len(encoded[-1][0]) == max_length
    if not documents:
        raise ValueError(f"none of {count} rows can be used: {dict(bad) or 'there are none'}")
    if packed:
        documents = list(pack(documents, max_length))
    summary = {
        "rows": count, "bad_rows": sum(bad.values()), "bad_reasons": dict(bad.most_common()),
        "at_full_length": truncated, "max_length": max_length, "packed": packed,
    }
    return Documents.of(documents), summary


def regenerate(
    rows: Iterable[Record], model: EagleModel, record: Path, *, temperature: float, max_new_tokens: int, seed: int,
    about: dict | None = None,
) -> Iterator[Record]:
    """The rows with every answer replaced by the target's own, turn by turn, decoded losslessly.

    Args:
        record: JSON lines file that each conversation is added to when it is finished; rows found there are not
            generated again.
        about: what the answers depend on; kept in the record's first line.

    Raises:
        ValueError: the record was begun for something else.
    """
    about = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, **(about or {})}
    begun, *finished = read_lines(record) or [None]
    if begun is None:
        append_lines(record, [about])
    elif begun != json.loads(json.dumps(about)):
        raise ValueError(f"{record} was begun with other settings, {begun}; delete it or choose another --out")
    done: dict[int, list[dict[str, str]] | str] = dict(finished)
    for number, row in enumerate(rows):
        if row.messages is None:
            yield row
            continue
        if number not in done:
            done[number] = answer_conversation(
                row.messages, model, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed + number
            )
            append_lines(record, [[number, done[number]]])
        answered = done.pop(number)
        if isinstance(answered, str):
            yield Record(reason=answered)
        else:
            yield dataclasses.replace(row, messages=answered)


def answer_conversation(
    messages: list[dict[str, str]], model: EagleModel, *, temperature: float, max_new_tokens: int, seed: int
) -> list[dict[str, str]] | str:
    """The conversation with the model's own answers, cut before a turn that does not fit; or why there is none."""
    answered: list[dict[str, str]] = []
    reason = "no answer to learn"
    for message in messages:
        if message["role"] != "assistant":
            answered.append(message)
            continue
        try:
            ids = model.tokenizer(render(model.tokenizer, answered, True), add_special_tokens=False)["input_ids"]
        except BadRow as error:
            reason = str(error)
            break
        if model.target.max_positions is not None and len(ids) >= model.target.max_positions:
            reason = "prompt too long to answer"
            break
        output = eagle_fsd.generate(
            ids, model, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, acceptance="exact"
        )
        if not (output.text or "").strip():
            reason = "empty answer of the target"
            break
        answered.append({"role": "assistant", "content": output.text or ""})
    while answered and answered[-1]["role"] != "assistant":
        answered.pop()
    return answered or reason


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id; its tokenizer and chat template are used")
    parser.add_argument("--data", required=True, nargs="+", help="JSON, JSONL or text files, or names for `datasets`")
    parser.add_argument("--format", choices=FORMATS, default="auto")
    parser.add_argument("--split", default="train", help="of a `datasets` dataset")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--max-length", type=int, default=2048, help="tokens per document (default: %(default)s)")
    parser.add_argument("--long", choices=LONG, default="truncate", help="what to do with longer conversations")
    parser.add_argument("--pack", action="store_true", help="join short documents into rows of --max-length")
    parser.add_argument("--limit", type=int, help="use only the first rows")
    parser.add_argument("--chat-template", type=Path, help="a Jinja file, for a tokenizer without a chat template")
    parser.add_argument("--trust-remote-code", action="store_true")
    own = parser.add_argument_group("answers by the target itself")
    own.add_argument("--regenerate", choices=("greedy", "sampled"))
    own.add_argument("--draft", help="a draft head of the target, to generate faster")
    own.add_argument("--temperature", type=float, default=1.0, help="of --regenerate sampled (default: %(default)s)")
    own.add_argument("--max-new-tokens", type=int, default=1024)
    own.add_argument("--seed", type=int, default=0)
    return parser


def run(args: argparse.Namespace) -> dict:
    """Prepare the dataset; returns its summary."""
    check_counts(args, "max_length", least=8)
    check_counts(args, "limit")
    for source in args.data:
        if Path(source).suffix and "/" in source and not Path(source).exists():
            raise ValueError(f"{source} does not exist")
    check_place(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    if args.chat_template:
        tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    if args.regenerate or (args.format != "text" and tokenizer.chat_template):
        check_tokenizer(tokenizer)

    def all_rows() -> Iterator[Record]:
        for source in args.data:
            yield from read_rows(source, args.format, args.split)

    rows: Iterable[Record] = all_rows()
    if args.limit:
        rows = (row for _, row in zip(range(args.limit), rows, strict=False))
    summary = {"target": args.target, "data": args.data, "regenerated": args.regenerate}
    if args.regenerate:
        if args.draft:
            model = eagle_fsd.load(args.target, args.draft, trust_remote_code=args.trust_remote_code)
        else:
            model = EagleModel.from_parts(load_target(args.target, trust_remote_code=args.trust_remote_code)[0], None)
        model.tokenizer = tokenizer
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows = regenerate(
            rows, model, args.out.with_name(args.out.name + ".answers.jsonl"), max_new_tokens=args.max_new_tokens,
            temperature=args.temperature if args.regenerate == "sampled" else 0.0, seed=args.seed,
            about={"target": args.target, "data": args.data, "format": args.format, "split": args.split},
        )
    documents, counts = prepare(
        rows, tokenizer, max_length=args.max_length, long=args.long, packed=args.pack
    )
    summary |= counts
    documents.save(args.out, summary)
    return json.loads((args.out / "summary.json").read_text(encoding="utf-8"))


def main() -> int:
    args = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status("train.prepare_data", lambda: print(json.dumps(run(args), indent=1)),
                       (ValueError, OSError, ImportError))


if __name__ == "__main__":
    sys.exit(main())
