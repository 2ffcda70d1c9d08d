"""Token ids of a conversation and which of them are learned: the assistant's own words and their end marks.

Where the chat template marks answers with `{% generation %}`, `transformers` says which tokens those are. Other
templates are rendered up to each answer: the answer begins where the rendering with a generation prompt ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from train.conversations import BadRow

# What a template may put between the generation prompt and an answer: an empty block of thoughts.
BEFORE_ANSWER = re.compile(r"\s*(<think>\s*</think>\s*)?")


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> tuple[list[int], list[bool]]:
    """Token ids of the whole conversation, and for each whether it is learned.

    Raises:
        BadRow: the template refuses the conversation, or does not show an answer as it was given.
        ValueError: the tokenizer has no chat template, or cannot tell where its tokens lie in the text.
    """
    check_tokenizer(tokenizer)
    if "{% generation %}" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except (TemplateError, ValueError) as error:
            raise BadRow("refused by the chat template") from error
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
    text, spans = answer_spans(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned, span = [], 0
    for start, end in encoded["offset_mapping"]:
        while span < len(spans) and start >= spans[span][1]:
            span += 1
        learned.append(span < len(spans) and spans[span][0] <= start and start < end <= spans[span][1])
    return encoded["input_ids"], learned


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise where a tokenizer cannot serve `encode_conversation`."""
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template; give one (--chat-template FILE) or plain text")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens lie in the text; a fast one does")


def answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the character span of each answer, its end mark included."""
    def render(part: Sequence[dict[str, str]], prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(list(part), tokenize=False, add_generation_prompt=prompt)
        except (TemplateError, ValueError) as error:
            raise BadRow("refused by the chat template") from error

    text, spans = render(messages, False), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], True)
        if not text.startswith(before):
            raise BadRow("the chat template shows earlier turns differently once they are answered")
        start = len(before)
        content = message["content"].strip()
        found = text.find(content, start)
        if found >= 0 and not BEFORE_ANSWER.fullmatch(text, start, found):
            if before != render(messages[:index], False):
                found = -1
            else:  # a template without a generation prompt: the answer's header is not learned
                start = len(text[:found].rstrip())
        if found < 0:
            raise BadRow("the chat template does not show an answer as it was given")
        spans.append((start, _end_mark(tokenizer, text, found + len(content))))
    return text, spans


def _end_mark(tokenizer: PreTrainedTokenizerBase, text: str, end: int) -> int:
    """Where the special token behind an answer ends; `end` itself where none follows."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in {*tokenizer.all_special_tokens, *added}:
        found = re.compile(r"\s*" + re.escape(token)).match(text, end)
        if found:
            return found.end()
    return end
