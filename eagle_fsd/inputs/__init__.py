"""From prompts and options to requests."""
