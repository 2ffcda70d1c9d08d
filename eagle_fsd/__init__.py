"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from .acceptance import RULES, Decision, Verification, make_rule
from .api import generate
from .chat import Chat
from .engine.decoder import Session
from .engine.receipts import Output, Receipt, Stats
from .heads.checkpoint import load_head, save_head
from .heads.eagle import DraftHead
from .hf import custom_generate
from .pair import EagleModel, load
from .trees.config import TreeConfig

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
