"""Helpers of every folder: checks of values, lazy imports, locks, text of tokens."""
