"""Data on disk: files, hub repositories, GGUF models, question files, conversations."""
