"""From conversations to what a head learns from."""
