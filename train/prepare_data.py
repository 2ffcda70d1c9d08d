"""Turn conversations or plain text into a tokenised dataset for head training.

    python -m train.prepare_data --target T --data sharegpt.json --out data/chat --max-length 2048
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import eagle_fsd
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.conversations import FILE_SUFFIXES, TOKEN_IDS, Record, read_records
from eagle_fsd.data.documents import check_folder
from eagle_fsd.data.encoding import check_tokenizer, encode_dataset
from eagle_fsd.data.gguf import target_source
from eagle_fsd.data.questions import read_questions
from eagle_fsd.data.sources import is_hub_id
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.loading.load import set_attention
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.measure.records import generation_digest, tokenizer_digests
from eagle_fsd.models.loading import check_dtype, load_target
from eagle_fsd.utils.checks import check_interval, require_number
from eagle_fsd.utils.files import only_writer

from .answers import Respondent, endpoint_writer, local_writer, regenerate, self_prompted
from .teacher import form_name, target_digest

log = logging.getLogger("train.prepare_data")

MOST_CUT_OFF = 0.05  # share of answers at the limit of their length from which a warning is logged
EXCLUDED_WORDS = 10  # length of the n-grams of --exclude; a shorter question matches only a turn with exactly its words


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Turn conversations or plain text into a tokenised dataset for head training.

    The head learns answers but not questions, and all of a plain text. summary.json counts unusable rows by reason.
    With --regenerate the target answers every question itself. This makes a better head, because a head has to predict
    the target. An interrupted run continues. Answers are stored beside the dataset and found again by their
    conversation, so that --data, --limit, --exclude and --system may change.

    Args:
        target: directory, Hub ID or GGUF file of the target, for its tokenizer and chat template. If omitted:
            SmolLM2-135M-Instruct, as in eagle_fsd.load.
        data: JSON, JSONL or text files; sharegpt, ultrachat, perfectblend, magicoder or open-instruct; or folders and
            Hub IDs for the datasets package, with a configuration after a colon (openai/gsm8k:main).
        out: folder of the dataset.
        format: format of the rows. auto: detect it from their keys.
        split: split of a dataset that the datasets package opens. If omitted: that of the named set, or train.
        processes: number of processes that tokenise conversations; answers of the target are tokenised in one.
        max_length: most tokens in a document.
        long: truncate or drop longer conversations.
        limit: use only the first LIMIT rows.
        chat_template: Jinja file, for a tokenizer without a chat template.
        trust_remote_code: run code from the target's repository.
        regenerate: let the target answer the questions, by greedy decoding or by sampling. This also accepts rows that
            are a `prompt` or end with a question.
        self_prompted: number of conversations that the target writes by itself, user turns included, instead of --data.
        follow_ups: share of these conversations that have a second turn.
        endpoint: OpenAI-compatible server, such as vLLM or llama.cpp, that serves the target and writes the answers:
            "http://127.0.0.1:8081/v1". Its key is read from OPENAI_API_KEY.
        endpoint_model: name of the target on this server. If omitted: the server's first model.
        system: system turn for conversations without one.
        exclude: files of evaluation questions. Conversations in which a user turn shares ten consecutive words with
            one of them, or equals a shorter one, are left out and counted.
        batch: conversations answered together; with --endpoint, concurrent requests.
        dtype: dtype of the target that answers. auto: as in eagle_fsd.load.
        quantization: int8: answer with 8-bit weights on a CPU, as in eagle_fsd.load.
        draft: draft head of the target, for faster answers.
        temperature: temperature of --regenerate sampled.
        max_new_tokens: most tokens in each answer of the target.
        seed: seed of the sampling.
    """

    target: str | None = None
    out: Path
    data: tuple[str, ...] = ()
    format: Literal["auto", "sharegpt", "messages", "text"] = "auto"
    split: str | None = None
    processes: int = 1
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
    """Prepare the dataset and return its summary.

    Raises:
        ValueError: before anything is loaded: an option out of range, missing data, or a folder that must not be
            replaced. Later: no usable row, or another process writes the answers.
    """
    check_counts(arguments, "max_length", least=8)
    check_counts(arguments, "limit", "max_new_tokens", "self_prompted", "batch", "processes")
    if bool(arguments.data) == (arguments.self_prompted is not None):
        raise ValueError("pass either --data or --self-prompted")
    own = arguments.regenerate or arguments.self_prompted
    if arguments.endpoint and not own:
        raise ValueError("--endpoint needs --regenerate or --self-prompted: it writes answers")
    if arguments.endpoint and arguments.draft:
        raise ValueError("--draft cannot be combined with --endpoint: it drafts for answers written in this process")
    if arguments.system is not None and arguments.self_prompted:
        raise ValueError("--system cannot be combined with --self-prompted: the target writes after its own template")
    require_number("--temperature", arguments.temperature, "a number of at least 0", lambda value: value >= 0)
    check_interval("--follow-ups", arguments.follow_ups, 1.0, True)
    for source in arguments.data:
        if not Path(source).exists() and (Path(source).suffix in FILE_SUFFIXES
                                          or not is_hub_id(source.partition(":")[0])):
            raise ValueError(f"{source} does not exist")
    check_dtype(arguments.dtype)
    check_folder(arguments.out)
    records: Iterable[Record] = itertools.islice(itertools.chain.from_iterable(
        read_records(source, arguments.format, arguments.split, unanswered=arguments.regenerate is not None)
        for source in arguments.data), arguments.limit)
    if arguments.system is not None:
        records = (with_system(record, arguments.system) for record in records)
    if arguments.self_prompted is None:
        records = exclude_overlapping(records, arguments.exclude)  # before they are answered
    if arguments.regenerate:  # report bad rows before a model is loaded
        records = list(records)
        if not any(record.messages for record in records):
            reasons = dict(Counter(record.reason or "plain text" for record in records))
            raise ValueError(f"{', '.join(arguments.data)}: no row can be answered: {reasons or 'no rows'}")
    arguments = replace(arguments, target=arguments.target or default_target())
    place = target_source(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=arguments.trust_remote_code)
    if arguments.chat_template:
        tokenizer.chat_template = arguments.chat_template.read_text(encoding="utf-8")
    if own or (arguments.format != "text" and tokenizer.chat_template):
        check_tokenizer(tokenizer)
    made_by, answers = None, Counter()
    with only_writer(answers_path(arguments)) if own else nullcontext():
        if own:
            records, made_by = regenerated(records, arguments, place, tokenizer)
            records = count_answers(records, arguments.max_new_tokens, answers)
        if arguments.self_prompted is not None:
            records = exclude_overlapping(records, arguments.exclude)
        documents, counts = encode_dataset(records, tokenizer, max_length=arguments.max_length, long=arguments.long,
                                           quiet=bool(own), processes=1 if own else arguments.processes)
    about = {"target": arguments.target, "data": list(arguments.data), "sha256": digests(arguments.data),
             "regenerated": arguments.regenerate, "self_prompted": arguments.self_prompted, "answers_of": made_by}
    if answers["cut_off"] > MOST_CUT_OFF * answers["answers"]:
        log.warning("%d of %d answers were cut off at %d tokens, where small targets often repeat themselves, and the "
                    "head learns no end. --max-new-tokens sets the limit: less takes less time, more lets long answers "
                    "end", answers["cut_off"], answers["answers"], arguments.max_new_tokens)
    return documents.save(arguments.out, about | counts | answers)


