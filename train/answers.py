"""Conversations with answers by the target, which a head has to predict.

User turns come from existing conversations or from the target: after its template's opening of a user turn, it writes
what a user would ask (Magpie, arXiv 2406.08464). Finished answers are appended to a JSON lines file, the store, from
which an interrupted run continues. Its first line has all that answers depend on. Answers are found again by the turns
of their conversation, so that the data may change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle_fsd import EagleModel, GenerateOptions
from eagle_fsd.api import decode_requests
from eagle_fsd.data.conversations import TOKEN_IDS, BadRow, Record
from eagle_fsd.data.encoding import ANYTHING, render
from eagle_fsd.decoding.request import Request
from eagle_fsd.inputs.prompts import ChatTokens, end_of_turn
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.measure.statistics import repetition
from eagle_fsd.utils.files import append_lines, check_same, read_lines, write_lines
from eagle_fsd.utils.progress import Progress

log = logging.getLogger(__name__)

Message = dict[str, Any]  # role, content, and in the target's answers TOKEN_IDS if they are known
Messages = list[Message]

WINDOW = 16  # number of batches whose conversations are sorted by length together
USER_TOKENS = 256  # most tokens in a user turn
USER_SAMPLING = {"temperature": 1.0, "top_p": 0.95}
SHORTEST, LONGEST = 12, 1200  # characters in a user turn
MOST_REPETITION = 0.2  # largest share of repeated word 4-grams in a user turn


class Completion(NamedTuple):
    """The target's continuation of a text."""

    text: str
    token_ids: list[int] | None  # including the end token; None if a server does not return them


# (texts, seeds, done, **sampling): calls done(number, Completion or BadRow) as the continuation of each text ends.
Write = Callable[..., None]


