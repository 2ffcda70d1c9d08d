"""Turn conversations or plain text into a tokenised dataset for head training.

    python -m train.prepare_data --target T --data sharegpt.json --out data/chat --max-length 2048
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import eagle_fsd
from eagle_fsd.checks import check_interval, require_number
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.conversations import Record, read_records
from eagle_fsd.data.files import only_writer
from eagle_fsd.data.gguf import target_source
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.loading import set_attention
from eagle_fsd.models.loading import check_dtype, load_target
from eagle_fsd.pair import EagleModel
from train.answers import Respondent, local_writer, regenerate, self_prompted, served_writer
from train.documents import check_place
from train.encoding import check_tokenizer, encode_dataset
from train.overlap import without


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Turn conversations or plain text into a tokenised dataset for head training.

    Answers are learned, questions are not; plain text is learned throughout. Rows that cannot be used are counted with
    their reasons in summary.json. With --regenerate the target answers every question itself, which makes a better head
    (it is what the head will have to predict); an interrupted run continues.

    Args:
        target: directory, hub id or GGUF file; its tokenizer and chat template are used; without it
            SmolLM2-135M-Instruct, as of eagle_fsd.load.
        data: JSON, JSONL or text files, or names for the package datasets.
        out: folder of the dataset.
        format: of the rows; auto tells by their keys.
        split: of a dataset that the package datasets opens.
        max_length: tokens per document.
        long: what to do with longer conversations.
        limit: use only the first rows.
        chat_template: a Jinja file, for a tokenizer without a chat template.
        trust_remote_code: allow a target to run code from its repository.
        regenerate: let the target answer the questions itself, greedily or by sampling; also rows that are a `prompt`
            or end with a question.
        self_prompted: so many conversations that the target writes alone, its users' turns too, instead of --data.
        follow_ups: share of them that go on for a second turn.
        endpoint: of a server with OpenAI's API that has the target and answers in its place, such as vLLM's or
            llama.cpp's: "http://127.0.0.1:8081/v1". Its key is taken from OPENAI_API_KEY.
        endpoint_model: its name there; without it the first that the server has.
        system: a system turn for the conversations that have none.
        exclude: files of questions that the head is to be judged by; conversations in which a user shares ten words
            in a row with one, or asks it, are left out and counted.
        batch: conversations that are answered together; of a server, requests at a time.
        dtype: of the target that answers; auto as in eagle_fsd.load.
        quantization: int8 to answer with 8-bit weights on a CPU, as in eagle_fsd.load.
        draft: a draft head of the target, to generate faster.
        temperature: of --regenerate sampled.
        max_new_tokens: of each answer of the target.
        seed: of what is sampled.
    """

    target: str | None = None
    out: Path
    data: tuple[str, ...] = ()
    format: Literal["auto", "sharegpt", "messages", "text"] = "auto"
    split: str = "train"
    max_length: int = 2048
    long: Literal["truncate", "drop"] = "truncate"
    limit: int | None = None
    chat_template: Path | None = None
    trust_remote_code: bool = False
    regenerate: Literal["greedy", "sampled"] | None = None
    self_prompted: int | None = None
    follow_ups: float = 0.3
    endpoint: str | None = None
    endpoint_model: str | None = None
    system: str | None = None
    exclude: tuple[Path, ...] = ()
    batch: int = 32
    dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    draft: str | None = None
    temperature: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0


