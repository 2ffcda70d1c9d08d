"""Decoding prompts together to their ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..drafting.sizing import Choice, Pause
from ..drafting.tree import DraftTree
from ..heads.eagle import DraftHead
from ..models.target import TargetModel
from .decoder import Decoder, Session
from .output import Output
from .request import Request


@torch.inference_mode()
def run(
    target: TargetModel,
    head: DraftHead | None,
    requests: Sequence[Request],
    choose: Callable[[int], Choice],
    pause: Pause | None = None,
    *,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    observe: Callable[[DraftTree, list[Tensor], list[list[int]]], None] | None = None,
    ended: Callable[[Request], None] | None = None,
) -> list[Output]:
    """Decode requests together to their ends. Ending the streamer is up to the caller.

    Args:
        choose, pause: see `Decoder`.
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`.
        session: that of earlier requests to these models. It and the streamer serve a single prompt.
        observe: called after each drafted cycle with the trees, the draft's logits of each level [B, K, R], and the
            accepted path of each row (nodes, the root first).
        ended: called with each request as soon as it has ended, while others go on.
    """
    started = time.perf_counter()
    earlier = None
    if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
        earlier, session.decoder = session.decoder, None
    decoder = Decoder(target, head, requests, choose, pause, earlier=earlier)
    decoder.observe = observe
    emissions = decoder.prefill()
    prefilled = time.perf_counter()
    while True:
        for request, emission in zip(decoder.requests, emissions, strict=True):
            request.take(emission, streamer)
            if request.reason is not None:
                request.stats.prefill_seconds = prefilled - started
                request.stats.decode_seconds = time.perf_counter() - prefilled
                if ended is not None:
                    ended(request)
        going = [number for number, request in enumerate(decoder.requests) if request.reason is None]
        if not going:
            break
        if len(going) < len(decoder.requests):
            decoder.keep(going)
        emissions = decoder.step()
    if session is not None:
        session.decoder = decoder
    return [request.output() for request in requests]
