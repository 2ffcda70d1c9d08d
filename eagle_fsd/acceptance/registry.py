"""The rules by name, and rules made from names and options."""

from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module

from . import RULE_CLASSES
from .rule import Custom, Rule

RULES: dict[str, type[Rule]] = {
    name: getattr(import_module(f".{name}", __package__), rule) for name, rule in RULE_CLASSES.items()
}


def make_rule(
    rule: str | Rule | Callable,
    threshold: float | None = None,
    divergence: str | None = None,
    **options: object,
) -> Rule:
    """A validated rule.

    Args:
        rule: a name in `RULES`; a rule, returned with the given options replaced; or a function from a
            `Verification` to a `Decision` or to log-weights [B, N, V], which takes no options.
        threshold: the rule's dial; None keeps the default 0 (or the given rule's own).
        divergence: for rules that gate on one; None keeps the default.
        options: the rule's other fields, such as `head_guard` or `sibling`.

    Raises:
        ValueError: unknown name or option, or a value out of range.
        TypeError: a value of the wrong type.
    """
    given = {"threshold": threshold, "divergence": divergence}
    options |= {name: value for name, value in given.items() if value is not None}
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; accepted: {', '.join(RULES)}, a rule or a function")
        _check_options(RULES[rule], options)
        return RULES[rule](**options)
    if isinstance(rule, Rule):
        _check_options(type(rule), options)
        return replace(rule, **options)
    if isinstance(rule, type) or not callable(rule):
        raise TypeError(f"a rule is a name, a rule or a function, got {rule!r}")
    if options:
        raise ValueError(f"a function as rule takes no options, got {', '.join(options)}")
    return Custom(function=rule)


def _check_options(rule: type[Rule], options: dict[str, object]) -> None:
    accepted = [field.name for field in fields(rule)]
    for name in options:
        if name not in accepted:
            raise ValueError(f"rule {rule.name!r} has no option {name!r}; accepted: {', '.join(accepted)}")
