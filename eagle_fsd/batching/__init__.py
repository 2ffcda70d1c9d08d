"""Continuous batching: requests join a batch and leave it while others continue."""
