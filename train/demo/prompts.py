"""Writes the prompts of `eagle-fsd demo`: held-out tasks of several families and the start of a Python function.

    python -m train.demo.prompts
"""

from __future__ import annotations

import json
from pathlib import Path

from train.demo.tasks import tasks

FAMILIES = ("arithmetic", "story", "convert", "list", "string", "table", "json", "followup")
SOURCE = '''class Stack:
    """A last-in, first-out list."""

    def __init__(self):
        self.items = []

    def push(self, item):
'''
OUT = Path(__file__).parents[2] / "eagle_fsd" / "cli" / "demo_prompts.json"


def demo_prompts() -> list[dict]:
    """Entries with `kind`, `prompt` (chat or text) and `result` (None where nothing can be checked)."""
    chosen = {task.family: task for task in tasks("heldout", seed=2026, count=len(FAMILIES))}
    entries = [{"kind": f, "prompt": chosen[f].messages, "result": chosen[f].result} for f in FAMILIES]
    return [*entries, {"kind": "python", "prompt": SOURCE, "result": None}]


if __name__ == "__main__":
    OUT.write_text(json.dumps(demo_prompts(), indent=1) + "\n", encoding="utf-8")
