"""Requests that join a batch and leave it while others go on: continuous batching."""
