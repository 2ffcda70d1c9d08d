"""Tokenise records into a dataset: token ids, the tokens to learn, and a count of the rows left out, by reason.

In a conversation, the head learns the assistant's words and their end marks. If the chat template marks answers with
`{% generation %}`, `transformers` returns these tokens. Other templates are rendered up to each answer, which begins
where the rendering with a generation prompt ends.
"""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..utils.progress import Progress
from .conversations import THOUGHT, TOKEN_IDS, BadRow, Record
from .documents import Documents

# A template may put an empty thinking block between the generation prompt and an answer.
BEFORE_ANSWER = re.compile(r"\s*(<think>\s*</think>\s*)?")
BLOCK = 512  # records that one process gets at a time
_worker: dict[str, Callable[[Record], Encoded]] = {}
ANYTHING = "Qwertzuiop"  # a placeholder message, to see what a template puts around it


def encode_dataset(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, long: str = "truncate",
    quiet: bool = False, most: int | None = None, processes: int = 1,
) -> tuple[Documents, dict]:
    """Build a dataset from `records`, with a summary that counts rows, and bad rows by reason.

    Args:
        quiet: show no progress bar, for example because the source of the records has one.
        most: number of documents after which no more records are read; None: read all.
        processes: how many processes tokenise; it changes only the time.

    Raises:
        ValueError: no record can be used.
    """
    bad: Counter[str] = Counter()
    documents: list[tuple[np.ndarray, np.ndarray]] = []  # lists would take five times the memory
    count = truncated = 0
    encode = partial(encode_or_reason, tokenizer=tokenizer, max_length=max_length, long=long)
    for encoded, cut in Progress(each_by(encode, records, processes), desc="rows", unit="row", quiet=quiet):
        if most is not None and len(documents) >= most:
            break
        count += 1
        if isinstance(encoded, str):
            bad[encoded] += 1
        else:
            documents += encoded
            truncated += cut
    if not documents:
        raise ValueError(f"none of {count} rows can be used: {dict(bad) or 'the data is empty'}")
    summary = {
        "rows": count, "bad_rows": sum(bad.values()), "bad_reasons": dict(bad.most_common()),
        "at_full_length": truncated, "max_length": max_length,
    }
    return Documents.of(documents[:most]), summary


Encoded = tuple[list[tuple[np.ndarray, np.ndarray]] | str, bool]


def encode_or_reason(record: Record, *, tokenizer: PreTrainedTokenizerBase, max_length: int, long: str) -> Encoded:
    """The documents of a record, or why it is bad; and whether it is a conversation of full length."""
    try:
        encoded = encode_record(record, tokenizer, max_length, long)
    except BadRow as error:
        return str(error), False
    return ([(np.asarray(ids, np.uint32), np.asarray(learned)) for ids, learned in encoded],
            record.text is None and len(encoded[-1][0]) == max_length)


