"""Prompts as token ids: text, chats through the tokenizer's template, ids, and batches of them."""

from __future__ import annotations

import logging
from numbers import Integral

import torch
from torch import Tensor

from .checks import require_integer
from .data.rendering import check_rendering, most_characters
from .pair import EagleModel

log = logging.getLogger(__name__)


def decode(model: EagleModel, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=True)


def encode_prompts(prompt: object, model: EagleModel) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether they came as a batch.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if not (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple, Tensor))):
        return [encode_prompt(prompt, model)], False
    prompts = []
    for number, each in enumerate(prompt):
        try:
            prompts.append(encode_prompt(each, model))
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {number} of {len(prompt)}: {error}") from error
    return prompts, True


def encode_prompt(prompt: object, model: EagleModel) -> list[int]:
    """Token ids of a single prompt.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Tensor):
        integers = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool)
        if not integers or prompt.is_meta or prompt.dim() not in (1, 2) or (prompt.dim() == 2 and len(prompt) != 1):
            raise ValueError(
                f"a prompt tensor must be integer [L] or [1, L] (a batch is a list of prompts, without padding), got "
                f"{prompt.dtype} {list(prompt.shape)}"
            )
        return check_ids(prompt.flatten().tolist(), model)
    if isinstance(prompt, str):
        ids = tokenised("the prompt", prompt, model)
    elif isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt) and prompt:
        ids = _encode_chat(list(prompt), model)
    elif isinstance(prompt, (list, tuple)):
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            raise TypeError("a list prompt must hold token ids, chat messages, or prompts, not a mixture or others")
        ids = [int(token) for token in prompt]
    else:
        raise TypeError(f"a prompt must be text, a chat, or token ids, got {type(prompt).__name__}")
    return check_ids(ids, model)


def check_ids(ids: list[int], model: EagleModel) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    wrong = next((token for token in ids if not 0 <= token < model.target.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary (0 to {model.target.vocab_size - 1})")
    return ids


def need_tokenizer(model: EagleModel):
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    return model.tokenizer


def encodable(what: str, text: str) -> str:
    """The text, refused where a lone surrogate in it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no valid text: a lone surrogate {text[error.start]!r} at {error.start}") from error
    return text


def _encode_chat(messages: list[dict], model: EagleModel) -> list[int]:
    tokenizer = need_tokenizer(model)
    for message in messages:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise ValueError(f'a chat message needs "role" and "content", both text, got {message!r}')
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give the prompt as text or token ids")
    positions = model.target.max_positions
    if positions is not None:
        check_rendering(tokenizer, messages, most_characters(tokenizer, positions))
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise for roles or an order that they do not know
        raise ValueError(f"the tokenizer's chat template refuses the chat: {error}") from error
    return tokenised("the chat", rendered, model, add_special_tokens=False)


def tokenised(what: str, text: str, model: EagleModel, **options: object) -> list[int]:
    """The token ids of a text.

    Raises:
        ValueError: it cannot be encoded, or is longer than anything that the target has positions for.
    """
    tokenizer, positions = need_tokenizer(model), model.target.max_positions
    if positions is not None and len(text) > most_characters(tokenizer, positions):
        raise ValueError(f"{what} has {len(text)} characters, more than the target's {positions} positions can hold")
    return tokenizer(encodable(what, text), **options)["input_ids"]


def check_length(prompt_length: int, max_new_tokens: int, model: EagleModel) -> int:
    """`max_new_tokens`, or the number of positions left where that is smaller."""
    require_integer("max_new_tokens", max_new_tokens, 1)
    limit = model.target.limit_of(prompt_length)
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise ValueError(f"the prompt has {prompt_length} tokens, the target takes at most {limit - 1} and one new one")
    if prompt_length + max_new_tokens > limit:
        log.warning("max_new_tokens lowered from %d to the %d positions left", max_new_tokens, limit - prompt_length)
    return min(max_new_tokens, limit - prompt_length)


def end_tokens(model: EagleModel) -> frozenset[int]:
    """The target's end tokens, from its generation config."""
    config = model.target.model.generation_config
    ids = config.eos_token_id if config is not None else None
    return frozenset([ids] if isinstance(ids, int) else ids or ())
