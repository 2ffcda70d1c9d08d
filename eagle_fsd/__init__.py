"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .acceptance import RULES, Decision, Verification, make_rule
    from .api import generate
    from .chat import Chat
    from .drafting.config import TreeConfig
    from .engine.decoder import Session
    from .engine.receipts import Output, Receipt, Stats
    from .heads.checkpoint import load_head, save_head
    from .heads.eagle import DraftHead
    from .hf import custom_generate
    from .options import AcceptanceOptions, LoadOptions, SamplingOptions
    from .pair import EagleModel, load
    from .serve.engine import Engine
    from .serve.tickets import EngineClosed, Piece, QueueFull, Ticket

__all__ = [
    "RULES",
    "AcceptanceOptions",
    "Chat",
    "Decision",
    "DraftHead",
    "EagleModel",
    "Engine",
    "EngineClosed",
    "LoadOptions",
    "Output",
    "Piece",
    "QueueFull",
    "Receipt",
    "SamplingOptions",
    "Session",
    "Stats",
    "Ticket",
    "TreeConfig",
    "Verification",
    "custom_generate",
    "generate",
    "load",
    "load_head",
    "make_rule",
    "save_head",
]

__getattr__, __dir__ = lazy_names(__name__, {
    **dict.fromkeys(("RULES", "Decision", "Verification", "make_rule"), "acceptance"),
    "generate": "api",
    "Chat": "chat",
    "Session": "engine.decoder",
    **dict.fromkeys(("Output", "Receipt", "Stats"), "engine.receipts"),
    **dict.fromkeys(("load_head", "save_head"), "heads.checkpoint"),
    "DraftHead": "heads.eagle",
    "custom_generate": "hf",
    **dict.fromkeys(("AcceptanceOptions", "LoadOptions", "SamplingOptions"), "options"),
    **dict.fromkeys(("EagleModel", "load"), "pair"),
    "Engine": "serve.engine",
    **dict.fromkeys(("EngineClosed", "Piece", "QueueFull", "Ticket"), "serve.tickets"),
    "TreeConfig": "drafting.config",
})
