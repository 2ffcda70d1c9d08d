"""The target model: an adapter over any causal LM, caches, tree attention, loading. Imports no torch."""

STOCK = ("sdpa", "eager")  # attention implementations of transformers that accept an arbitrary 4D mask
GROUPED, SPLIT = "grouped", "split"  # our own, see `attention`
IMPLEMENTATIONS = (*STOCK, GROUPED, SPLIT)
QUANTIZATIONS = ("int8", "int8-fast")  # our own, see `linear`
