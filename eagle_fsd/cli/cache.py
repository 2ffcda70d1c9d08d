"""`eagle-fsd cache`: list or clear the user's cache directory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

KINDS = {  # folder of the cache: description
    "gguf": "dequantised GGUF models, made again when they are next loaded",
    "digests": "of GGUF files, computed again when needed",
    "latency": "times of decode cycles on this machine, measured again when needed",
    "kernels": "times of int8 products on this machine, measured again when needed",
    "checked": "targets that can verify trees, checked again when needed",
    "trees": "acceptance curves fitted by eagle-fsd tune",
}


@dataclass(frozen=True)
class CacheCommand:
    """List the contents of the cache with their sizes, or remove them.

    The cache is ~/.cache/eagle_fsd, or the directory in EAGLE_FSD_CACHE. Dequantised models take at most 30 GB, or
    EAGLE_FSD_CACHE_GB; above that, the least recently used are removed.

    Args:
        clear: remove entries of this kind.
    """

    clear: Literal[(*KINDS, "all")] | None = None

    def run(self) -> None:
        from ..utils.files import bytes_in, cache_directory, cache_limit, remove_folder

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
        print(f"\n{total / 1e9:.2f} GB in total; limit for gguf: {limit / 1e9:g} GB")
