"""TEMP."""
from .receipts import Output, Receipt, Stats  # noqa