def run(arguments: Arguments) -> dict:
    """Prepare the dataset; returns its summary.

    Raises:
        ValueError: before anything is loaded, an option out of range, data that is not there, or a folder that must not
            be replaced; no row that can be used; answers that another process is writing.
    """
    check_counts(arguments, "max_length", least=8)
    check_counts(arguments, "limit", "max_new_tokens", "self_prompted", "batch")
    if bool(arguments.data) == (arguments.self_prompted is not None):
        raise ValueError("give either --data or --self-prompted")
    require_number("--temperature", arguments.temperature, "a number of at least 0", lambda value: value >= 0)
    check_interval("--follow-ups", arguments.follow_ups, 1.0, True)
    for source in arguments.data:
        if Path(source).suffix and "/" in source and not Path(source).exists():
            raise ValueError(f"{source} does not exist")
    check_dtype(arguments.dtype)
    check_place(arguments.out)
    records: Iterable[Record] = itertools.islice(itertools.chain.from_iterable(
        read_records(source, arguments.format, arguments.split, unanswered=arguments.regenerate is not None)
        for source in arguments.data), arguments.limit)
    if arguments.system is not None:
        records = (with_system(record, arguments.system) for record in records)
    if arguments.self_prompted is None:
        records = without(records, arguments.exclude)  # before they are answered
    if arguments.regenerate:  # what is wrong with them is said before a model is loaded
        records = list(records)
        if not any(record.messages for record in records):
            reasons = dict(Counter(record.reason or "plain text" for record in records))
            raise ValueError(f"{', '.join(arguments.data)}: nothing that could be answered: {reasons or 'no rows'}")
    arguments = replace(arguments, target=arguments.target or default_target())
    place = target_source(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=arguments.trust_remote_code)
    if arguments.chat_template:
        tokenizer.chat_template = arguments.chat_template.read_text(encoding="utf-8")
    if arguments.endpoint and not (arguments.regenerate or arguments.self_prompted):
        raise ValueError("--endpoint writes answers: it needs --regenerate or --self-prompted")
    if arguments.endpoint and arguments.draft:
        raise ValueError("--draft is for answers that are made here: leave it out with --endpoint")
    own = arguments.regenerate or arguments.self_prompted
    if own or (arguments.format != "text" and tokenizer.chat_template):
        check_tokenizer(tokenizer)
    with only_writer(store_of(arguments)) if own else nullcontext():
        if own:
            records = regenerated(records, arguments, place, tokenizer)
        if arguments.self_prompted is not None:
            records = without(records, arguments.exclude)
        documents, counts = encode_dataset(records, tokenizer, max_length=arguments.max_length, long=arguments.long,
                                           quiet=bool(own))
    about = {"target": arguments.target, "data": list(arguments.data), "regenerated": arguments.regenerate,
             "self_prompted": arguments.self_prompted}
    documents.save(arguments.out, about | counts)
    return json.loads((arguments.out / "summary.json").read_text(encoding="utf-8"))


def with_system(record: Record, text: str) -> Record:
    """A conversation with a system turn, unless it has one."""
    if record.messages is None or record.messages[0]["role"] == "system":
        return record
    return Record(messages=[{"role": "system", "content": text}, *record.messages])


def store_of(arguments: Arguments) -> Path:
    """The file of the target's own answers."""
    return arguments.out.with_name(arguments.out.name + ".answers.jsonl")


def regenerated(
    records: Sequence[Record], arguments: Arguments, place: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Record]:
    """The records with the own answers of the target at `place`, which are kept beside the dataset."""
    if arguments.endpoint:
        write = served_writer(arguments.endpoint, arguments.endpoint_model, tokenizer, arguments.batch)
    else:
        write = local_writer(load_model(arguments, place, tokenizer))
    store = store_of(arguments)
    writer = Respondent(
        # Of a server, slots that become free are filled before all answers of a batch are there.
        write, tokenizer, batch=arguments.batch * (4 if arguments.endpoint else 1),
        max_new_tokens=arguments.max_new_tokens, seed=arguments.seed,
        temperature=arguments.temperature if arguments.regenerate == "sampled" else 0.0,
    )
    about = {"target": arguments.target, **{name: value for name in ("endpoint", "system", "quantization")
                                            if (value := getattr(arguments, name)) is not None}}
    if arguments.self_prompted is not None:
        return self_prompted(arguments.self_prompted, writer, store, follow_ups=arguments.follow_ups, about=about)
    return regenerate(records, writer, store, about=about | {
        "data": list(arguments.data), "format": arguments.format, "split": arguments.split})


def load_model(arguments: Arguments, place: str, tokenizer: PreTrainedTokenizerBase) -> EagleModel:
    """The target that answers, with the draft that makes it faster."""
    trusted = arguments.trust_remote_code
    if arguments.draft:
        model = eagle_fsd.load(place, arguments.draft, dtype=arguments.dtype, quantization=arguments.quantization,
                               trust_remote_code=trusted)
    else:
        model = EagleModel.from_parts(load_target(place, dtype=arguments.dtype, trust_remote_code=trusted)[0], None)
        set_attention(model.target, None)
    model.tokenizer = tokenizer
    model.prepack(arguments.quantization)
    return model


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for client in ("httpx", "httpx2"):  # which say of every request that it was answered
        logging.getLogger(client).setLevel(logging.WARNING)
    return exit_status("train.prepare_data", lambda: print(json.dumps(
        run(parse_options(Arguments, program="python -m train.prepare_data")), indent=1)))


if __name__ == "__main__":
    sys.exit(main())
