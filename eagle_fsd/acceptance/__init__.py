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

__all__ = ["RULES", "RULE_CLASSES", "FuzzyRule", "GatingRule", "Nodes", "Rule", "TokenWeights", "Weights", "make_rule"]

if TYPE_CHECKING:
    from .nodes import Nodes, TokenWeights, Weights
    from .registry import RULES, make_rule
    from .rule import FuzzyRule, GatingRule, Rule
else:
    __getattr__, __dir__ = lazy_names(__name__, {
        **dict.fromkeys(("RULES", "make_rule"), "registry"),
        **dict.fromkeys(("FuzzyRule", "GatingRule", "Rule"), "rule"),
        **dict.fromkeys(("Nodes", "TokenWeights", "Weights"), "nodes"),
    })
