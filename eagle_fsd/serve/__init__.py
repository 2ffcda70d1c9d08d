"""Serving a pair: requests that join, an OpenAI-compatible endpoint, metrics, a page, and replicas on Ray."""
