"""Mismatches of target and draft, what they look like, and whether it matters which of the two tokens is taken."""
