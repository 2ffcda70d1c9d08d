"""Tokenise records into a dataset: token ids, the tokens to learn, and a count of the rows left out, by reason.

In a conversation, the head learns the assistant's words and their end marks. If the chat template marks answers with
`{% generation %}`, `transformers` returns these tokens. Other templates are rendered up to each answer, which begins
where the rendering with a generation prompt ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .conversations import TOKEN_IDS, BadRow, Record
from .documents import Documents
from .progress import Progress

# A template may put an empty thinking block between the generation prompt and an answer.
BEFORE_ANSWER = re.compile(r"\s*(<think>\s*</think>\s*)?")
ANYTHING = "Qwertzuiop"  # a placeholder message, to see what a template puts around it


def encode_dataset(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, long: str = "truncate",
    quiet: bool = False, most: int | None = None,
) -> tuple[Documents, dict]:
    """Build a dataset from `records`, with a summary that counts rows, and bad rows by reason.

    Args:
        quiet: show no progress bar, for example because the source of the records has one.
        most: number of documents after which no more records are read; None: read all.

    Raises:
        ValueError: no record can be used.
    """
    bad: Counter[str] = Counter()
    documents: list[tuple[np.ndarray, np.ndarray]] = []  # lists would take five times the memory
    count = truncated = 0
    for record in Progress(records, desc="rows", unit="row", quiet=quiet):
        if most is not None and len(documents) >= most:
            break
        count += 1
        try:
            encoded = encode_record(record, tokenizer, max_length, long)
        except BadRow as error:
            bad[str(error)] += 1
        else:
            documents += [(np.asarray(ids, np.uint32), np.asarray(learned)) for ids, learned in encoded]
            truncated += record.text is None and len(encoded[-1][0]) == max_length
    if not documents:
        raise ValueError(f"none of {count} rows can be used: {dict(bad) or 'the data is empty'}")
    summary = {
        "rows": count, "bad_rows": sum(bad.values()), "bad_reasons": dict(bad.most_common()),
        "at_full_length": truncated, "max_length": max_length,
    }
    return Documents.of(documents[:most]), summary


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
    encoded = [with_recorded_tokens(tokenizer, *document, record.messages or [])
               for document in encode_conversation(tokenizer, record.messages or [])]
    if long == "drop" and any(len(ids) > max_length for ids, _ in encoded):
        raise BadRow("over-long")
    cut = [(ids[:max_length], learned[:max_length]) for ids, learned in encoded]
    # Position i reads a feature and the next token, and learns the token after it: two tokens must come before.
    cut = [(ids, learned) for ids, learned in cut if any(learned[2:])]
    if not cut:
        raise BadRow("nothing to learn within the length")
    return cut


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> list[tuple[list[int], list[bool]]]:
    """Token ids of a conversation, each with a mark that tells whether it is learned.

    The result is one document in which all answers are learned. If the template renders earlier turns differently
    later (it drops thoughts, or moves the system turn), there is one document per answer, to learn only that answer.

    Raises:
        BadRow: the template rejects the conversation, or changes the text of an answer.
        ValueError: the tokenizer has no chat template or no token offsets.
    """
    check_tokenizer(tokenizer)
    if "{% generation %}" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TemplateError, ValueError) as error:
            raise BadRow("rejected by the chat template") from error
        return [(list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]])]
    try:
        return [mark_spans(tokenizer, *answer_spans(tokenizer, messages))]
    except BadRow:
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return [mark_spans(tokenizer, *last_answer_span(tokenizer, messages[: end + 1])) for end in ends]


def with_recorded_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], learned: list[bool], messages: Sequence[dict]
) -> tuple[list[int], list[bool]]:
    """Replace the tokens of each answer by those that the target generated, if they are recorded and decode to the same
    text: a text has several tokenisations. The end mark of a truncated answer is not learned."""
    answers = [message.get(TOKEN_IDS) for message in messages if message["role"] == "assistant"]
    starts = [at for at, mark in enumerate(learned) if mark and not learned[at - 1 if at else at]]
    ends = [next((at for at in range(start, len(ids)) if not learned[at]), len(ids)) for start in starts]
    ids, learned = list(ids), list(learned)
    for start, end, own in reversed(list(zip(starts, ends, answers, strict=False))):
        if own and len(starts) == len(answers) and all(0 <= token < len(tokenizer) for token in own):
            ended = own[-1] == ids[end - 1]
            last = end if ended else end - 1
            if tokenizer.decode(own) == tokenizer.decode(ids[start:last]):
                ids[start:last], learned[start:end] = own, [True] * len(own) + [False] * (not ended)
    return ids, learned


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
        at = text.find(content, start)
        if at < 0 or not BEFORE_ANSWER.fullmatch(text, start, at):
            raise BadRow("the chat template changes the text of an answer")
        spans.append((start, _end_mark(tokenizer, text, at + len(content))))
    return text, spans


def last_answer_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """The last answer after the prompt that the target sees for it, and the answer's character span."""
    before = render(tokenizer, messages[:-1], True)
    answered = render(tokenizer, messages, False)
    content = messages[-1]["content"].strip()
    at = answered.rfind(content)
    kept, prompt = answered[:at].rstrip(), before.rstrip()
    if at < 0 or kept[-8:] != prompt[-8:]:
        raise BadRow("the chat template changes the text of an answer")
    # The space before an answer belongs to it, unless the generation prompt ends with it.
    gap = before[len(prompt) :] or answered[len(kept) : at]
    text = prompt + gap + answered[at:]
    return text, [(len(before), _end_mark(tokenizer, text, len(prompt + gap) + len(content)))]


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
