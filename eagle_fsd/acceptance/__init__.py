"""Acceptance rules: which drafted tokens a cycle accepts.

A rule is a frozen dataclass with a `threshold`. At each level of the walk it gets the rows' current `Nodes` and returns
`Weights`, from which the walk draws. A new rule is one file and one line in `RULE_CLASSES`.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names

RULE_CLASSES = {  # module -> class; the module's name is the rule's
    "exact": "Exact",
    "fsd": "FSD",
    "fsd_paper": "FSDPaper",
    "typical": "Typical",
    "lenience": "Lenience",
    "relaxed": "Relaxed",
}

if TYPE_CHECKING:  # the public names: type checkers read them here, and so does `lazy_names`
    from .nodes import Nodes as Nodes
    from .nodes import TokenWeights as TokenWeights
    from .nodes import Weights as Weights
    from .registry import RULES as RULES
    from .registry import make_rule as make_rule
    from .rule import FuzzyRule as FuzzyRule
    from .rule import GatingRule as GatingRule
    from .rule import Rule as Rule
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
