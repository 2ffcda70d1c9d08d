"""EAGLE-2 speculative decoding with fuzzy acceptance, on stock `transformers` models."""

from typing import TYPE_CHECKING

from .utils.lazy import lazy_names

__version__ = "0.5.0.dev0"

if TYPE_CHECKING:  # the public names: type checkers read them here, and so does `lazy_names`
    from .acceptance import RULES as RULES
    from .acceptance import FuzzyRule as FuzzyRule
    from .acceptance import GatingRule as GatingRule
    from .acceptance import Nodes as Nodes
    from .acceptance import Rule as Rule
    from .acceptance import TokenWeights as TokenWeights
    from .acceptance import Weights as Weights
    from .acceptance import make_rule as make_rule
    from .api import generate as generate
    from .batching.engine import Engine as Engine
    from .batching.tickets import EngineClosed as EngineClosed
    from .batching.tickets import Piece as Piece
    from .batching.tickets import QueueFull as QueueFull
    from .batching.tickets import Ticket as Ticket
    from .chat import Chat as Chat
    from .decoding.batch import Session as Session
    from .decoding.output import Output as Output
    from .decoding.output import Receipt as Receipt
    from .decoding.output import Stats as Stats
    from .drafting.config import TreeConfig as TreeConfig
    from .drafting.copies import TextDrafts as TextDrafts
    from .drafting.language_model import DraftModel as DraftModel
    from .heads.checkpoint import load_head as load_head
    from .heads.checkpoint import save_head as save_head
    from .heads.eagle import DraftHead as DraftHead
    from .hf import custom_generate as custom_generate
    from .loading.load import load as load
    from .loading.pair import EagleModel as EagleModel
    from .options.generate import GenerateOptions as GenerateOptions
    from .options.load import LoadOptions as LoadOptions
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
