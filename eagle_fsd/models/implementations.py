"""The names of attention implementations that can verify a tree."""

from __future__ import annotations

STOCK = ("sdpa", "eager")  # those of transformers that take an arbitrary 4D mask
GROUPED, SPLIT = "grouped", "split"  # ours
IMPLEMENTATIONS = (*STOCK, GROUPED, SPLIT)
