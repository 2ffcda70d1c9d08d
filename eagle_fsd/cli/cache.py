"""`eagle-fsd cache`: what is kept in the user's cache directory, and its removal."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

KINDS = {  # folders of the cache
    "gguf": "models of GGUF files, dequantised: made anew when they are loaded",
    "latency": "what decode cycles take on this machine: measured anew when they are needed",
    "trees": "the curves that eagle-fsd tune has fitted",
}


@dataclass(frozen=True)
class CacheCommand:
    """List what the cache holds, with sizes; or remove it.

    It is in ~/.cache/eagle_fsd, or where EAGLE_FSD_CACHE says. Dequantised models take at most 30 GB, or
    EAGLE_FSD_CACHE_GB; beyond, those that were not used for the longest time go.

    Args:
        clear: remove what is of this kind.
    """

    clear: Literal["gguf", "latency", "trees", "all"] | None = None

    def run(self) -> None:
        from ..data.files import bytes_in, cache_directory, cache_limit, locked, remove_folder

        place, limit = cache_directory(), cache_limit()
        total = 0
        print(place)
        for kind, meaning in KINDS.items():
            entries = sorted((place / kind).glob("*"))
            print(f"\n{kind}: {meaning}")
            for path in entries:
                size, used = bytes_in(path), datetime.fromtimestamp(path.stat().st_mtime)
                removed = self.clear in (kind, "all")
                print(f"  {size / 1e6:>10.1f} MB  {used:%Y-%m-%d}  {path.name}{'  removed' if removed else ''}")
                if not removed:
                    total += size
                elif path.is_dir():
                    remove_folder(path)
                else:
                    path.unlink()
            if not entries:
                print("  nothing")
        for lock in place.glob("*.lock"):  # of earlier versions
            with suppress(BlockingIOError), locked(lock, wait=False, remove=True):
                pass
        print(f"\n{total / 1e9:.2f} GB in all; of gguf at most {limit / 1e9:g} GB")
