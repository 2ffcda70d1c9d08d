"""Conversations in which every answer is the target's own, which is what a head will have to predict.

The user's turns come from given conversations, or from the target itself: after the opening of a user turn of its own
template it writes what a user would ask (Magpie, arXiv 2406.08464). Answers are added to a JSON lines file, the store,
as soon as they are finished: a run that was interrupted, or killed, continues there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle_fsd import EagleModel
from eagle_fsd.api import decode_requests, with_options
from eagle_fsd.data.conversations import TOKEN_IDS, BadRow, Record
from eagle_fsd.data.files import append_lines, read_lines, write_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.decoding.request import Request
from eagle_fsd.measure.statistics import repetition
from eagle_fsd.requests import make_requests
from train.encoding import ANYTHING, render

log = logging.getLogger(__name__)

Message = dict[str, Any]  # role, content, and of the target's answers TOKEN_IDS where they are known
Messages = list[Message]

WINDOW = 16  # batches of conversations that are sorted by length together
USER_TOKENS = 256  # that a user's turn may have
USER_SAMPLING = {"temperature": 1.0, "top_p": 0.95}
SHORTEST, LONGEST = 12, 1200  # characters of a user's turn
MOST_REPETITION = 0.2  # share of its 4-grams of words that have occurred before


class Completion(NamedTuple):
    """What the target wrote after a text."""

    text: str
    token_ids: list[int] | None  # its end token included; None where a server does not give them


# (texts, seeds, done, **sampling): calls done(number, what is written after that text, or why nothing) as each ends.
Write = Callable[..., None]


def local_writer(model: EagleModel) -> Write:
    """Writes with a model in this process, in one batch."""
    def write(texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        limit = model.target.max_positions
        prompts = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        fitting = [number for number, ids in enumerate(prompts) if limit is None or len(ids) < limit]
        for number in set(range(len(texts))) - set(fitting):
            done(number, BadRow("prompt too long to answer"))
        if not fitting:
            return
        options = with_options(None, {  # for many rows copies alone cost more than they bring
            "acceptance": "exact", "text_drafts": "off" if model.draft is None else "auto",
            "seed": [seeds[number] for number in fitting], **sampling})
        requests = make_requests(model, [prompts[number] for number in fitting], options)
        number_of = dict(zip(map(id, requests), fitting, strict=True))

        def ended(request: Request) -> None:
            ids = request.output().token_ids
            done(number_of[id(request)], Completion(model.tokenizer.decode(ids, skip_special_tokens=True), ids))

        decode_requests(model, requests, ended=ended)

    return write


def endpoint_writer(url: str, name: str | None, tokenizer: PreTrainedTokenizerBase, together: int) -> Write:
    """Writes with the target on a server with OpenAI's API, by its `completions` of token ids.

    Args:
        url: up to "/v1". name: of the model there; None: the first that it has.
        together: requests at a time, as many as the server has slots.

    Raises:
        ImportError: without the package openai.
        ValueError: no answer, or no model.
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError("--endpoint needs the package openai (pip install openai)") from error
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=5)
    try:
        name = name or next((model.id for model in client.models.list()), None)
    except openai.APIError as error:
        raise ValueError(f"--endpoint {url} gives no answer: {error}") from error
    if name is None:
        raise ValueError(f"--endpoint {url} names no model: give one with --endpoint-model")
    further: dict[str, object] = {"return_token_ids": True}  # vLLM's; who does not know it may refuse it

    def ask(text: str, seed: int, sampling: Mapping) -> Completion | BadRow:
        asked = {"model": name, "prompt": tokenizer(text, add_special_tokens=False)["input_ids"],
                 "seed": seed % 2**31, "max_tokens": sampling["max_new_tokens"],
                 **{key: value for key, value in sampling.items() if key != "max_new_tokens"}}
        try:
            try:
                choice = client.completions.create(**asked, extra_body=dict(further)).choices[0]
            except openai.BadRequestError:
                if not further:
                    raise
                choice = client.completions.create(**asked).choices[0]
                further.clear()
        except openai.BadRequestError as error:
            log.warning("the server refuses a prompt: %s", error)
            return BadRow("refused by the server")
        return Completion(choice.text, getattr(choice, "token_ids", None))

    def write(texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        pool = ThreadPoolExecutor(together)
        asked = {pool.submit(ask, text, seed, sampling): number
                 for number, (text, seed) in enumerate(zip(texts, seeds, strict=True))}
        try:
            for answered in as_completed(asked):
                done(asked[answered], answered.result())
        finally:
            pool.shutdown(cancel_futures=True)

    return write


class Respondent:
    """The target, writing the next turn of many conversations at a time.

    Args:
        batch: conversations that are asked for together.
    """

    def __init__(
        self, write: Write, tokenizer: PreTrainedTokenizerBase, *, batch: int, temperature: float, max_new_tokens: int,
        seed: int,
    ) -> None:
        self.write, self.tokenizer, self.batch, self.seed = write, tokenizer, batch, seed
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.tokens, self.seconds = 0, 0.0  # generated so far, and what it took

    @property
    def settings(self) -> dict[str, object]:
        """What its answers depend on."""
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, "seed": self.seed}

    @property
    def speed(self) -> dict[str, object]:
        """What a progress bar says beside its count."""
        return {"tokens": self.tokens, "tokens/s": round(self.tokens / max(self.seconds, 1e-9))}

    def _continue(self, texts: Sequence[str], seeds: Sequence[int], done: Callable, **sampling: object) -> None:
        """`done(number, what the target writes after that text)`, as each ends."""
        written: list[Completion | BadRow] = []

        def count(number: int, each: Completion | BadRow) -> None:
            written.append(each)
            done(number, each)

        started = time.perf_counter()
        if texts:
            self.write(texts, seeds, count, **sampling)
        self.seconds += time.perf_counter() - started
        for each in written:
            if isinstance(each, Completion):
                ids = each.token_ids
                if ids is None:
                    ids = self.tokenizer(each.text, add_special_tokens=False)["input_ids"]
                self.tokens += len(ids)

    def answers(
        self, conversations: Sequence[Messages], seeds: Sequence[int], done: Callable[[int, Message | BadRow], None]
    ) -> None:
        """`done(number, the next answer to that conversation, or why there is none)`, as each is there."""
        texts: dict[int, str] = {}
        for number, messages in enumerate(conversations):
            try:
                texts[number] = render(self.tokenizer, messages, True)
            except BadRow as error:
                done(number, error)
        numbers = list(texts)

        def answered(place: int, said: Completion | BadRow) -> None:
            if isinstance(said, Completion) and said.text.strip():
                known = {} if said.token_ids is None else {TOKEN_IDS: said.token_ids}
                done(numbers[place], {"role": "assistant", "content": said.text, **known})
            else:
                done(numbers[place], said if isinstance(said, BadRow) else BadRow("empty answer of the target"))

        self._continue(list(texts.values()), [seeds[number] for number in numbers], answered,
                       temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def user_turns(self, conversations: Sequence[Messages], seeds: Sequence[int]) -> list[str]:
        """What a user would say next in each conversation, empty where none fits; empty conversations begin."""
        openings = [user_opening(self.tokenizer, messages) for messages in conversations]
        said: dict[int, Completion | BadRow] = {}
        self._continue(openings, seeds, said.__setitem__, max_new_tokens=USER_TOKENS, **USER_SAMPLING)
        return [each.text.strip() if isinstance(each, Completion) else "" for _, each in sorted(said.items())]


def user_opening(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """A conversation as text up to where the user's next words begin.

    Raises:
        ValueError: a chat template that does not show a user's words as they are.
    """
    text = render(tokenizer, [*messages, {"role": "user", "content": ANYTHING}], False)
    if ANYTHING not in text:
        raise ValueError("the chat template does not show a user's words: --self-prompted needs one that does")
    return text[: text.rindex(ANYTHING)]


def is_sensible(text: str) -> bool:
    """Whether a self-written user's turn is worth an answer: of some length, with words, not going round in circles."""
    return (SHORTEST <= len(text) <= LONGEST and re.search(r"[^\W\d_]{3}", text) is not None
            and repetition(text.split()) <= MOST_REPETITION)


def open_store(store: Path, about: dict) -> list:
    """The lines of a store that was begun for the same thing; a new one is begun.

    Raises:
        ValueError: it was begun for something else.
    """
    begun, *finished = read_lines(store) or [None]
    if not finished:  # a run that ended before its first answer binds nobody
        store.parent.mkdir(parents=True, exist_ok=True)
        write_lines(store, [about])
    elif begun != json.loads(json.dumps(about)):
        raise ValueError(f"{store} was begun with other settings, {begun}; delete it or choose another folder")
    return finished


def regenerate(
    records: Sequence[Record], writer: Respondent, store: Path, about: dict | None = None
) -> Iterator[Record]:
    """The records with every answer replaced by the target's own, turn by turn, decoded losslessly.

    Conversations of like length are answered together. Each has a seed of its own, so that its answers do not depend on
    the others.

    Args:
        about: what the answers depend on besides the writer; kept in the store's first line.

    Raises:
        ValueError: the store was begun for something else.
    """
    done: dict[int, Messages | str] = {}
    begun: dict[int, Messages] = {}  # with answers to a part of their questions
    for number, outcome, *more in open_store(store, writer.settings | (about or {})):
        (begun if more else done)[number] = outcome
    numbered, answerable = enumerate(records), sum(record.messages is not None for record in records)
    with Progress(desc="answers", unit="conversation", total=answerable, done=len(done)) as progress:

        def keep(number: int, outcome: Messages | str, whole: bool) -> None:
            append_lines(store, [[number, outcome] if whole else [number, outcome, "more"]])
            if whole:
                done[number] = outcome
                progress.update(1, **writer.speed)

        while window := list(islice(numbered, WINDOW * writer.batch)):
            todo = {number: record.messages for number, record in window
                    if record.messages is not None and number not in done}
            # Those of as many turns and like length together.
            order = sorted(todo, key=lambda number: (len(todo[number]), question_length(todo[number])))
            for start in range(0, len(order), writer.batch):
                batch = {number: todo[number] for number in order[start : start + writer.batch]}
                answer_batch(batch, begun, writer, keep)
            for number, record in window:
                answer = done.pop(number, None)
                if answer is None:
                    yield record
                else:
                    yield Record(reason=answer) if isinstance(answer, str) else Record(messages=answer)


def question_length(messages: Messages) -> int:
    """Characters of all but the answers."""
    return sum(len(message["content"]) for message in messages if message["role"] != "assistant")


def answer_batch(
    batch: dict[int, Messages], begun: dict[int, Messages], writer: Respondent,
    keep: Callable[[int, Messages | str, bool], None],
) -> None:
    """Each conversation with the target's answers, cut before a turn that has none; or why it has none at all.

    Args:
        begun: conversations that have some of their answers.
        keep: told the number, what there is of the conversation, and whether that is all, after each answer.
    """
    said = {number: list(begun.get(number, [])) for number in batch}
    for place in range(max(map(len, batch.values()))):
        going = [number for number, messages in batch.items() if len(said[number]) == place < len(messages)]
        asked = [number for number in going if batch[number][place]["role"] == "assistant"]
        for number in set(going) - set(asked):
            said[number].append(batch[number][place])

        def answered(at: int, answer: Message | BadRow, asked: list[int] = asked) -> None:
            number = asked[at]
            if isinstance(answer, BadRow):
                last = max((i + 1 for i, each in enumerate(said[number]) if each["role"] == "assistant"), default=0)
                keep(number, said[number][:last] or str(answer), True)
            else:
                said[number].append(answer)
                keep(number, said[number], len(said[number]) == len(batch[number]))

        writer.answers([said[number] for number in asked], [writer.seed + number for number in asked], answered)


def self_prompted(
    count: int, writer: Respondent, store: Path, *, follow_ups: float = 0.3, about: dict | None = None
) -> Iterator[Record]:
    """Conversations that the target writes alone, both sides of them.

    Args:
        count: conversations. about: as of `regenerate`.
        follow_ups: share of the conversations that go on for a second turn.

    Raises:
        ValueError: the store was begun for something else; or hardly any of the user's turns is worth an answer.
    """
    settings = writer.settings | {"follow_ups": follow_ups, "batch": writer.batch, "self_prompted": True}
    found = open_store(store, settings | (about or {}))
    seen = {messages[0]["content"].casefold() for _, messages in found}
    conversations = [messages for _, messages in found]
    first = batch = max((batch for batch, _ in found), default=-1) + 1
    with Progress(desc="self-prompted", unit="conversation", total=count, done=len(conversations)) as progress:

        def keep(messages: Messages) -> None:
            append_lines(store, [[batch, messages]])
            conversations.append(messages)
            progress.update(1, **writer.speed)

        while len(conversations) < count:
            write_batch(writer, batch, seen, follow_ups, keep)
            batch += 1
            if batch - first >= 4 and len(conversations) - len(found) < (batch - first) * writer.batch // 20:
                raise ValueError("the target hardly writes a user's turn that is worth an answer (fewer than one in "
                                 "20): give conversations with --data and --regenerate instead")
    yield from (Record(messages=messages) for messages in conversations[:count])


def write_batch(
    writer: Respondent, batch: int, seen: set[str], follow_ups: float, keep: Callable[[Messages], None]
) -> None:
    """The conversations of one batch, each kept when it is finished; a function of its number, but for those that were
    written before."""
    numbers = range(batch * writer.batch, (batch + 1) * writer.batch)
    going: dict[int, Messages] = {}

    def answered(number: int, messages: Messages) -> None:
        if number % 10 < 10 * follow_ups:
            going[number] = messages
        else:
            keep(messages)

    def went_on(number: int, messages: Messages) -> None:
        del going[number]
        keep(messages)

    ask_and_answer(writer, {number: [] for number in numbers}, 0, answered, seen)
    ask_and_answer(writer, dict(sorted(going.items())), 2, went_on)
    for messages in going.values():
        keep(messages)


def ask_and_answer(
    writer: Respondent, conversations: dict[int, Messages], turn: int, done: Callable[[int, Messages], None],
    seen: set[str] | None = None,
) -> None:
    """`done(number, conversation)` of those that go on: with a user's turn that is worth an answer, and the answer.

    Args:
        turn: turns so far, which the seeds depend on.
        seen: what users have said, which is not to be said again, and is added to.
    """
    def seeds(numbers: Iterable[int], turn: int) -> list[int]:
        return [writer.seed + 4 * number + turn for number in numbers]

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
