"""Draft trees: their shape, growth and reranking, drafts from the text, and how large a tree pays on this machine."""