def each_by(encode: Callable[[Record], Encoded], records: Iterable[Record], processes: int) -> Iterator[Encoded]:
    """`encode` of each record, in their order; by several processes in blocks, which bound the memory."""
    if processes == 1:
        yield from map(encode, records)
        return
    left = iter(records)
    with multiprocessing.get_context("spawn").Pool(processes, _begin, (encode,)) as pool:
        while block := list(islice(left, BLOCK * processes)):
            yield from pool.map(_encode, block, chunksize=BLOCK // 8)


def _begin(encode: Callable[[Record], Encoded]) -> None:
    """Keep in a worker process what it gets once only, since it contains the tokenizer."""
    _worker["encode"] = encode


def _encode(record: Record) -> Encoded:
    return _worker["encode"](record)


def encode_record(
    record: Record, tokenizer: PreTrainedTokenizerBase, max_length: int, long: str
) -> list[tuple[list[int], list[bool]]]:
    """The documents of a record: usually one per conversation; plain text is split at `max_length` tokens.

    Raises:
        BadRow: the record is bad, too long with `long="drop"`, or has nothing to learn.
    """
    if record.reason is not None:
        raise BadRow(record.reason)
    if record.text is not None:
        ids = tokenizer(record.text, add_special_tokens=False)["input_ids"]
        first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        last = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ids = ids[len(first) :] if first and ids[:1] == first else ids  # the text may begin with it
        ids, body = ids if ids[-1:] == last else ids + last, max_length - len(first)
        pieces = [first + ids[i : i + body] for i in range(0, len(ids), body)]
        pieces = [piece for piece in pieces if len(piece) > 2]  # shorter pieces have nothing to learn
        return [(piece, [False] * len(first) + [True] * (len(piece) - len(first))) for piece in pieces]
    encoded = encode_conversation(tokenizer, record.messages or [])
    if long == "drop" and any(len(ids) > max_length for ids, _ in encoded):
        raise BadRow("over-long")
    cut = [(ids[:max_length], learned[:max_length]) for ids, learned in encoded]
    # Position i reads a feature and the next token, and learns the token after it: two tokens must come before.
    cut = [(ids, learned) for ids, learned in cut if any(learned[2:])]
    if not cut:
        raise BadRow("nothing to learn within the length")
    return cut


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[tuple[list[int], list[bool]]]:
    """Token ids of a conversation, each with a mark that tells whether it is learned.

    The result is one document in which all answers are learned. If the target saw or wrote something else than the
    template renders later (it drops or opens thoughts, trims answers, moves the system turn), there is one document
    per answer: the prompt that the target sees for it, and the answer.

    Raises:
        BadRow: the template rejects the conversation, or changes the text of an answer.
        ValueError: the tokenizer has no chat template or no token offsets.
    """
    check_tokenizer(tokenizer)
    try:
        return [all_answers(tokenizer, messages)]
    except BadRow:
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return [last_answer(tokenizer, messages[: end + 1]) for end in ends]


def all_answers(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> tuple[list[int], list[bool]]:
    """The conversation as the template renders it, with all answers marked.

    Raises:
        BadRow: the template rejects it, or the target saw or wrote something else.
    """
    text, spans = answer_spans(tokenizer, messages)
    if "{% generation %}" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, learned = list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    else:
        ids, learned = mark_spans(tokenizer, text, spans)
    answers = [recorded_tokens(tokenizer, message) for message in messages if message["role"] == "assistant"]
    if not any(answers):
        return ids, learned
    starts = [at for at, mark in enumerate(learned) if mark and not learned[at - 1 if at else at]]
    ends = [next((at for at in range(start, len(ids)) if not learned[at]), len(ids)) for start in starts]
    if len(starts) != len(answers):
        raise BadRow("recorded tokens cannot be placed")
    for start, end, own in reversed(list(zip(starts, ends, answers, strict=True))):
        if own:
            ended = own[-1] == ids[end - 1]
            last = end if ended else end - 1  # the end mark of a truncated answer is not learned
            if tokenizer.decode(own) != tokenizer.decode(ids[start:last]):
                raise BadRow("recorded tokens differ from the rendered answer")
            ids[start:last], learned[start:end] = own, [True] * len(own) + [False] * (not ended)
    return ids, learned


def recorded_tokens(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any]) -> list[int] | None:
    """The tokens of an answer as the target generated them; None if there are none, or they decode to another text."""
    own = message.get(TOKEN_IDS)
    if not own or not all(0 <= token < len(tokenizer) for token in own):
        return None
    same = tokenizer.decode(own, skip_special_tokens=True).strip() == message["content"].strip()
    return own if same else None


def last_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> tuple[list[int], list[bool]]:
    """The prompt that the target sees for the last answer, and the answer, marked: as recorded, or its text."""
    own = recorded_tokens(tokenizer, messages[-1])
    if own is None:
        return mark_spans(tokenizer, *last_answer_span(tokenizer, messages))
    prompt = tokenizer(render(tokenizer, messages[:-1], True), add_special_tokens=False)["input_ids"]
    return prompt + own, [False] * len(prompt) + [True] * len(own)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a tokenizer that `encode_conversation` cannot use."""
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: pass one (--chat-template FILE), or plain text")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not return token offsets: use a fast tokenizer")


def mark_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a text, each with a mark that tells whether the token lies in one of the character spans."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned, span = [], 0
    for start, end in encoded["offset_mapping"]:
        while span < len(spans) and start >= spans[span][1]:
            span += 1
        learned.append(span < len(spans) and spans[span][0] <= start and start < end <= spans[span][1])
    return encoded["input_ids"], learned


def answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and the character span of each answer including its end mark."""
    text, spans = render(tokenizer, messages, False), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], True)
        if not text.startswith(before):
            raise BadRow("the chat template renders earlier turns differently later")
        start = len(before)
        if before == render(tokenizer, messages[:index], False):  # no generation prompt: skip the answer's header
            shown = render(tokenizer, [*messages[:index], {"role": "assistant", "content": ANYTHING}], False)
            header = shown[start : shown.find(ANYTHING, start)]
            if not text.startswith(header, start):
                raise BadRow("the chat template changes the text of an answer")
            start += len(header.rstrip())
        content = message["content"].strip()
        shown = render(tokenizer, messages[: index + 1], False) if THOUGHT in message else ""
        thought_end = end_of_thought(shown, start, message)
        if thought_end is not None and not text.startswith(shown):
            raise BadRow("the chat template drops a thought later")
        at = text.find(content, thought_end or start)
        if at < 0 or thought_end is None and not BEFORE_ANSWER.fullmatch(text, start, at):
            raise BadRow("the chat template changes the text of an answer")
        spans.append((start, _end_mark(tokenizer, text, at + len(content))))
    return text, spans


