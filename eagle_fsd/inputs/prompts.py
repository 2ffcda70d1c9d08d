"""From prompts to token ids: text, chats, token ids and tokenizer outputs, checked against the target."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..loading.pair import EagleModel
from ..utils.checks import OptionError

ROLES = ("system", "developer", "user", "assistant", "tool")
PROBE = "eaglefsdprobe"  # a key of arguments that shows how a template renders them
ALWAYS = 1 << 16  # characters: shorter texts are always tokenised, which is fast
ANSWER = "eaglefsdanswer"  # a text that no template has, see `end_of_turn`
_longest: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()  # characters of the longest token


class ChatTokens(list):
    """Token ids of a chat that the chat template has rendered: the token that ends a turn there ends the answer."""


def encode_prompts(
    prompt: object, model: EagleModel, template: Mapping[str, object] | None = None
) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether the prompt was a batch.

    Args:
        template: keywords of `apply_chat_template`, if every prompt is a chat.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = without_padding(prompt)
    if not (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple, Tensor))):
        return [encode_prompt(prompt, model, template)], False
    prompts = []
    for number, single in enumerate(prompt):
        try:
            prompts.append(encode_prompt(single, model, template))
        except (TypeError, ValueError) as error:
            raise OptionError("prompt", problem=f"{number} of {len(prompt)}: {error}") from error
    return prompts, True


def without_padding(encoding: Mapping) -> object:
    """The prompt or prompts in the output of a tokenizer, without the padding on either side.

    Raises:
        ValueError: an attention mask with zeros elsewhere or of another shape, or inputs other than tokens.
    """
    others = encoding.keys() - {"input_ids", "attention_mask", "token_type_ids"}
    if others:
        raise ValueError(f"a prompt has input_ids and attention_mask only, got {', '.join(sorted(others))}")
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    single = not len(ids) or np.ndim(ids[0]) == 0
    rows, masks = ([ids], [mask]) if single else (ids, [None] * len(ids) if mask is None else mask)
    if len(rows) != len(masks):
        raise ValueError(f"{len(rows)} rows of input_ids have {len(masks)} rows of attention_mask")
    prompts = []
    for row, mask in zip(rows, masks, strict=True):
        row = torch.as_tensor(row)
        mask = torch.ones_like(row) if mask is None else torch.as_tensor(mask)
        kept = (mask == 1).nonzero().flatten()
        if mask.shape != row.shape or ((mask != 0) & (mask != 1)).any() or (kept.diff() != 1).any():
            raise ValueError(f"an attention mask must have the shape of input_ids, {list(row.shape)}, 1 for each "
                             f"token, and 0 for padding before or after the tokens, got {mask.tolist()}")
        prompts.append(row[kept].tolist())
    single = single or (len(prompts) == 1 and not isinstance(ids, list))  # a tensor [1, L]
    return prompts[0] if single else prompts


def encode_prompt(prompt: object, model: EagleModel, template: Mapping[str, object] | None = None) -> list[int]:
    """Token ids of a single prompt.

    Args:
        template: keywords of `apply_chat_template`, for a chat.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Mapping):
        raise TypeError(f"a chat is a list of messages, each with role and content, got one {type(prompt).__name__}")
    chat = isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt) and prompt
    if template and not chat:
        raise OptionError("chat_template_kwargs", problem=f"is for chats, and this prompt is a {type(prompt).__name__} "
                          "of text or token ids")
    if isinstance(prompt, np.ndarray):
        prompt = torch.from_numpy(prompt)
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
    elif isinstance(prompt, ChatTokens):
        ids = prompt
    elif chat:
        ids = chat_tokens(render_chat(list(prompt), model, template), model)
    elif isinstance(prompt, (list, tuple)):
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            raise TypeError("a list prompt must contain only token ids, only chat messages, or only prompts")
        ids = [int(token) for token in prompt]
    else:
        raise TypeError(f"a prompt must be text, a chat, or token ids, got {type(prompt).__name__}")
    return check_ids(ids, model)


