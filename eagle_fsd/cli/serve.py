"""TEMP."""
from dataclasses import dataclass

from .arguments import Decoding, Loading


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """TEMP."""

    limit: int = 3
    pair: Loading = Loading()
    decoding: Decoding

    def run(self) -> None:
        pass
