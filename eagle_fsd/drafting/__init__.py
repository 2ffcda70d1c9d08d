"""Draft trees: their shape, growth and reranking, and which tree this machine is to draft."""