def check_ids(ids: list[int], model: EagleModel) -> list[int]:
    """Return the token ids. Raise ValueError if there are none, or one is not in the target's vocabulary."""
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    wrong = next((token for token in ids if not 0 <= token < model.target.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary (0 to {model.target.vocab_size - 1})")
    return ids


def require_tokenizer(model: EagleModel):
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: pass the prompt as token ids")
    return model.tokenizer


def require_encodable(what: str, text: str) -> str:
    """Return the text. Raise OptionError if it contains a lone surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(what, problem=f"is not valid text: lone surrogate {text[error.start]!r} at "
                          f"character {error.start}") from error
    return text


def render_chat(messages: list[dict], model: EagleModel, template: Mapping[str, object] | None = None) -> str:
    """A chat as text, as the tokenizer's template renders it.

    Args:
        template: keywords of `apply_chat_template`, such as `tools`, `continue_final_message` or `enable_thinking`.
            Without `continue_final_message`, `add_generation_prompt` is True by default.

    Raises:
        ValueError: messages of another form, or a chat that the template cannot render.
    """
    tokenizer, template = require_tokenizer(model), template or {}
    messages = [{**message, "content": ""} if message.get("content") is None and message.get("role") == "assistant"
                else message for message in messages]
    for message in messages:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise OptionError("messages", problem='need "role" and "content", both text (an assistant message needs '
                              f"no content), got {message!r}")
    if tokenizer.chat_template is None and not template.get("chat_template"):
        raise ValueError("the tokenizer has no chat template: pass the prompt as text or token ids")
    known = {*ROLES, *re.findall(r"\w+", f"{tokenizer.chat_template} {' '.join(tokenizer.get_added_vocab())}")}
    wrong = next((message["role"] for message in messages if message["role"] not in known), None)
    if wrong is not None:  # many templates render an unknown role as if it were a known one
        raise OptionError("messages", problem=f"must have one of the roles {', '.join(ROLES)}, or one that the chat "
                          f"template or a special token names, got {wrong!r}")
    tools = template.get("tools")
    calling = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if calling and "tool" not in tokenizer.get_chat_template(template.get("chat_template"), tools):
        raise OptionError("tools", problem="cannot be used with this model: its chat template does not render them")
    prompted = {"add_generation_prompt": not template.get("continue_final_message")}
    try:
        return apply_template(tokenizer, messages, **{**prompted, **template})
    except Exception as error:  # templates raise for roles or an order that they do not support
        raise ValueError(f"the tokenizer's chat template rejects the chat: {error}") from error


def chat_tokens(rendered: str, model: EagleModel) -> ChatTokens:
    """Token ids of a chat that `render_chat` has rendered."""
    return ChatTokens(tokenised("the chat", rendered, model, add_special_tokens=False))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template ends a turn of the assistant; None: it is not a single added token.

    Some models' configs name only the end of the text as end token, and a chat would run on into the next turn.
    """
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # whatever a template may raise
        return None
    _, found, rest = rendered.rpartition(ANSWER)
    added = [(added.content, token) for token, added in tokenizer.added_tokens_decoder.items()]
    ends = [(content, token) for content, token in added if found and rest.lstrip().startswith(content)]
    return max(ends, key=lambda end: len(end[0]), default=(None, None))[1]


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **options: object) -> str:
    """A chat as text. The template gets the arguments of calls as a mapping, or as JSON if it concatenates or prints
    them (DeepSeek), and ids of nine letters and digits if it rejects others (Mistral)."""
    render = functools.partial(tokenizer.apply_chat_template, **{**options, "tokenize": False})
    if not any(message.get("tool_calls") for message in messages):
        return render(messages)
    errors = []
    for ids in (lambda value: value, short_id):
        for arguments in (as_mapping, as_json):
            try:
                if arguments is as_mapping and f"'{PROBE}'" in render(
                        change_calls(messages, ids, lambda value: {PROBE: PROBE})):
                    continue  # it prints the mapping as Python does
                return render(change_calls(messages, ids, arguments))
            except Exception as error:  # whatever a template may raise
                errors.append(error)
    raise errors[0]


def short_id(call_id: Any) -> Any:
    """An id of nine letters and digits, the same for equal ids."""
    if not isinstance(call_id, str) or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def as_mapping(arguments: Any) -> Any:
    """The arguments of a call as a mapping: they may be JSON, in which models write line breaks, or missing. Others
    stay as they are."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, strict=False) if arguments.strip() else None
    return {} if arguments is None else arguments


def as_json(arguments: Any) -> str:
    is_json = isinstance(arguments, str) and arguments.strip()
    return arguments if is_json else json.dumps(as_mapping(arguments), ensure_ascii=False)


def change_calls(messages: list[dict], ids: Callable[[Any], Any], arguments: Callable[[Any], Any]) -> list[dict]:
    """Copies of messages with the ids of their calls, also in the answers to them, and their arguments changed."""
    changed = copy.deepcopy(messages)
    for message in changed:
        if "tool_call_id" in message:
            message["tool_call_id"] = ids(message["tool_call_id"])
        for call in message.get("tool_calls") or ():
            if "id" in call:
                call["id"] = ids(call["id"])
            if "arguments" in call.get("function", ()):
                call["function"]["arguments"] = arguments(call["function"]["arguments"])
    return changed


def tokenised(what: str, text: str, model: EagleModel, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text. The tokens that the tokenizer adds at the beginning, such as BOS, are left out if the
    text begins with them already, as a rendered chat does.

    Args:
        what: name of the text in error messages.

    Raises:
        ValueError: the text cannot be encoded, or is too long for the target's positions in any case.
    """
    tokenizer, positions = require_tokenizer(model), model.target.max_positions
    if positions is not None and len(text) > max_characters(tokenizer, positions):
        raise OptionError(what, problem=f"has {len(text)} characters, too many for the target's {positions} "
                          "positions")
    ids = tokenizer(require_encodable(what, text), add_special_tokens=add_special_tokens)["input_ids"]
    first = ids[0] if ids else None
    if add_special_tokens and first in tokenizer.all_special_ids and text.startswith(
            tokenizer.convert_ids_to_tokens(first)):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        for count in range(len(ids) - len(own), 0, -1):
            if ids[:count] == own[:count] and ids[count:][: len(own)] == own:
                return ids[count:]
    return ids


def max_characters(tokenizer: PreTrainedTokenizerBase, positions: int) -> int:
    """An upper bound on the characters of a text that fits into the positions: as if every token were the longest."""
    if tokenizer not in _longest:
        _longest[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    return max(ALWAYS, positions * _longest[tokenizer])
