"""What a stored result must say about how it was made."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch
import transformers


def environment() -> dict:
    """Commit, command, versions and hardware of this process."""
    def git(*args: str) -> str:
        root = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "command": "python -m " + " ".join([_module_name(), *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def _module_name() -> str:
    path = Path(sys.argv[0])
    return f"{path.parent.name}.{path.stem}"
