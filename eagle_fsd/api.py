"""`generate`: one call from prompt to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .acceptance import Rule
from .drafting.config import TreeConfig
from .engine.decoder import Session
from .engine.loop import run
from .engine.receipts import Output
from .engine.request import BatchSettings, RequestSettings
from .options import AcceptanceOptions, SamplingOptions
from .pair import EagleModel, default_model
from .prompts import decode, encode_prompts
from .settings import ends_streamer, resolve


@ends_streamer
def generate(
    prompt: str | list | Tensor,
    model: EagleModel | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    acceptance: str | Rule | Callable = "fsd",
    threshold: float | None = None,
    divergence: str | None = None,
    gate_threshold: float | Sequence[float] | None = None,
    quality: str | None = None,
    budget: float | None = None,
    tree: TreeConfig | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    options: object | None = None,  # TEMP
) -> Output | list[Output]:
    """Generate an answer with EAGLE-2 draft trees and fuzzy acceptance.

    Args:
        prompt: text (tokenised as it is), a chat (list of {"role", "content"}, put through the tokenizer's chat
            template), or token ids (list of int, or tensor [L] or [1, L]). A list of such prompts is a batch: they are
            decoded together, each as it would be alone (docs/batches.md).
        model: from `load`; None: the default pair.
        max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, min_new_tokens, ignore_eos, seed, stop,
            stop_token_ids: see `SamplingOptions`.
        acceptance, threshold, divergence, gate_threshold, quality, budget, tree: see `AcceptanceOptions`.
        logits_processor, stopping_criteria, streamer: those of `transformers`. Processors see each node's own path and
            must be functions of it and the scores (docs/processors.md). A streamer with a method
            `on_receipts(receipts)` gets the receipts of each cycle before its tokens, and every streamer is ended also
            where this call raises. Stop strings are streamed like all other text.
        session: a `Session` that several calls share: what the caches hold of the prompt since the last call is not
            processed again. `Chat` is made of it.

    Returns:
        `Output` with text, token_ids, finish_reason, seed, stats and receipts; for a batch, a list of them.

    Raises:
        ValueError, TypeError: a bad option, or a prompt that is empty, too long or of no accepted form, before any
            forward; while decoding, a rule, processor or criterion that returns something else than it must, or
            processors that leave no token to draw.

    What a rule, processor, criterion or streamer raises itself is passed on. No error changes the model: the next call
    gives what it would have given without.
    """
    if options is not None:  # TEMP
        given = {**vars(options), "acceptance": options.rule, "divergence": None, "threshold": None}
        given.pop("head_guard")
        given.pop("rule")
        return generate.__wrapped__(prompt, model, **given, logits_processor=logits_processor,
                                    stopping_criteria=stopping_criteria, streamer=streamer, session=session)
    sampling, accepting = SamplingOptions.of(locals()), AcceptanceOptions.of(locals())
    model = default_model() if model is None else model
    if not isinstance(model, EagleModel):
        raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}")
    prompts, batched = encode_prompts(prompt, model)
    batch, settings = resolve(model, prompts, sampling, accepting, logits_processor, stopping_criteria)
    if session is not None and not isinstance(session, Session):
        raise TypeError(f"session must be a Session or None, got {session!r}")
    if len(prompts) > 1 and (session is not None or streamer is not None):
        name = "a session" if session is not None else "a streamer"
        raise ValueError(f"{name} serves one prompt at a time, got a batch of {len(prompts)}")
    if streamer is not None:
        streamer.put(torch.tensor(prompts))
    outputs: list[Output] = [None] * len(prompts)
    for numbers in model.target.batches([len(ids) for ids in prompts]):
        answers = decode_batch(model, [prompts[number] for number in numbers], batch,
                               [settings[number] for number in numbers], streamer, session)
        for number, output in zip(numbers, answers, strict=True):
            outputs[number] = output
            if model.tokenizer is not None:
                output.text = cut_text(decode(model, output.token_ids), sampling.stop_strings)
    return outputs if batched else outputs[0]


def decode_batch(
    model: EagleModel, prompts: list[list[int]], batch: BatchSettings, settings: list[RequestSettings],
    streamer: BaseStreamer | None, session: Session | None,
) -> list[Output]:
    """Answers to prompts that one cache serves."""
    trees = [batch.choose(count).tree for count in range(1, len(prompts) + 1)]
    drafting = any(trees) or session is not None  # as others end, or in a later call
    answers = run(model.target, model.draft if drafting else None, prompts, batch, settings, streamer=streamer,
                  session=session, graphs=model.graphs)
    for output in answers:
        if trees[-1] is None and output.stats.undrafted == output.stats.target_forwards:
            output.stats.plain_because = "no tree is expected to be sufficiently faster than plain decoding"
    return answers


def cut_text(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [at for string in stops if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text
