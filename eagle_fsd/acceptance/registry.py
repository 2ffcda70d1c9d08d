"""The rules by name, and `make_rule`."""

from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module

from ..utils.checks import OptionError
from . import RULE_CLASSES
from .rule import REMOVED_RULES, Custom, Rule

RULES: dict[str, type[Rule]] = {
    name: getattr(import_module(f".{name}", __package__), rule) for name, rule in RULE_CLASSES.items()
}


def make_rule(
    rule: str | Rule | Callable,
    threshold: float | None = None,
    divergence: str | None = None,
    **options: object,
) -> Rule:
    """Make a rule from its name and options.

    Args:
        rule: a name in `RULES`; a rule, whose options are replaced; or a function from the `Nodes` of one row to
            `Weights`, `TokenWeights` or log-weights [V], which takes no options.
        threshold: None: the rule's own, or the default 0.
        divergence: for rules that compare distributions; None: the rule's own, or the default.
        options: the rule's other fields, such as `head_guard` or `top`.

    Raises:
        ValueError: an unknown name or option, or a value out of range.
        TypeError: a value of the wrong type.
    """
    common = {"threshold": threshold, "divergence": divergence}
    options |= {name: value for name, value in common.items() if value is not None}
    known = RULES.get(rule) if isinstance(rule, str) else rule
    if options.get("head_guard", 0) is None and not hasattr(known, "head_guard"):
        del options["head_guard"]  # such a rule has no guard anyway
    if isinstance(rule, str):
        if rule not in RULES:
            problem = f"unknown rule {rule!r}"
            if rule in REMOVED_RULES:
                problem = f"rule {rule!r}, which was removed: use {REMOVED_RULES[rule]}"
            raise OptionError("acceptance", problem=f"names the {problem}; accepted: {', '.join(RULES)}, a rule or a "
                              "function")
        rule = RULES[rule]()
    elif not isinstance(rule, Rule):
        if isinstance(rule, type) or not callable(rule):
            raise TypeError(f"a rule is a name, a rule or a function, got {rule!r}")
        if options:
            raise ValueError(f"a function as rule takes no options, got {', '.join(options)}")
        return Custom(function=rule)
    accepted = [field.name for field in fields(rule)]
    for name in options:
        if name not in accepted:
            raise ValueError(f"rule {rule.name!r} has no option {name!r}; accepted: {', '.join(accepted)}")
    return replace(rule, **options)
