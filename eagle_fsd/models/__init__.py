"""The target as the method sees it: adapter over any causal LM, caches, tree attention, loading. Imports no torch."""

STOCK = ("sdpa", "eager")  # the attention implementations of transformers that take an arbitrary 4D mask
GROUPED, SPLIT = "grouped", "split"  # ours, see `attention`
IMPLEMENTATIONS = (*STOCK, GROUPED, SPLIT)
