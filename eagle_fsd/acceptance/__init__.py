"""Acceptance rules: which drafted tokens a cycle keeps.

A rule is a frozen dataclass with a `threshold` (its dial) that maps a `Verification` to a `Decision`; `walk`
turns the decision into the accepted path. A new rule is one file and one line in `RULE_CLASSES`.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

RULE_CLASSES = {  # module -> class; a rule is known by its module's name
    "exact": "Exact",
    "fsd": "FSD",
    "fsd_paper": "FSDPaper",
    "tilt": "Tilt",
    "typical": "Typical",
    "lenience": "Lenience",
    "fly": "FLy",
    "regret": "Regret",
    "judge": "Judge",
    "prose": "Prose",
    "afterword": "Afterword",
    "relaxed": "Relaxed",
}

if TYPE_CHECKING:
    from .decision import Decision, Walk, draw, walk
    from .gated import Gated
    from .registry import GATES, RULES, make_rule
    from .rule import Custom, FuzzyRule, GatingRule, Rule
    from .verification import ChildWeights, Verification

__all__ = [
    "GATES",
    "RULES",
    "ChildWeights",
    "Custom",
    "Decision",
    "FuzzyRule",
    "Gated",
    "GatingRule",
    "Rule",
    "Verification",
    "Walk",
    "draw",
    "make_rule",
    "walk",
]

__getattr__, __dir__ = lazy_names(__name__, {
    **dict.fromkeys(("Decision", "Walk", "draw", "walk"), "decision"),
    "Gated": "gated",
    **dict.fromkeys(("GATES", "RULES", "make_rule"), "registry"),
    **dict.fromkeys(("Custom", "FuzzyRule", "GatingRule", "Rule"), "rule"),
    **dict.fromkeys(("ChildWeights", "Verification"), "verification"),
})
