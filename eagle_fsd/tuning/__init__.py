"""The tree for this machine: latencies measured and kept, logged cycles, and the choice between trees."""
