"""Decoding methods under comparison: each turns a prompt into an answer and times it.

Everything that is measured of the engine goes through this module.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig

from ..api import generate
from ..decoding.output import Output
from ..models.digest import weights_digest
from ..models.linear import packed_form
from ..pair import EagleModel
from ..prompts import encode_prompt
from .settings import ComparisonOptions


@dataclass(frozen=True)
class Answer:
    """One answer; `output` carries stats and receipts where our engine made it."""

    seconds: float  # prompt included
    token_ids: list[int]
    text: str
    output: Output | None = None


Method = Callable[[object, int], Answer]  # (prompt, max_new_tokens)


def prompt_seed(seed: int, prompt: object) -> int:
    """A seed for one prompt, so that prompts of one length do not share their noise."""
    return seed + (zlib.crc32(repr(prompt).encode()) << 16)


def described(model: EagleModel, options: ComparisonOptions | None = None) -> dict[str, object]:
    """What answers depend on besides the method, in a form that JSON keeps."""
    facts = {"target": model.target.digest(), "head": None if model.draft is None else weights_digest(model.draft),
             "dtype": str(model.target.dtype), "weights": packed_form(model.target.model) or "plain",
             "device": str(model.target.device), "threads": torch.get_num_threads()}
    if options is not None:
        names = ("temperature", "seed", "max_new_tokens", "repeats", "run_code")
        facts |= {"tree": "auto" if options.tree is None else repr(options.tree),
                  **{name: getattr(options, name) for name in names}}
    return facts


def pair_text(model: EagleModel) -> str:
    """Names and sizes of target and head, as pages of results begin."""
    target, head = model.described()
    return f"Target: {target}\\\nHead: {head or 'none, drafts are copied from the text alone'}"


def hf_generate(model: EagleModel, *, temperature: float = 0.0, seed: int = 0, **options: object) -> Method:
    """`model.generate`, the users' baseline, of the model as transformers loads it, set to decode as our engine does.

    Of the checkpoint's generation config only the special tokens are used, since the engine reads no more of it (many
    have a repetition penalty). When sampling, top-k and top-p are off: `transformers` would keep the 50 best tokens.

    Args:
        seed: of torch's global generator, set before each sampled answer, together with the prompt.
        options: others of `model.generate`, such as `prompt_lookup_num_tokens=10`.
    """
    sampling: dict[str, object] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    stock = model.stock
    own = stock.generation_config
    special = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)

    def answer(prompt: object, max_new_tokens: int) -> Answer:
        started = time.perf_counter()
        ids = torch.tensor([encode_prompt(prompt, model)], device=model.target.device)
        if temperature:
            torch.manual_seed(prompt_seed(seed, prompt))
        stock.generation_config = special  # what the model has counts even where another config is given
        try:
            sequence = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
                                      **sampling, **options)
        finally:
            stock.generation_config = own
        new = sequence[0, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - started
        return Answer(seconds, new, model.tokenizer.decode(new, skip_special_tokens=True))

    return answer


def engine(
    model: EagleModel, *, ask: Callable[..., Output] | None = None, **options: object
) -> Method:
    """`eagle_fsd.generate` with these options.

    Args:
        ask: called with prompt and options in place of `generate`.
        options: of `generate`; a `seed` goes together with the prompt.
    """
    ask = ask or partial(generate, model=model)

    def answer(prompt: object, max_new_tokens: int) -> Answer:
        request = {**options, "max_new_tokens": max_new_tokens}
        if "seed" in options:
            request["seed"] = prompt_seed(options["seed"], prompt)
        started = time.perf_counter()
        output = ask(prompt, **request)
        return Answer(time.perf_counter() - started, output.token_ids, output.text, output)

    return answer
