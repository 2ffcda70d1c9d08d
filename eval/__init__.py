"""Measuring speed, and what it costs."""
