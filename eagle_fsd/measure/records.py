"""What a stored result must say about how it was made."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from accelerate import PartialState


def environment() -> dict:
    """Commit, command, versions and hardware of this process."""
    def git(*args: str) -> str:
        root = Path(__file__).parent
        try:
            return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:  # there is no git
            return ""

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown")
        + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "command": "python -m " + shlex.join([_module_name(), *map(shown, sys.argv[1:])]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def write_record(out: Path, record: Mapping[str, object], text: str) -> str:
    """Write `out` as JSON with how it was made, and beside it the same as a Markdown page, which is returned."""
    about = environment()
    write_json(record_path(out, ".json"), {"environment": about, **record})
    return write_page(out, about, text)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a record in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_page(out: Path, about: Mapping[str, object], text: str) -> str:
    """Write the Markdown page of a record, which is returned; `about`: its environment."""
    page = f"# {record_path(out, '').name}\n\n`{about['command']}` at {about['commit']}, " \
           f"{about['gpu'] or about['processor']}, {about['threads']} threads, torch {about['torch']}, " \
           f"transformers {about['transformers']}\n\n{text}\n"
    record_path(out, ".md").write_text(page, encoding="utf-8")
    return page


def record_path(out: Path, suffix: str) -> Path:
    """`out` with this suffix. Any other dot than that of .json, .jsonl and .md belongs to the name: sweep-t0.7."""
    return out.with_name((out.stem if out.suffix in (".json", ".jsonl", ".md") else out.name) + suffix)


def processes(device: str | None = None) -> PartialState:
    """This process among those that share the work. `torchrun` does not say that they are to work on the CPU."""
    return PartialState(cpu=str(device) == "cpu" or not torch.cuda.is_available())


def shown(value: object) -> str:
    """A setting as text; an absolute path relative to the repository, so that no record names a machine's folders."""
    text = str(value)
    return os.path.relpath(text, Path(__file__).parents[2]) if os.path.isabs(text) else text


def shown_settings(settings: Mapping[str, object]) -> dict[str, str]:
    """Every setting as `shown`."""
    return {name: shown(value) for name, value in settings.items()}


def _module_name() -> str:
    path = Path(sys.argv[0])
    return f"{path.parent.name}.{path.stem}"