def count_answers(records: Iterable[Record], limit: int, counts: Counter) -> Iterator[Record]:
    """The same records; counts their answers, and those of `limit` tokens, if the tokens are known."""
    for record in records:
        answers = [message for message in record.messages or () if message["role"] == "assistant"]
        counts["answers"] += len(answers)
        counts["cut_off"] += sum(len(answer.get(TOKEN_IDS) or ()) >= limit for answer in answers)
        yield record


def answers_of(data: Path) -> dict:
    """What the answers in a dataset depend on (see `regenerated`); empty if it is not known."""
    return json.loads((data / "summary.json").read_text(encoding="utf-8")).get("answers_of") or {}


def digests(sources: Sequence[str]) -> list[str | None]:
    """SHA-256 of the content of each file; None: the source is no file."""
    found: list[str | None] = []
    for source in sources:
        hasher = hashlib.sha256()
        if Path(source).is_file():
            with open(source, "rb") as file:
                while block := file.read(2**20):
                    hasher.update(block)
        found.append(hasher.hexdigest() if Path(source).is_file() else None)
    return found


def with_system(record: Record, text: str) -> Record:
    """Add a system turn to a conversation without one."""
    if record.messages is None or record.messages[0]["role"] == "system":
        return record
    return Record(messages=[{"role": "system", "content": text}, *record.messages])


