"""Conversations in which every answer is the target's own, which is what a head will have to predict.

The user's turns come from given conversations, or from the target itself: after the opening of a user turn of its own
template it writes what a user would ask (Magpie, arXiv 2406.08464). Finished conversations are added to a JSON lines
file, the store, after each batch: an interrupted run continues there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

import eagle_fsd
from eagle_fsd import EagleModel
from eagle_fsd.data.conversations import TOKEN_IDS, BadRow, Record
from eagle_fsd.data.files import append_lines, read_lines, write_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.measure.statistics import repetition
from train.encoding import ANYTHING, render

log = logging.getLogger(__name__)

Message = dict[str, Any]  # role, content, and of the target's answers TOKEN_IDS where they are known
Messages = list[Message]

WINDOW = 16  # batches of conversations that are sorted by length together
USER_TOKENS = 256  # that a user's turn may have
USER_SAMPLING = {"temperature": 1.0, "top_p": 0.95}
SHORTEST, LONGEST = 12, 1200  # characters of a user's turn
MOST_REPETITION = 0.2  # share of its 4-grams of words that have occurred before


class Written(NamedTuple):
    """What the target wrote after a text."""

    text: str
    token_ids: list[int] | None  # its end token included; None where a server does not give them


Write = Callable[..., list[Written | BadRow]]  # (texts, seeds, **sampling): what is written after each, or why nothing


def local_writer(model: EagleModel) -> Write:
    """Writes with a model in this process, in one batch."""
    def write(texts: Sequence[str], seeds: Sequence[int], **sampling: object) -> list[Written | BadRow]:
        limit = model.target.max_positions
        prompts = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        fitting = [number for number, ids in enumerate(prompts) if limit is None or len(ids) < limit]
        written: list[Written | BadRow] = [BadRow("prompt too long to answer")] * len(texts)
        outputs = eagle_fsd.generate([prompts[number] for number in fitting], model, acceptance="exact",
                                     seed=[seeds[number] for number in fitting], **sampling) if fitting else []
        for number, output in zip(fitting, outputs, strict=True):
            written[number] = Written(output.text or "", output.token_ids)
        return written

    return write


def served_writer(url: str, name: str | None, tokenizer: PreTrainedTokenizerBase, together: int) -> Write:
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

    def ask(text: str, seed: int, sampling: Mapping) -> Written | BadRow:
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
        return Written(choice.text, getattr(choice, "token_ids", None))

    def write(texts: Sequence[str], seeds: Sequence[int], **sampling: object) -> list[Written | BadRow]:
        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda text, seed: ask(text, seed, sampling), texts, seeds))

    return write


class Respondent:
    """The target, writing the next turn of many conversations at a time.

    Args:
        batch: conversations that are asked for together, and kept together when they are finished.
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

    def _continue(self, texts: Sequence[str], seeds: Sequence[int], **sampling: object) -> list[Written | BadRow]:
        """What the target writes after each text."""
        started = time.perf_counter()
        written = self.write(texts, seeds, **sampling) if texts else []
        self.seconds += time.perf_counter() - started
        for each in written:
            if isinstance(each, Written):
                ids = each.token_ids
                self.tokens += len(self.tokenizer(each.text)["input_ids"] if ids is None else ids)
        return written

    def answers(self, conversations: Sequence[Messages], seeds: Sequence[int]) -> list[Message | BadRow]:
        """The next answer to each conversation, or why there is none."""
        found: list[Message | BadRow] = [BadRow("empty answer of the target")] * len(conversations)
        texts: dict[int, str] = {}
        for number, messages in enumerate(conversations):
            try:
                texts[number] = render(self.tokenizer, messages, True)
            except BadRow as error:
                found[number] = error
        said = self._continue(list(texts.values()), [seeds[number] for number in texts],
                              temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        for number, each in zip(texts, said, strict=True):
            if isinstance(each, BadRow):
                found[number] = each
            elif each.text.strip():
                known = {} if each.token_ids is None else {TOKEN_IDS: each.token_ids}
                found[number] = {"role": "assistant", "content": each.text, **known}
        return found

    def user_turns(self, conversations: Sequence[Messages], seeds: Sequence[int]) -> list[str]:
        """What a user would say next in each conversation, empty where none fits; empty conversations begin."""
        openings = [user_opening(self.tokenizer, messages) for messages in conversations]
        said = self._continue(openings, seeds, max_new_tokens=USER_TOKENS, **USER_SAMPLING)
        return ["" if isinstance(each, BadRow) else each.text.strip() for each in said]


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


def begin_store(store: Path, about: dict) -> list:
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
    done: dict[int, Messages | str] = dict(begin_store(store, writer.settings | (about or {})))
    numbered, answerable = enumerate(records), sum(record.messages is not None for record in records)
    with Progress(desc="answers", unit="conversation", total=answerable, done=len(done)) as progress:
        while window := list(islice(numbered, WINDOW * writer.batch)):
            todo = {number: record.messages for number, record in window
                    if record.messages is not None and number not in done}
            # Those of as many turns and like length together.
            order = sorted(todo, key=lambda number: (len(todo[number]), asked_length(todo[number])))
            for start in range(0, len(order), writer.batch):
                batch = {number: todo[number] for number in order[start : start + writer.batch]}
                answered = answer_batch(batch, writer)
                append_lines(store, [list(each) for each in answered.items()])
                done |= answered
                progress.update(len(answered), **writer.speed)
            for number, record in window:
                answer = done.pop(number, None)
                if answer is None:
                    yield record
                else:
                    yield Record(reason=answer) if isinstance(answer, str) else Record(messages=answer)


def asked_length(messages: Messages) -> int:
    """Characters of all but the answers."""
    return sum(len(message["content"]) for message in messages if message["role"] != "assistant")


def answer_batch(batch: dict[int, Messages], writer: Respondent) -> dict[int, Messages | str]:
    """Each conversation with the target's answers, cut before a turn that has none; or why it has none at all."""
    said: dict[int, Messages] = {number: [] for number in batch}
    reasons: dict[int, str] = {}
    for place in range(max(map(len, batch.values()))):
        going = [number for number, messages in batch.items() if place < len(messages) and number not in reasons]
        asked = [number for number in going if batch[number][place]["role"] == "assistant"]
        for number in set(going) - set(asked):
            said[number].append(batch[number][place])
        answers = writer.answers([said[number] for number in asked], [writer.seed + number for number in asked])
        for number, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BadRow):
                reasons[number] = str(answer)
            else:
                said[number].append(answer)
    for messages in said.values():
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
    return {number: said[number] or reasons.get(number, "no answer to learn") for number in batch}


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
    found = begin_store(store, settings | (about or {}))
    seen = {messages[0]["content"].casefold() for _, messages in found}
    conversations = [messages for _, messages in found]
    first = batch = max((batch for batch, _ in found), default=-1) + 1
    with Progress(desc="self-prompted", unit="conversation", total=count, done=len(conversations)) as progress:
        while len(conversations) < count:
            new = write_batch(writer, batch, seen, follow_ups)
            append_lines(store, [[batch, messages] for messages in new])
            conversations += new
            batch += 1
            progress.update(len(new), **writer.speed)
            if batch - first >= 4 and len(conversations) - len(found) < (batch - first) * writer.batch // 20:
                raise ValueError("the target hardly writes a user's turn that is worth an answer (fewer than one in "
                                 "20): give conversations with --data and --regenerate instead")
    yield from (Record(messages=messages) for messages in conversations[:count])


def write_batch(writer: Respondent, batch: int, seen: set[str], follow_ups: float) -> list[Messages]:
    """The conversations of one batch; a function of its number, but for those that were written before."""
    numbers = range(batch * writer.batch, (batch + 1) * writer.batch)
    whole = ask_and_answer(writer, {number: [] for number in numbers}, 0, seen)
    going = {number: messages for number, messages in whole.items() if number % 10 < 10 * follow_ups}
    return list((whole | ask_and_answer(writer, going, 2)).values())


def ask_and_answer(
    writer: Respondent, conversations: dict[int, Messages], turn: int, seen: set[str] | None = None
) -> dict[int, Messages]:
    """Those of the conversations, by number, that go on: with a user's turn that is worth an answer, and the answer.

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
    answers = writer.answers(list(asked.values()), seeds(asked, turn + 1))
    return {number: [*messages, answer] for (number, messages), answer in zip(asked.items(), answers, strict=True)
            if not isinstance(answer, BadRow)}
