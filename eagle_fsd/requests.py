"""TEMP."""
from .prompts import *  # noqa
