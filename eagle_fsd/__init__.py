"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from typing import TYPE_CHECKING

from .utils.lazy import lazy_names

__version__ = "0.5.0.dev0"

__all__ = [
    "RULES",
    "Chat",
    "DraftHead",
    "DraftModel",
    "EagleModel",
    "Engine",
    "EngineClosed",
    "FuzzyRule",
    "GatingRule",
    "GenerateOptions",
    "LoadOptions",
    "Nodes",
    "Output",
    "Piece",
    "QueueFull",
    "Receipt",
    "Rule",
    "Session",
    "Stats",
    "TextDrafts",
    "Ticket",
    "TokenWeights",
    "TreeConfig",
    "Weights",
    "custom_generate",
    "generate",
    "load",
    "load_head",
    "make_rule",
    "save_head",
]

if TYPE_CHECKING:  # editors and type checkers do not follow __getattr__
    from .acceptance import RULES, FuzzyRule, GatingRule, Nodes, Rule, TokenWeights, Weights, make_rule
    from .api import generate
    from .batching.engine import Engine
    from .batching.tickets import EngineClosed, Piece, QueueFull, Ticket
    from .chat import Chat
    from .decoding.batch import Session
    from .decoding.output import Output, Receipt, Stats
    from .drafting.config import TreeConfig
    from .drafting.copies import TextDrafts
    from .drafting.language_model import DraftModel
    from .heads.checkpoint import load_head, save_head
    from .heads.eagle import DraftHead
    from .hf import custom_generate
    from .loading.load import load
    from .loading.pair import EagleModel
    from .options.generate import GenerateOptions
    from .options.load import LoadOptions
else:
    __getattr__, __dir__ = lazy_names(__name__, {
        **dict.fromkeys(("RULES", "FuzzyRule", "GatingRule", "Nodes", "Rule", "TokenWeights", "Weights", "make_rule"),
                        "acceptance"),
        "generate": "api",
        "Chat": "chat",
        "Session": "decoding.batch",
        **dict.fromkeys(("Output", "Receipt", "Stats"), "decoding.output"),
        **dict.fromkeys(("load_head", "save_head"), "heads.checkpoint"),
        "DraftHead": "heads.eagle",
        "custom_generate": "hf",
        "LoadOptions": "options.load",
        "load": "loading.load",
        "GenerateOptions": "options.generate",
        "EagleModel": "loading.pair",
        "Engine": "batching.engine",
        **dict.fromkeys(("EngineClosed", "Piece", "QueueFull", "Ticket"), "batching.tickets"),
        "DraftModel": "drafting.language_model",
        "TextDrafts": "drafting.copies",
        "TreeConfig": "drafting.config",
    })
