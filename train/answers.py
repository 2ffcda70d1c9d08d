"""Conversations in which every answer is the target's own, which is what a head will have to predict.

The user's turns come from given conversations, or from the target itself: behind the opening of a user turn of its own
template it writes what a user would ask (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import eagle_fsd
from eagle_fsd.data.conversations import BadRow, Record
from eagle_fsd.data.files import append_lines, read_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.measure.summaries import repetition
from eagle_fsd.pair import EagleModel
from train.data.chat_mask import ANYTHING, render

WINDOW = 16  # batches of conversations that are sorted by length together
USER_TOKENS = 256  # that a user's turn may have
SHORTEST, LONGEST = 12, 1200  # characters of a user's turn
MOST_REPETITION = 0.2  # share of its 4-grams of words that have occurred before
USER_SAMPLING = {"temperature": 1.0, "top_p": 0.95}


class Respondent:
    """The target, answering many conversations at a time.

    Args:
        batch: conversations that are decoded together.
    """

    def __init__(
        self, model: EagleModel, *, batch: int, temperature: float, max_new_tokens: int, seed: int
    ) -> None:
        self.model, self.batch, self.seed = model, batch, seed
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.tokens, self.seconds = 0, 0.0  # generated so far, and what it took

    def _generate(self, texts: Sequence[str], seeds: Sequence[int], **options: object) -> list[str]:
        tokenizer = self.model.tokenizer
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        started = time.perf_counter()
        outputs = eagle_fsd.generate(prompts, self.model, seed=list(seeds), acceptance="exact", **options)
        self.seconds += time.perf_counter() - started
        self.tokens += sum(len(output.token_ids) for output in outputs)
        return [output.text or "" for output in outputs]

    @property
    def speed(self) -> dict[str, object]:
        """What a progress bar says beside its count."""
        return {"tokens": self.tokens, "tokens/s": round(self.tokens / max(self.seconds, 1e-9))}

    def answers(self, conversations: Sequence[list[dict]], seeds: Sequence[int]) -> list[str | BadRow]:
        """The next answer to each conversation, or why there is none."""
        found: list[str | BadRow] = [BadRow("empty answer of the target")] * len(conversations)
        texts: dict[int, str] = {}
        for number, messages in enumerate(conversations):
            try:
                texts[number] = render(self.model.tokenizer, messages, True)
                if not self._fits(texts[number]):
                    raise BadRow("prompt too long to answer")
            except BadRow as error:
                texts.pop(number, None)
                found[number] = error
        if texts:
            said = self._generate(list(texts.values()), [seeds[number] for number in texts],
                                  temperature=self.temperature, max_new_tokens=self.max_new_tokens)
            for number, text in zip(texts, said, strict=True):
                found[number] = text if text.strip() else found[number]
        return found

    def _fits(self, text: str) -> bool:
        limit = self.model.target.max_positions
        return limit is None or len(self.model.tokenizer(text, add_special_tokens=False)["input_ids"]) < limit

    def user_turns(self, conversations: Sequence[list[dict]], seeds: Sequence[int]) -> list[str]:
        """What a user would say next in each conversation, empty where none fits; empty conversations begin."""
        openings = [user_opening(self.model, messages) for messages in conversations]
        fitting = [number for number, text in enumerate(openings) if self._fits(text)]
        turns = [""] * len(openings)
        if fitting:
            said = self._generate([openings[number] for number in fitting], [seeds[number] for number in fitting],
                                  max_new_tokens=USER_TOKENS, **USER_SAMPLING)
            for number, text in zip(fitting, said, strict=True):
                turns[number] = text.strip()
        return turns


def user_opening(model: EagleModel, messages: Sequence[dict[str, str]]) -> str:
    """A conversation as text up to where the user's next words begin.

    Raises:
        ValueError: a chat template that does not show a user's words as they are.
    """
    text = render(model.tokenizer, [*messages, {"role": "user", "content": ANYTHING}], False)
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
    if begun is None:
        store.parent.mkdir(parents=True, exist_ok=True)
        append_lines(store, [about])
    elif begun != json.loads(json.dumps(about)):
        raise ValueError(f"{store} was begun with other settings, {begun}; delete it or choose another --out")
    return finished


def regenerate(
    records: Iterable[Record], writer: Respondent, store: Path, about: dict | None = None
) -> Iterator[Record]:
    """The records with every answer replaced by the target's own, turn by turn, decoded losslessly.

    Conversations of like length are answered together. Each has a seed of its own, so that its answers do not depend on
    the others.

    Args:
        store: JSON lines file that finished conversations are added to after each batch; those found there are not
            answered again.
        about: what the answers depend on besides the writer; kept in the store's first line.

    Raises:
        ValueError: the store was begun for something else.
    """
    settings = {"temperature": writer.temperature, "max_new_tokens": writer.max_new_tokens, "seed": writer.seed}
    done: dict[int, list[dict[str, str]] | str] = dict(begin_store(store, settings | (about or {})))
    numbered = enumerate(records)
    with Progress(desc="answers", unit="conversation") as progress:
        while window := list(islice(numbered, WINDOW * writer.batch)):
            todo = {number: record.messages for number, record in window
                    if record.messages is not None and number not in done}
            for number, answered in _answer_window(todo, writer, store, progress):
                done[number] = answered
            for number, record in window:
                answered = done.pop(number, None)
                if answered is None:
                    yield record
                else:
                    yield Record(reason=answered) if isinstance(answered, str) else Record(messages=answered)


def _answer_window(
    todo: dict[int, list[dict[str, str]]], writer: Respondent, store: Path, progress: Progress
) -> Iterator[tuple[int, list[dict[str, str]] | str]]:
    """Each conversation with the target's answers, cut before a turn that does not fit; or why there is none."""
    asked = {number: [m for m in messages if m["role"] != "assistant"] for number, messages in todo.items()}
    turns = {number: sum(m["role"] == "assistant" for m in messages) for number, messages in todo.items()}
    order = sorted(todo, key=lambda number: (turns[number], sum(len(m["content"]) for m in asked[number])))
    for start in range(0, len(order), writer.batch):
        numbers = order[start : start + writer.batch]
        said: dict[int, list[dict[str, str]]] = {number: [] for number in numbers}
        reasons: dict[int, str] = {}
        for turn in range(max((turns[number] for number in numbers), default=0)):
            going = [number for number in numbers if number not in reasons and turn < turns[number]]
            for number in going:
                given = todo[number]
                at = [i for i, m in enumerate(given) if m["role"] == "assistant"][turn]
                since = next((i + 1 for i in range(at - 1, -1, -1) if given[i]["role"] == "assistant"), 0)
                said[number] += given[since:at]
            seeds = [writer.seed + number for number in going]
            for number, answer in zip(going, writer.answers([said[n] for n in going], seeds), strict=True):
                if isinstance(answer, BadRow):
                    reasons[number] = str(answer)
                else:
                    said[number].append({"role": "assistant", "content": answer})
        finished = []
        for number in numbers:
            while said[number] and said[number][-1]["role"] != "assistant":
                said[number].pop()
            finished.append((number, said[number] or reasons.get(number, "no answer to learn")))
        append_lines(store, [list(each) for each in finished])
        progress.update(len(numbers), **writer.speed)
        yield from finished


