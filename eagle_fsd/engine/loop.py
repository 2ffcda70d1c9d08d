"""Decoding prompts together to their ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from ..heads.eagle import DraftHead
from ..models.target import TargetModel
from .decoder import Decoder, Session
from .graphs import GraphCycles
from .receipts import Output
from .request import Settings


@torch.inference_mode()
def run(
    target: TargetModel,
    head: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Settings],
    *,
    stop_check: Callable | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
    graphs: GraphCycles | None = None,
) -> list[Output]:
    """Decode prompts together to their ends. Ending the streamer is up to the caller.

    Args:
        stop_check: function of the new tokens so far; True ends the answer with reason "stop".
        streamer: gets each cycle's tokens [n] on the CPU; before, their receipts, where it has `on_receipts`.
        session: that of earlier requests to these models. It and the streamer serve a single prompt.
        graphs: see `Decoder`; in use by another request, or with a session, which keeps its caches, they are left.
    """
    if graphs is not None and session is None and len(prompts) == 1 and graphs.in_use.acquire(blocking=False):
        try:
            return _run(target, head, prompts, settings, stop_check, streamer, None, graphs)
        finally:
            graphs.in_use.release()
    return _run(target, head, prompts, settings, stop_check, streamer, session, None)


def _run(
    target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]], settings: Sequence[Settings],
    stop_check: Callable | None, streamer: BaseStreamer | None, session: Session | None, graphs: GraphCycles | None,
) -> list[Output]:
    started = time.perf_counter()
    earlier = None
    if session is not None:  # empty until the end: an error may leave caches in the middle of a cycle
        earlier, session.decoder = session.decoder, None
    decoder = Decoder(target, head, prompts, settings, earlier, graphs)
    rows = list(decoder.rows)
    cycles = decoder.prefill()
    prefilled = time.perf_counter()
    while True:
        for row, cycle in zip(decoder.rows, cycles, strict=True):
            row.take(cycle, stop_check, streamer)
            if row.reason is not None:
                row.stats.prefill_seconds = prefilled - started
                row.stats.decode_seconds = time.perf_counter() - prefilled
        going = [number for number, row in enumerate(decoder.rows) if row.reason is None]
        if not going:
            break
        if len(going) < len(decoder.rows):
            decoder.keep(going)
        cycles = [row.count(cycle) for row, cycle in zip(decoder.rows, decoder.step(), strict=True)]
    if session is not None:
        session.decoder = decoder
    return [row.output() for row in rows]
