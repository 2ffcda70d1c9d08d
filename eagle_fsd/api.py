"""`generate`: one call from prompt to answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .decoding.decoder import Decoder, Session
from .decoding.output import Output, Receipt
from .decoding.request import Request
from .drafting.sizing import Choice
from .drafting.tree import DraftTree
from .keywords import GenerateKeywords, lists_options
from .loading import default_model
from .options import OF_ONE_PROMPT, GenerateOptions, from_generate
from .pair import EagleModel
from .prompts import encode_prompts
from .requests import make_requests
from .text import answer_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Keywords(GenerateKeywords, total=False):
        """All that `generate` takes by name."""

        options: GenerateOptions | None
        logits_processor: Sequence[LogitsProcessor] | None
        stopping_criteria: Sequence[Callable] | None
        streamer: BaseStreamer | None
        session: Session | None


OWN = ("options", "logits_processor", "stopping_criteria", "streamer", "session")  # further keywords of `generate`


@overload
def generate(
    prompt: str | Tensor | Sequence[int] | Sequence[Mapping[str, Any]], model: EagleModel | None = None,
    **given: Unpack[Keywords],
) -> Output: ...


@overload
def generate(
    prompt: list[str] | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
    model: EagleModel | None = None, **given: Unpack[Keywords],
) -> list[Output]: ...


@overload
def generate(
    prompt: Mapping[str, Any], model: EagleModel | None = None, **given: Unpack[Keywords]
) -> Output | list[Output]: ...


@lists_options(GenerateOptions, GenerateKeywords, described=True)
def generate(
    prompt: str | Sequence | Tensor | Mapping,
    model: EagleModel | None = None,
    *,
    options: GenerateOptions | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    **given: Unpack[GenerateKeywords],
) -> Output | list[Output]:
    """Generate an answer with EAGLE-2 draft trees and fuzzy acceptance; lossless without a `threshold`.

    Args:
        prompt: text (tokenised as it is, with no second BOS where it begins with one), a chat (list of {"role",
            "content"}, put through the tokenizer's chat template), or token ids (list of int, or tensor [L] or [1, L]).
            A list of such prompts is a batch: they are decoded together, each as it would be alone; with a threshold
            only if `tree=` is fixed too. Also what a tokenizer returns: `input_ids` of one or more prompts, with an
            `attention_mask` where they are padded on the left.
        model: from `load`; None: the default pair.
        given: options by name, such as `max_new_tokens=200` or `threshold=0.3`: see `GenerateOptions`, which has them
            all; they come on top of `options`. Of `model.generate`'s names `do_sample`, `stop_strings`, `eos_token_id`
            and `generation_config` are taken too.
        logits_processor, stopping_criteria, streamer: those of `transformers`. Processors see each node's own path and
            must be functions of it and the scores. A streamer with a method `on_receipts(receipts)` gets the receipts
            of each cycle before its tokens, and every streamer is ended also where this call raises. Stop strings are
            streamed like all other text.
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
    with ending(streamer):
        options = with_options(options, given)
        model = default_model() if model is None else model
        if not isinstance(model, EagleModel):
            hint = "; the prompt comes first: generate(prompt, model)" if isinstance(prompt, EagleModel) else ""
            raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}{hint}")
        prompts, batched = encode_prompts(prompt, model)
        requests = make_requests(model, prompts, options, logits_processor, stopping_criteria)
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be a Session or None, got {session!r}")
        if len(prompts) > 1 and (session is not None or streamer is not None):
            name = "a session" if session is not None else "a streamer"
            raise ValueError(f"{name} serves one prompt at a time, got a batch of {len(prompts)}")
        if streamer is not None:
            streamer.put(torch.tensor(prompts))
        outputs = decode_requests(model, requests, streamer=streamer, session=session)
    for output in outputs if model.tokenizer is not None else []:
        output.text = answer_text(model.tokenizer, output.token_ids, options.stop_strings)
    return outputs if batched else outputs[0]


def with_options(options: GenerateOptions | None, given: Mapping[str, object]) -> GenerateOptions:
    """These options with some given by name.

    Raises:
        TypeError, ValueError: an unknown name, or a bad value.
    """
    if not (options is None or isinstance(options, GenerateOptions)):
        hint = f"; {OF_ONE_PROMPT}" if isinstance(options, (list, tuple)) else ""
        raise TypeError(f"options must be GenerateOptions or None, got {options!r}{hint}")
    if options is not None and not given:
        return options  # checked when it was made
    before = {} if options is None else {name: getattr(options, name) for name in GenerateOptions.names()}
    ours = from_generate(given, before.get("temperature", 0.0))
    return GenerateOptions.from_names({**before, **ours}, OWN)


@torch.inference_mode()
def decode_requests(
    model: EagleModel,
    requests: Sequence[Request],
    *,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    observe: Callable[[DraftTree, list[Tensor], list[list[int]]], None] | None = None,
    ended: Callable[[Request], None] | None = None,
) -> list[Output]:
    """Decode requests with one rule and one tree to their ends, together where one cache serves them.

    Args:
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`. Ending it
            is up to the caller.
        session: that of earlier requests to this model. It and the streamer serve a single prompt.
        observe: called after each drafted cycle with the trees, the draft's logits of each level [B, K, R], and the
            accepted path of each row (nodes, the root first).
        ended: called with each request as soon as it has ended, while others go on.
    """
    earlier = None
    if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
        earlier, session.decoder = session.decoder, None
    for numbers in model.target.batches([len(request.prompt) for request in requests]):
        group = [requests[number] for number in numbers]
        params = group[0].params
        choose, pause = model.chooser(params.tree, params.rule, params.temperature)
        if not params.speculative:
            choose, pause = (lambda count: Choice(None)), None
        drafting = params.speculative or session is not None  # whose next call may draft
        decoder = Decoder(model.target, model.draft if drafting else None, group, choose, pause, earlier=earlier)
        decoder.observe = observe
        emitted = decoder.prefill()
        while True:
            for request, receipts in zip(decoder.requests, emitted, strict=True):
                if request.error is not None:
                    raise request.error
                if streamer is not None:
                    stream(receipts, streamer)
                if request.reason is not None and ended is not None:
                    ended(request)
            if all(request.reason is not None for request in decoder.requests):
                break
            decoder.drop_finished()
            emitted = decoder.step()
        if session is not None:
            session.decoder = decoder
    return [request.output() for request in requests]


def stream(receipts: Sequence[Receipt], streamer: BaseStreamer) -> None:
    if hasattr(streamer, "on_receipts"):
        streamer.on_receipts(receipts)
    streamer.put(torch.tensor([receipt.token for receipt in receipts]))


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends the streamer also where decoding fails: who reads it in another thread would wait for ever.

    Raises:
        TypeError: it has not the methods of the streamers of `transformers`.
    """
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