def self_prompted(
    count: int, writer: Respondent, store: Path, *, follow_ups: float = 0.3, about: dict | None = None
) -> Iterator[Record]:
    """Conversations that the target writes alone, both sides of them.

    Args:
        count: conversations. store: as of `regenerate`.
        follow_ups: share of the conversations that go on for a second turn.

    Raises:
        ValueError: the store was begun for something else; or hardly any of the user's turns is worth an answer.
    """
    settings = {"temperature": writer.temperature, "max_new_tokens": writer.max_new_tokens, "seed": writer.seed,
                "follow_ups": follow_ups, "batch": writer.batch, "self_prompted": True}
    found = begin_store(store, settings | (about or {}))
    seen = {messages[0]["content"].casefold() for _, messages in found}
    conversations, batch = [messages for _, messages in found], max((batch for batch, _ in found), default=-1) + 1
    first = batch
    with Progress(desc="self-prompted", unit="conversation", total=count, done=len(conversations)) as progress:
        while len(conversations) < count:
            new = _one_batch(writer, batch, seen, follow_ups)
            append_lines(store, [[batch, messages] for messages in new])
            conversations += new
            batch += 1
            progress.update(len(new), **writer.speed)
            if batch - first >= 4 and len(conversations) - len(found) < (batch - first) * writer.batch // 20:
                raise ValueError("the target hardly writes a user's turn that is worth an answer (fewer than one in "
                                 "20): give conversations with --data and --regenerate instead")
    yield from (Record(messages=messages) for messages in conversations[:count])


def _one_batch(writer: Respondent, batch: int, seen: set[str], follow_ups: float) -> list[list[dict[str, str]]]:
    """The conversations of one batch; a function of its number, but for those that were written before."""
    seeds = [writer.seed + (batch * writer.batch + row) * 4 for row in range(writer.batch)]
    begun = []
    for row, text in enumerate(writer.user_turns([[]] * writer.batch, seeds)):
        if is_sensible(text) and text.casefold() not in seen:
            seen.add(text.casefold())
            begun.append((row, [{"role": "user", "content": text}]))
    whole = _answered(writer, begun, [seeds[row] + 1 for row, _ in begun])
    going = [(row, messages) for row, messages in whole if (batch * writer.batch + row) % 10 < 10 * follow_ups]
    asked = writer.user_turns([messages for _, messages in going], [seeds[row] + 2 for row, _ in going])
    more = [(row, [*messages, {"role": "user", "content": text}])
            for (row, messages), text in zip(going, asked, strict=True) if is_sensible(text)]
    longer = dict(_answered(writer, more, [seeds[row] + 3 for row, _ in more]))
    return [longer.get(row, messages) for row, messages in whole]


def _answered(
    writer: Respondent, asked: list[tuple[int, list[dict[str, str]]]], seeds: list[int]
) -> list[tuple[int, list[dict[str, str]]]]:
    """The conversations with the target's next answer; those that it has none for are left out."""
    answers = writer.answers([messages for _, messages in asked], seeds) if asked else []
    return [(row, [*messages, {"role": "assistant", "content": answer}])
            for (row, messages), answer in zip(asked, answers, strict=True) if not isinstance(answer, BadRow)]