def last_answer_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    """The last answer, unchanged, after the prompt that the target sees for it, and the answer's character span.

    If the prompt opens a thought, an answer without one follows the header that the template gives to such answers. A
    thought beside the content (`reasoning_content`) is learned if the template renders it.
    """
    *earlier, answer = messages
    prompt, content = render(tokenizer, earlier, True), answer["content"].strip()
    if THOUGHT in answer:
        whole = render(tokenizer, messages, False)
        thought_end = end_of_thought(whole, len(prompt), answer)
        if thought_end is not None and whole.startswith(prompt):
            end = whole.find(content, thought_end) + len(content)
            return whole, [(len(prompt), _end_mark(tokenizer, whole, end))]
    shown = render(tokenizer, [*earlier, {"role": "assistant", "content": ANYTHING}], False)
    at = shown.rfind(ANYTHING)
    if at < 0:
        raise BadRow("the chat template changes the text of an answer")
    header, end = shown[:at], at + len(ANYTHING)
    mark, kept, start = _end_mark(tokenizer, shown, end) - end, header.rstrip(), len(prompt)
    if header.startswith(prompt):  # the space or empty thought before an answer belongs to it
        if header != prompt == render(tokenizer, earlier, False):  # no generation prompt: the header does not
            start = len(kept)
        prompt = prompt if "</think>" in header[start:] and "</think>" in content else header
    elif prompt.startswith(kept):
        opening = prompt[len(kept) :].strip()
        if opening and content.startswith(opening):
            content = content.removeprefix(opening).lstrip()
        elif opening and opening[:1] + "/" + opening[1:] not in content:  # no </think>
            prompt, start = header, len(header)
    elif prompt == prompt.rstrip():  # the template shows earlier turns differently
        prompt += header[len(kept) :]
    text = prompt + content
    return text + shown[end:], [(start, len(text) + mark)]


def end_of_thought(text: str, start: int, answer: dict[str, Any]) -> int | None:
    """Where the thought ends in a text that ends with this answer, whose turn begins at `start`; None: the answer has
    none, or the template does not render it before the content."""
    thought, content = answer.get(THOUGHT, "").strip(), text.rfind(answer["content"].strip())
    at = text.find(thought, start, content) if thought and content >= 0 else -1
    return None if at < 0 else at + len(thought)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], prompt: bool) -> str:
    """The conversation as text, with or without a generation prompt."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, ValueError, TypeError) as error:
        raise BadRow("rejected by the chat template") from error


def _end_mark(tokenizer: PreTrainedTokenizerBase, text: str, end: int) -> int:
    """The end of the special token after an answer; `end` if there is none."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in {*tokenizer.all_special_tokens, *added}:
        if match := re.compile(r"\s*" + re.escape(token)).match(text, end):
            return match.end()
    return end
