"""Servers: an endpoint with OpenAI's API, its chat page, tool calls and replicas, and the vLLM plug-in."""
