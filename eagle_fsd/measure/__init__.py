"""Comparison of decoding methods on the same questions: answers, times, grades and statistics."""
