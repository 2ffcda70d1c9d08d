"""The target as the method sees it: adapter over any causal LM, caches, tree attention, tensor parallelism."""
