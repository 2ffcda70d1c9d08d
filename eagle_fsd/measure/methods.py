"""Decoding methods for comparisons: each answers a prompt and measures the time."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..api import generate
from ..decoding.batch import Session
from ..decoding.output import Output
from ..drafting.language_model import DraftModel
from ..inputs.prompts import ChatTokens, encode_prompts
from ..inputs.requests import end_tokens
from ..loading.pair import EagleModel
from ..loading.timing import circumstances
from ..options.generate import SAMPLING
from .records import generation_digest, tokenizer_digests
from .settings import ComparisonOptions


@dataclass(frozen=True)
class Answer:
    """One answer; `output` has the receipts of our engine, and is None for other engines."""

    seconds: float  # including prefill; of a batch, this answer's share
    token_ids: list[int]
    text: str
    output: Output | None = None
    accepted_lengths: Sequence[int] | None = ()  # of each verify forward; empty: there are none; None: unknown

    @property
    def steps(self) -> int | None:
        """The target's forwards after that of the prompt; None: unknown."""
        return None if self.accepted_lengths is None else len(self.accepted_lengths) or len(self.token_ids) - 1


# (prompt, max_new_tokens); `hf_generate` and `engine` answer a list of prompts as a batch, with a list of answers
Method = Callable[[object, int], Answer]


def prompt_seed(seed: int, prompt: object) -> int:
    """A seed per prompt, so that different prompts get different noise."""
    return seed + (zlib.crc32(repr(prompt).encode()) << 16)


def continues(prompt: object) -> bool:
    """Whether a prompt is a chat with an answer in it, so that it is a later turn."""
    return isinstance(prompt, list) and any(
        isinstance(message, dict) and message["role"] == "assistant" for message in prompt)


def described(model: EagleModel, options: ComparisonOptions | None = None) -> dict[str, object]:
    """Everything besides the method and the question that answers and their times depend on, as JSON values."""
    facts = circumstances(model.target, model.draft)
    facts["generation_config"] = generation_digest(model.target.model)
    if model.tokenizer is not None:
        facts |= tokenizer_digests(model.tokenizer)
    if options is not None:
        names = ("temperature", "seed", "max_new_tokens", "run_code", "text_drafts")
        facts |= {"tree": "auto" if options.tree is None else repr(options.tree),
                  **{name: getattr(options, name) for name in names}}
    return facts


def pair_text(model: EagleModel) -> str:
    """Names and sizes of target and drafter, for the beginning of a page of results."""
    target, drafter = model.described()
    return f"Target: {target}\\\nDrafter: {drafter or 'none, drafts are copied from the text'}"


