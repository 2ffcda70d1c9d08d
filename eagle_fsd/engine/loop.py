"""Decoding prompts together to their ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers.generation.streamers import BaseStreamer

from ..heads.eagle import DraftHead
from ..models.target import TargetModel
from .decoder import Decoder, Session
from .graphs import GraphCycles
from .receipts import Output
from .request import BatchSettings, RequestSettings


@torch.inference_mode()
def run(
    target: TargetModel,
    head: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    batch: BatchSettings,
    settings: Sequence[RequestSettings],
    *,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    graphs: GraphCycles | None = None,
) -> list[Output]:
    """Decode prompts together to their ends. Ending the streamer is up to the caller.

    Args:
        settings: of each prompt.
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`.
        session: that of earlier requests to these models. It and the streamer serve a single prompt.
        graphs: see `Decoder`; in use by another request, or with a session, which keeps its caches, they are left.
    """
    started = time.perf_counter()
    with ExitStack() as afterwards:
        if session is not None or len(prompts) > 1 or graphs is None or not graphs.in_use.acquire(blocking=False):
            graphs = None
        else:
            afterwards.callback(graphs.in_use.release)
        earlier = None
        if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
            earlier, session.decoder = session.decoder, None
        decoder = Decoder(target, head, prompts, batch, settings, earlier, graphs)
        requests = list(decoder.requests)
        emissions = decoder.prefill()
        prefilled = time.perf_counter()
        while True:
            for request, emission in zip(decoder.requests, emissions, strict=True):
                request.take(emission, streamer)
                if request.reason is not None:
                    request.stats.prefill_seconds = prefilled - started
                    request.stats.decode_seconds = time.perf_counter() - prefilled
            going = [number for number, request in enumerate(decoder.requests) if request.reason is None]
            if not going:
                break
            if len(going) < len(decoder.requests):
                decoder.keep(going)
            emissions = decoder.step()
        if session is not None:
            session.decoder = decoder
        return [request.output() for request in requests]
