"""The progress bars of `transformers`, off where what they show takes a blink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tqdm.auto import tqdm
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging as bars

BLINK = 1 << 30  # bytes that are read in about a second


@contextmanager
def no_bars_for(place: str | Path) -> Iterator[None]:
    """Within, loading a file or directory of less than `BLINK` bytes shows no bars; anything else shows what it does.

    Args:
        place: a hub id counts as large: it may have to be downloaded.
    """
    files = [Path(place)] if Path(place).is_file() else list(Path(place).glob("*"))
    if not files or sum(file.stat().st_size for file in files) >= BLINK:
        yield
        return
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with patch.object(gguf_reader, "tqdm", partial(tqdm, disable=True), create=True):  # it asks nobody
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
