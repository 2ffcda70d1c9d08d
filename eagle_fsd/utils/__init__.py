"""Helpers of every folder."""
