"""The command line `eagle-fsd`."""

from .app import main

__all__ = ["main"]
