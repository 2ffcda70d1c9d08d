"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from .lazy import lazy_names

__version__ = "0.4.0"

__all__ = [
    "RULES",
    "Chat",
    "DraftHead",
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
    "TreeConfig",
    "Weights",
    "custom_generate",
    "generate",
    "load",
    "load_head",
    "make_rule",
    "save_head",
]

__getattr__, __dir__ = lazy_names(__name__, {
    **dict.fromkeys(("RULES", "FuzzyRule", "GatingRule", "Nodes", "Rule", "Weights", "make_rule"), "acceptance"),
    "generate": "api",
    "Chat": "chat",
    "Session": "engine.decoder",
    **dict.fromkeys(("Output", "Receipt", "Stats"), "engine.output"),
    **dict.fromkeys(("load_head", "save_head"), "heads.checkpoint"),
    "DraftHead": "heads.eagle",
    "custom_generate": "hf",
    **dict.fromkeys(("GenerateOptions", "LoadOptions"), "options"),
    **dict.fromkeys(("EagleModel", "load"), "pair"),
    "Engine": "serve.engine",
    **dict.fromkeys(("EngineClosed", "Piece", "QueueFull", "Ticket"), "serve.tickets"),
    "TextDrafts": "drafting.text",
    "TreeConfig": "drafting.config",
})
