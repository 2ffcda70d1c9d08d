"""Python source of this interpreter's standard library: those files that the small target has not seen."""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path


def python_files() -> list[Path]:
    """One source file in 32 of the running interpreter's standard library, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    return [file for file in files if zlib.crc32(str(file.relative_to(root)).encode()) % 32 == 0]


def python_texts() -> Iterator[str]:
    """The readable ASCII files of them."""
    for file in python_files():
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 200 < len(text) < 400_000 and text.isascii():
            yield text


def python_prefixes(count: int, *, characters: int = 300) -> list[str]:
    """`count` beginnings of that source, each cut at a line end: prompts for continuation."""
    prefixes = []
    for text in python_texts():
        for start in range(0, len(text) - 2 * characters, 6000):
            begin = text.rfind("\n", 0, start) + 1 if start else 0
            end = text.rfind("\n", begin, begin + characters) + 1
            if end - begin > characters // 2:
                prefixes.append(text[begin:end])
    random.Random(0).shuffle(prefixes)
    return prefixes[:count]
