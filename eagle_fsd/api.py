"""`generate`: one call from prompt to answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .decoding import cycle
from .decoding.batch import Batch, Session
from .decoding.output import Output, Receipt
from .decoding.request import Request
from .drafting.tree import DraftTree
from .inputs.prompts import encode_prompts
from .inputs.requests import make_requests
from .loading.load import default_model
from .loading.pair import EagleModel
from .options.generate import GenerateKeywords, GenerateOptions, with_options
from .options.option import lists_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Keywords(GenerateKeywords, total=False):
    """All keyword arguments of `generate`."""

    options: GenerateOptions | None
    logits_processor: Sequence[LogitsProcessor] | None
    stopping_criteria: Sequence[Callable] | None
    streamer: BaseStreamer | None
    session: Session | None


# The keyword arguments of `generate` that are no options.
CALL_KEYWORDS = [name for name in Keywords.__annotations__ if name not in GenerateKeywords.__annotations__]


@overload
def generate(
    prompt: str | Tensor | Sequence[int] | Sequence[Mapping[str, Any]], model: EagleModel | None = None,
    **keywords: Unpack[Keywords],
) -> Output: ...


@overload
def generate(
    prompt: list[str] | Sequence[Tensor] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
    model: EagleModel | None = None, **keywords: Unpack[Keywords],
) -> list[Output]: ...


@overload
def generate(
    prompt: Mapping[str, Any], model: EagleModel | None = None, **keywords: Unpack[Keywords]
) -> Output | list[Output]: ...


@lists_options(GenerateKeywords, described=True)
def generate(
    prompt: str | Sequence | Tensor | Mapping,
    model: EagleModel | None = None,
    *,
    options: GenerateOptions | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    **keywords: Unpack[GenerateKeywords],
) -> Output | list[Output]:
    """Generate an answer with EAGLE-2 draft trees and fuzzy acceptance. Without a `threshold`, a rule given by name is
    lossless.

    Args:
        prompt: text (tokenised as it is; a BOS at its beginning is not doubled), a chat (list of {"role", "content"},
            rendered by the tokenizer's chat template), or token ids (list of int, or tensor [L] or [1, L]). A list of
            such prompts is a batch: the prompts are decoded together, each with the result that it would have alone;
            with a threshold, only if `tree=` is fixed too. The output of a tokenizer is a prompt as well: `input_ids`
            of one or more prompts, with an `attention_mask` if they are padded.
        model: the result of `load`; None: the default pair.
        keywords: options by name, such as `max_new_tokens=200` or `threshold=0.3`; `GenerateOptions` lists them all.
            They override `options`. `do_sample` and `stop_strings` work as in `model.generate`.
        logits_processor, stopping_criteria, streamer: those of `transformers`. A processor sees the path of each node
            and must be a function of this path and the scores. A streamer with a method `on_receipts(receipts)`
            receives the receipts of each cycle before its tokens. Every streamer is ended, even if this call raises.
            Stop strings are streamed like all other text.
        session: a `Session` shared by several calls. The part of the prompt that its caches contain is not processed
            again. `Chat` uses one.

    Returns:
        `Output` with text, token_ids, finish_reason, seed, stats and receipts; for a batch, a list of them.

    Raises:
        ValueError, TypeError: before any forward, a bad option, or a prompt that is empty, too long or of an unknown
            form; while decoding, a rule, processor or criterion that returns something of the wrong form, or
            processors that leave no token to draw.

    Exceptions of a rule, processor, criterion or streamer propagate unchanged. No error affects the model: the next
    call returns what it would have returned without the error.
    """
    with ending(streamer):
        options = with_options(options, keywords, CALL_KEYWORDS)
        model = default_model() if model is None else model
        if not isinstance(model, EagleModel):
            hint = "; the prompt comes first: generate(prompt, model)" if isinstance(prompt, EagleModel) else ""
            raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}{hint}")
        prompts, batched = encode_prompts(prompt, model, options.chat_template_kwargs)
        requests = make_requests(model, prompts, options, logits_processor, stopping_criteria)
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be a Session or None, got {session!r}")
        if len(prompts) > 1 and (session is not None or streamer is not None):
            name = "a session" if session is not None else "a streamer"
            raise ValueError(f"{name} serves one prompt at a time, got a batch of {len(prompts)}")
        if streamer is not None:
            streamer.put(torch.tensor(prompts))
        decode_requests(model, requests, streamer=streamer, session=session)
    outputs = [request.output(model.tokenizer) for request in requests]
    return outputs if batched else outputs[0]


@torch.inference_mode()
def decode_requests(
    model: EagleModel,
    requests: Sequence[Request],
    *,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    observe: Callable[[DraftTree, list[Tensor], list[list[int]]], None] | None = None,
    ended: Callable[[Request], None] | None = None,
) -> None:
    """Decode requests that share rule, temperature, tree and `speculative` until all have ended, in batches that one
    cache can serve.

    Args:
        streamer: receives the tokens [n] of each cycle on the CPU, after their receipts if it has `on_receipts`. The
            caller ends it.
        session: that of earlier requests to this model. Session and streamer serve a single prompt.
        observe: called after each drafted cycle with the trees, the draft's logits of each level [B, K, R], and the
            accepted path of each row (nodes, the root first).
        ended: called with each request as soon as it has ended, while others continue.
    """
    model.refresh()
    parked = None
    if session is not None:  # empty until the end: an error may leave inconsistent caches
        parked, session.row = session.row, None
    groups = deque([requests[number] for number in numbers]
                   for numbers in model.target.batches([len(request.prompt) for request in requests]))
    while groups:
        group = groups.popleft()
        speculative = group[0].options.speculative  # in all, as what the drafting policy reads
        drafter = model.draft if speculative or session is not None else None  # a session's next call may draft
        batch = Batch(model.target, drafter, group, model.drafting(group), parked=parked,
                      captured=model.captured, observe=observe)
        emitted = [cycle.prefill(batch, number) for number in range(len(group))]
        parked, long = None, []
        while True:
            for request, receipts in zip(batch.requests, emitted, strict=True):
                if request.error is not None:
                    raise request.error
                if streamer is not None:
                    stream(receipts, streamer)
                if request.reason is not None and ended is not None:
                    ended(request)
            if all(request.reason is not None for request in batch.requests):
                break
            long += batch.drop_finished()
            if not batch.requests:
                break
            emitted = cycle.step(batch)
        if long:
            groups.append(long)
        elif session is not None:
            session.row = batch.row(0)
        del batch  # and its caches, before the next one has others


def stream(receipts: Sequence[Receipt], streamer: BaseStreamer) -> None:
    """Send the tokens of a cycle to a streamer."""
    if hasattr(streamer, "on_receipts"):
        streamer.on_receipts(receipts)
    streamer.put(torch.tensor([receipt.token for receipt in receipts]))


def check_streamer(streamer: object) -> None:
    """Raise TypeError unless it is None or has the methods of a `transformers` streamer."""
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """End the streamer on exit, even if decoding fails: otherwise a thread that reads from it would wait forever.

    Raises:
        TypeError: it lacks the methods of a `transformers` streamer.
    """
    check_streamer(streamer)
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