def local_writer(model: EagleModel) -> Write:
    """Write with a model in this process, in one batch."""

    def write(texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        limit = model.target.max_positions
        prompts = [ChatTokens(model.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        fitting = [number for number, ids in enumerate(prompts) if limit is None or len(ids) < limit]
        for number in set(range(len(texts))) - set(fitting):
            done(number, BadRow("prompt too long to answer"))
        if not fitting:
            return
        options = GenerateOptions(**{  # in large batches, text drafts without a head are slower
            "acceptance": "exact", "text_drafts": "off" if model.draft is None else "auto",
            "seed": [seeds[number] for number in fitting], **sampling})
        requests = make_requests(model, [prompts[number] for number in fitting], options)
        number_of = dict(zip(map(id, requests), fitting, strict=True))

        def ended(request: Request) -> None:
            ids = request.answer
            done(number_of[id(request)], Completion(model.tokenizer.decode(ids, skip_special_tokens=True), ids))

        decode_requests(model, requests, ended=ended)

    return write


def endpoint_writer(
    url: str, name: str | None, tokenizer: PreTrainedTokenizerBase, concurrency: int
) -> tuple[Write, str]:
    """Write with the target on an OpenAI-compatible server, by its completions endpoint and with token ids as prompts.

    Args:
        url: base URL, including "/v1".
        name: name of the model on the server; None: the server's first model.
        concurrency: concurrent requests, ideally the number of the server's slots.

    Returns:
        The writer, and the name of the model.

    Raises:
        ImportError: the package openai is not installed.
        ValueError: the server does not answer, or has no model.
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError("--endpoint needs the package openai (pip install openai)") from error
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=5)
    try:
        name = name or next((model.id for model in client.models.list()), None)
    except openai.APIError as error:
        raise ValueError(f"--endpoint {url} does not answer: {error}") from error
    if name is None:
        raise ValueError(f"--endpoint {url} lists no model: pass --endpoint-model")
    extra: dict[str, object] = {"return_token_ids": True}  # options of vLLM, which other servers may reject
    if (turn := end_of_turn(tokenizer)) is not None:
        extra["stop_token_ids"] = [turn]

    def ask(text: str, seed: int, sampling: Mapping) -> Completion | BadRow:
        sent = dict(extra)  # another thread may clear it meanwhile
        body = {"model": name, "prompt": tokenizer(text, add_special_tokens=False)["input_ids"],
                "seed": seed % 2**31, "max_tokens": sampling["max_new_tokens"],
                **{key: value for key, value in sampling.items() if key != "max_new_tokens"}}
        try:
            try:
                choice = client.completions.create(**body, extra_body=sent).choices[0]
            except openai.BadRequestError:
                if not sent:
                    raise
                choice = client.completions.create(**body).choices[0]
                log.warning("the server rejects %s: answers end where it ends them", " and ".join(sent))
                extra.clear()
        except openai.BadRequestError as error:
            log.warning("the server rejects a prompt: %s", error)
            return BadRow("rejected by the server")
        ids = getattr(choice, "token_ids", None)
        if ids is None and choice.finish_reason == "length":  # without them, its text would be learned with an end mark
            ids = tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        return Completion(choice.text, ids)

    def write(texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        pool = ThreadPoolExecutor(concurrency)
        numbers = {pool.submit(ask, text, seed, sampling): number
                   for number, (text, seed) in enumerate(zip(texts, seeds, strict=True))}
        try:
            for future in as_completed(numbers):
                done(numbers[future], future.result())
        finally:
            pool.shutdown(cancel_futures=True)

    return write, name


class Respondent:
    """The target as a writer of the next turn of many conversations at a time.

    Args:
        batch: conversations in one call of `write`.
    """

    def __init__(
        self, write: Write, tokenizer: PreTrainedTokenizerBase, *, batch: int, temperature: float, max_new_tokens: int,
        seed: int,
    ) -> None:
        self.write, self.tokenizer, self.batch, self.seed = write, tokenizer, batch, seed
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.tokens, self.seconds = 0, 0.0  # generated so far, and the time for it

    @property
    def settings(self) -> dict[str, object]:
        """The settings on which the answers depend."""
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens,
                "seed": self.seed if self.temperature else None}

    @property
    def speed(self) -> dict[str, object]:
        """Values for a progress bar."""
        return {"tokens": self.tokens, "tokens/s": round(self.tokens / max(self.seconds, 1e-9))}

    def _continue(self, texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        """Call `done(number, Completion or BadRow)` as the continuation of each text ends; count tokens and time."""
        before, started = self.seconds, time.perf_counter()

        def count(number: int, result: Completion | BadRow) -> None:
            if isinstance(result, Completion):
                ids = result.token_ids
                if ids is None:
                    ids = self.tokenizer(result.text, add_special_tokens=False)["input_ids"]
                self.tokens += len(ids)
            self.seconds = before + time.perf_counter() - started
            done(number, result)

        if texts:
            self.write(texts, seeds, count, **sampling)

    def answers(
        self, conversations: Sequence[Messages], seeds: Sequence[int], done: Callable[[int, Message | BadRow], None]
    ) -> None:
        """Call `done(number, next answer or BadRow)` as the answer to each conversation ends."""
        texts: dict[int, str] = {}
        for number, messages in enumerate(conversations):
            try:
                texts[number] = render(self.tokenizer, messages, True)
            except BadRow as error:
                done(number, error)
        numbers = list(texts)

        def answered(at: int, result: Completion | BadRow) -> None:
            if isinstance(result, Completion) and result.text.strip():
                known = {} if result.token_ids is None else {TOKEN_IDS: result.token_ids}
                done(numbers[at], {"role": "assistant", "content": result.text, **known})
            else:
                done(numbers[at], result if isinstance(result, BadRow) else BadRow("empty answer"))

        self._continue(list(texts.values()), [seeds[number] for number in numbers], answered,
                       temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def user_turns(self, conversations: Sequence[Messages], seeds: Sequence[int]) -> list[str]:
        """The next user turn in each conversation, or its first; empty if the prompt is too long."""
        openings = [user_opening(self.tokenizer, messages) for messages in conversations]
        results: dict[int, Completion | BadRow] = {}
        self._continue(openings, seeds, results.__setitem__, max_new_tokens=USER_TOKENS, **USER_SAMPLING)
        return [each.text.strip() if isinstance(each, Completion) else "" for _, each in sorted(results.items())]


def user_opening(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """A conversation as text, up to where the next user turn begins.

    Raises:
        ValueError: the chat template changes the text of user turns.
    """
    text = render(tokenizer, [*messages, {"role": "user", "content": ANYTHING}], False)
    if ANYTHING not in text:
        raise ValueError("--self-prompted needs a chat template that keeps the text of user turns; this one changes it")
    return text[: text.rindex(ANYTHING)]


def is_sensible(text: str) -> bool:
    """Whether a user turn by the target is worth an answer: of reasonable length, with words, not repetitive."""
    return (SHORTEST <= len(text) <= LONGEST and re.search(r"[^\W\d_]{3}", text) is not None
            and repetition(text.split()) <= MOST_REPETITION)


def open_store(store: Path, about: dict) -> list:
    """The entries of a store, which is created if it does not exist.

    Args:
        about: all that the answers depend on, kept in the store's first line.

    Raises:
        ValueError: the store has answers that depend on something else.
    """
    header, *finished = read_lines(store) or [None]
    if not finished:  # without an answer, it does not matter
        store.parent.mkdir(parents=True, exist_ok=True)
        write_lines(store, [about])
    else:
        check_same(store, header, about)
    return finished


def keys_of(records: Iterable[Record]) -> list[str | None]:
    """The key of each conversation in a store, a digest of its turns without the answers; None for other records. Equal
    conversations are numbered, because samples of their answers differ."""
    seen: Counter[str] = Counter()
    keys: list[str | None] = []
    for record in records:
        if record.messages is None:
            keys.append(None)
            continue
        turns = [[each["role"], "" if each["role"] == "assistant" else each["content"]] for each in record.messages]
        digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:24]
        keys.append(f"{digest}-{seen[digest]}")
        seen[digest] += 1
    return keys


def seed_of(*parts: object) -> int:
    """A seed of 31 bits, the most that all servers take, which different parts do not share."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def regenerate(records: Sequence[Record], writer: Respondent, store: Path, about: dict) -> Iterator[Record]:
    """Replace every answer in the records by the target's, turn by turn, decoded losslessly.

    Conversations of similar length are answered together. Each has its own seed, so its answers do not depend on the
    others.

    Args:
        about: what the answers depend on besides their conversation and the writer's settings.

    Raises:
        ValueError: the store has answers that depend on something else.
    """
    keys = keys_of(records)
    done: dict[str, Messages | str] = {}
    begun: dict[str, Messages] = {}  # conversations with some of their answers
    for key, outcome, *more in open_store(store, writer.settings | about):
        (begun if more else done)[key] = outcome
    answerable = [key for key in keys if key is not None]
    rows = zip(keys, records, strict=True)
    with Progress(desc="answers", unit="conversation", total=len(answerable),
                  done=sum(key in done for key in answerable)) as progress:

        def keep(key: str, outcome: Messages | str, whole: bool) -> None:
            append_lines(store, [[key, outcome] if whole else [key, outcome, "more"]])
            if whole:
                done[key] = outcome
                progress.update(1, **writer.speed)

        while window := list(islice(rows, WINDOW * writer.batch)):
            todo = {key: record.messages for key, record in window if key is not None and key not in done}
            # Batches have the same number of turns and similar length.
            order = sorted(todo, key=lambda key: (len(todo[key]), sum(
                len(each["content"]) for each in todo[key] if each["role"] != "assistant")))
            for start in range(0, len(order), writer.batch):
                batch = {key: todo[key] for key in order[start : start + writer.batch]}
                answer_batch(batch, begun, writer, keep)
            for key, record in window:
                answer = record if key is None else done.pop(key)
                if isinstance(answer, Record):
                    yield answer
                else:
                    yield Record(reason=answer) if isinstance(answer, str) else Record(messages=answer)


def answer_batch(
    batch: dict[str, Messages], begun: dict[str, Messages], writer: Respondent,
    keep: Callable[[str, Messages | str, bool], None],
) -> None:
    """Answer a batch of conversations. One ends before a turn without an answer; if it has no answer, it is a bad row.

    Args:
        begun: conversations with some of their answers.
        keep: called after each answer with the key, the conversation so far or why it is bad, and whether it is
            complete.
    """
    written = {key: list(begun.get(key, [])) for key in batch}
    for place in range(max(map(len, batch.values()))):
        going = [key for key, messages in batch.items() if len(written[key]) == place < len(messages)]
        asked = [key for key in going if batch[key][place]["role"] == "assistant"]
        for key in set(going) - set(asked):
            written[key].append(batch[key][place])

        def answered(at: int, answer: Message | BadRow, asked: list[str] = asked) -> None:
            key = asked[at]
            if isinstance(answer, BadRow):
                last = max((i + 1 for i, each in enumerate(written[key]) if each["role"] == "assistant"), default=0)
                keep(key, written[key][:last] or str(answer), True)
            else:
                written[key].append(answer)
                keep(key, written[key], len(written[key]) == len(batch[key]))

        writer.answers([written[key] for key in asked], [seed_of(writer.seed, key, place) for key in asked], answered)


def self_prompted(
    count: int, writer: Respondent, store: Path, about: dict, *, follow_ups: float = 0.3
) -> Iterator[Record]:
    """Conversations in which the target writes both sides.

    Args:
        count: number of conversations.
        about: as in `regenerate`.
        follow_ups: share of the conversations with a second turn.

    Raises:
        ValueError: the store has answers that depend on something else, or hardly any user turn is worth an answer.
    """
    stored = open_store(store, writer.settings | about | {
        "seed": writer.seed, "follow_ups": follow_ups, "batch": writer.batch, "self_prompted": True})
    seen = {messages[0]["content"].casefold() for _, messages in stored}
    conversations = [messages for _, messages in stored]
    first = batch = max((batch for batch, _ in stored), default=-1) + 1
    with Progress(desc="self-prompted", unit="conversation", total=count, done=len(conversations)) as progress:

        def keep(messages: Messages) -> None:
            append_lines(store, [[batch, messages]])
            conversations.append(messages)
            progress.update(1, **writer.speed)

        while len(conversations) < count:
            write_batch(writer, batch, seen, follow_ups, keep)
            batch += 1
            if batch - first >= 4 and len(conversations) - len(stored) < (batch - first) * writer.batch // 20:
                raise ValueError("fewer than one in 20 of the target's user turns is worth an answer: pass "
                                 "conversations with --data and --regenerate instead of --self-prompted")
    yield from (Record(messages=messages) for messages in conversations[:count])


def write_batch(
    writer: Respondent, batch: int, seen: set[str], follow_ups: float, keep: Callable[[Messages], None]
) -> None:
    """Write one batch of conversations, and keep each when it is finished. The result depends only on the batch's
    number and on `seen`."""
    numbers = range(batch * writer.batch, (batch + 1) * writer.batch)
    going: dict[int, Messages] = {}

    def answered(number: int, messages: Messages) -> None:
        if floor((number + 1) * follow_ups) > floor(number * follow_ups):  # spread evenly
            going[number] = messages
        else:
            keep(messages)

    def followed_up(number: int, messages: Messages) -> None:
        del going[number]
        keep(messages)

    ask_and_answer(writer, {number: [] for number in numbers}, 0, answered, seen)
    ask_and_answer(writer, dict(sorted(going.items())), 2, followed_up)
    for messages in going.values():
        keep(messages)


def ask_and_answer(
    writer: Respondent, conversations: dict[int, Messages], turn: int, done: Callable[[int, Messages], None],
    seen: set[str] | None = None,
) -> None:
    """Add a user turn and its answer to conversations, and call `done(number, conversation)` for each.

    Conversations whose new user turn is not worth an answer are dropped.

    Args:
        turn: number of turns so far, on which the seeds depend.
        seen: earlier user turns, which are not repeated; new ones are added.
    """
    def seeds(numbers: Iterable[int], turn: int) -> list[int]:
        return [seed_of(writer.seed, number, turn) for number in numbers]

    asked: dict[int, Messages] = {}
    turns = writer.user_turns(list(conversations.values()), seeds(conversations, turn))
    for (number, messages), text in zip(conversations.items(), turns, strict=True):
        if is_sensible(text) and (seen is None or text.casefold() not in seen):
            if seen is not None:
                seen.add(text.casefold())
            asked[number] = [*messages, {"role": "user", "content": text}]
    numbers = list(asked)

    def answered(at: int, answer: Message | BadRow) -> None:
        if not isinstance(answer, BadRow):
            done(numbers[at], [*asked[numbers[at]], answer])

    writer.answers(list(asked.values()), seeds(asked, turn + 1), answered)
