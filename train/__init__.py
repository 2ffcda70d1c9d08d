"""Training: conversations, features and draft heads, and tasks whose answers can be checked."""
