"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from .acceptance import RULES, Decision, Verification, make_rule
from .api import custom_generate, generate
from .chat import Chat
from .checkpoint import load_head, save_head
from .config import TreeConfig
from .draft import DraftHead
from .generation import Output, Receipt, Session, Stats
from .model import EagleModel, load

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Chat",
    "Decision",
    "DraftHead",
    "EagleModel",
    "Output",
    "Receipt",
    "Session",
    "Stats",
    "TreeConfig",
    "Verification",
    "custom_generate",
    "generate",
    "load",
    "load_head",
    "make_rule",
    "save_head",
]
