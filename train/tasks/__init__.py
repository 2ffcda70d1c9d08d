"""Verifiable tasks and held-out source: text with known answers, made on this machine, for tests and measurements."""