def grams(text: str) -> Iterator[tuple[str, ...]]:
    """The word n-grams of a text, ignoring case and punctuation. A shorter text is one n-gram."""
    words = re.findall(r"\w+", text.casefold())
    for start in range(max(1, len(words) - EXCLUDED_WORDS + 1)):
        yield tuple(words[start : start + EXCLUDED_WORDS])


def exclude_overlapping(records: Iterable[Record], files: Sequence[Path]) -> Iterator[Record]:
    """Replace each record that shares an n-gram with a question by a bad record.

    Args:
        files: question files for `read_questions`.

    Raises:
        ValueError: a file without questions.
    """
    questions = {gram for file in files for question in read_questions(file) for turn in question.turns
                 for gram in grams(turn)} - {()}
    return (Record(reason="shares words with --exclude") if questions and any(
        gram in questions for text in user_texts(record) for gram in grams(text)) else record for record in records)


def user_texts(record: Record) -> list[str]:
    """The user turns of a record, or its plain text."""
    return [record.text] if record.text else [
        message["content"] for message in record.messages or [] if message["role"] == "user"]


def answers_path(arguments: Arguments) -> Path:
    """The file of the target's answers."""
    return arguments.out.with_name(arguments.out.name + ".answers.jsonl")


def regenerated(
    records: Sequence[Record], arguments: Arguments, place: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[Iterator[Record], dict]:
    """The records with answers by the target at `place`, which are stored beside the dataset, and what the answers
    depend on besides the conversations and the settings of `Respondent`.

    `draft` and `batch` are not among it, since answers are decoded losslessly and do not depend on their batch.
    """
    about: dict[str, object] = tokenizer_digests(tokenizer)
    if arguments.endpoint:
        write, name = endpoint_writer(arguments.endpoint, arguments.endpoint_model, tokenizer, arguments.batch)
        about |= {"target": arguments.target, "endpoint": arguments.endpoint, "endpoint_model": name}
    else:
        model = load_model(arguments, place, tokenizer)
        write = local_writer(model)
        about |= {"target": target_digest(model.target), "dtype": str(model.target.dtype),
                  "quantization": form_name(arguments.quantization),
                  "generation_config": generation_digest(model.target.model)}
    store = answers_path(arguments)
    writer = Respondent(
        # A larger batch keeps the server's slots full until its last requests.
        write, tokenizer, batch=arguments.batch * (4 if arguments.endpoint else 1),
        max_new_tokens=arguments.max_new_tokens, seed=arguments.seed,
        temperature=arguments.temperature if arguments.regenerate == "sampled" else 0.0,
    )
    if arguments.self_prompted is not None:
        return self_prompted(arguments.self_prompted, writer, store, about, follow_ups=arguments.follow_ups), about
    return regenerate(records, writer, store, about), about


def load_model(arguments: Arguments, place: str, tokenizer: PreTrainedTokenizerBase) -> EagleModel:
    """Load the target, with its draft head if there is one. Cycles are not captured: a large batch has another number
    of rows in nearly each of them."""
    trusted = arguments.trust_remote_code
    if arguments.draft:
        model = eagle_fsd.load(place, arguments.draft, dtype=arguments.dtype, quantization=arguments.quantization,
                               trust_remote_code=trusted, cuda_graphs=False)
    else:
        target, _ = load_target(place, dtype=arguments.dtype, trust_remote_code=trusted)
        model = EagleModel.from_parts(target, None, cuda_graphs=False)
        set_attention(model.target, None)
    model.tokenizer = tokenizer
    model.prepack(arguments.quantization)
    return model


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for client in ("httpx", "httpx2"):  # which log every request
        logging.getLogger(client).setLevel(logging.WARNING)
    return exit_status(__spec__.name, lambda: print(json.dumps(
        run(parse_options(Arguments, program=f"python -m {__spec__.name}")), indent=1)))


if __name__ == "__main__":
    sys.exit(main())
