"""Draft trees: their shape, growth and reranking."""
