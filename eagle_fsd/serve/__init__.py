"""Serving a pair: the endpoint with OpenAI's API, its page, tools and replicas, and the vLLM plug-in."""