def hf_generate(
    model: EagleModel, *, temperature: float = 0.0, seed: int = 0, stock: PreTrainedModel | None = None,
    static: int | None = None, **options: object,
) -> Method:
    """The baseline: `model.generate` of the stock model, with the same decoding options as our engine.

    As there, the checkpoint's generation config holds, without its sampling options and its repetition penalty, and a
    chat ends with the turn. Sampling turns top-k and top-p off, since the default of `transformers` is the 50 best
    tokens.

    Args:
        seed: base seed; torch's global generator gets a seed per prompt before each sampled answer.
        stock: the model; None: `model.stock`.
        static: positions of a static cache, with which transformers compiles the forward of a token on a GPU. All
            calls share the length, since another one would compile it again. None: a cache that grows.
        options: further options of `model.generate`, such as `prompt_lookup_num_tokens=10`.
    """
    sampling: dict[str, object] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    stock = model.stock if stock is None else stock
    own = stock.generation_config
    drafts = {"assistant_model", "prompt_lookup_num_tokens"} & options.keys()
    greedy = copy.deepcopy(own)
    for name in ("max_length", *SAMPLING):
        setattr(greedy, name, None)

    def answer(prompt: object, max_new_tokens: int) -> Answer | list[Answer]:
        started = time.perf_counter()
        prompts, batched = encode_prompts(prompt, model)
        longest = max(map(len, prompts))
        padding = [longest - len(tokens) for tokens in prompts]
        ids = torch.tensor([[0] * count + tokens for count, tokens in zip(padding, prompts, strict=True)],
                           device=model.target.input_device)
        mask = torch.tensor([[0] * count + [1] * (longest - count) for count in padding], device=ids.device)
        ends = sorted(end_tokens(model, chat=isinstance(prompts[0], ChatTokens)))
        length: dict[str, object] = {"max_new_tokens": max_new_tokens}
        if static is not None:
            length = {"cache_implementation": "static", "max_length": static,
                      "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(longest + max_new_tokens)])}
        counted = {"streamer": AcceptedLengths()} if drafts else {}
        if temperature:
            torch.manual_seed(prompt_seed(seed, prompt))
        stock.generation_config = greedy  # the model's own config applies even if another is passed
        try:
            sequences = stock.generate(ids, attention_mask=mask, repetition_penalty=1.0, eos_token_id=ends or None,
                                       **length, **sampling, **counted, **options)
        finally:
            stock.generation_config = own
        rows = sequences[:, longest:].tolist()
        seconds = (time.perf_counter() - started) / len(rows)
        answers = []
        for row in rows:
            end = next((at + 1 for at, token in enumerate(row) if token in ends), None)  # padding may follow
            answers.append(Answer(seconds, row[:end], model.tokenizer.decode(row[:end], skip_special_tokens=True),
                                  accepted_lengths=counted["streamer"].lengths if drafts else ()))
        return answers if batched else answers[0]

    return answer


class AcceptedLengths(BaseStreamer):
    """Counts the draft tokens that `generate` accepts: it streams the prompt, then the tokens of each forward."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        pass

    @property
    def lengths(self) -> list[int]:
        return [count - 1 for count in self.counts[1:]]


def assisted(model: EagleModel, *, weight: float = 1.0, temperature: float = 0.0, seed: int = 0) -> Method:
    """Assisted generation of transformers: `model.generate` with the draft model as its `assistant_model`.

    Both are the models of the pair, with their dtype and packed weights, in transformers' own decoders; drafts have
    its default lengths.

    Args:
        weight: `assistant_ensemble_weight`; 1: none, which is lossless.

    Raises:
        ValueError: the drafter is not a causal LM; `weight` is not in (0, 1], or this transformers knows none.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"the weight of assisted generation must lie in (0, 1], got {weight}")
    drafter = draft_model(model, "assisted generation").model
    if weight != 1 and not hasattr(drafter.generation_config, "assistant_ensemble_weight"):
        raise ValueError(f"transformers {transformers.__version__} has no assistant_ensemble_weight: upgrade it, or "
                         "leave out weights below 1 (--assisted 1)")
    options = {} if weight == 1 else {"assistant_ensemble_weight": weight}
    special = GenerationConfig(eos_token_id=drafter.generation_config.eos_token_id)

    def answer(prompt: object, max_new_tokens: int) -> Answer:
        own = drafter.generation_config
        generated = hf_generate(model, temperature=temperature, seed=seed, stock=model.target.model,
                                assistant_model=drafter, **options)
        drafter.generation_config = special  # without the sampling options of its checkpoint
        try:
            return generated(prompt, max_new_tokens)
        finally:
            drafter.generation_config = own

    return answer


def draft_model(model: EagleModel, purpose: str) -> DraftModel:
    """The drafter, if it is a causal LM.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(model.draft, DraftModel):
        raise ValueError(f"{purpose} needs a causal LM as the drafter (--draft), got "
                         f"{'none' if model.draft is None else model.draft.noun}")
    return model.draft


def engine(
    model: EagleModel, *, ask: Callable[..., Output] | None = None, keep_history: bool = False, **options: object
) -> Method:
    """`eagle_fsd.generate` with these options, without the repetition penalty of the model's generation config.

    Args:
        ask: function to call in place of `generate`, with the prompt and options.
        keep_history: later turns of a chat process only what is new, as in `Chat`. A first turn begins anew.
        options: options of `generate`; `seed` is the base of a seed per prompt.
    """
    ask, session = ask or partial(generate, model=model), Session()

    def answer(prompt: object, max_new_tokens: int) -> Answer | list[Answer]:
        nonlocal session
        request = {"repetition_penalty": 1.0, **options, "max_new_tokens": max_new_tokens}
        if keep_history:
            session = request["session"] = session if continues(prompt) else Session()
        batched = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list)
        if "seed" in options:  # in a batch, each prompt has the noise that it would have alone
            seeds = [prompt_seed(options["seed"], each) for each in (prompt if batched else [prompt])]
            request["seed"] = seeds if batched else seeds[0]
        started = time.perf_counter()
        found = ask(prompt, **request)
        outputs = found if batched else [found]
        seconds = (time.perf_counter() - started) / len(outputs)
        answers = [Answer(seconds, output.token_ids, output.text, output, output.stats.accepted_lengths)
                   for output in outputs]
        return answers if batched else answers[0]

    return answer
