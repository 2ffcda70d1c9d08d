"""The rules by name, and rules made from names and options."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module

from . import RULE_CLASSES
from .gated import Gated
from .rule import Custom, GatingRule, Rule

RULES: dict[str, type[Rule]] = {
    name: getattr(import_module(f".{name}", __package__), rule) for name, rule in RULE_CLASSES.items()
}
GATES = [name for name, rule in RULES.items() if issubclass(rule, GatingRule)]  # can stand before and behind a +


def make_rule(
    rule: str | Rule | Callable,
    threshold: float | None = None,
    divergence: str | None = None,
    gate_threshold: float | Sequence[float] | None = None,
    *,
    gates: Sequence[str | Rule] = (),
    **options: object,
) -> Rule:
    """A validated rule.

    Args:
        rule: a name in `RULES`, or several of `GATES` as in "fsd+fly": the first decides, the gates behind the + veto;
            a rule, returned with the given options replaced; or a function from a `Verification` to a `Decision` or to
            log-weights [B, N, V], which takes no options.
        threshold: the rule's dial, of several the first one's; None keeps the default 0 (or the given rule's own).
        divergence: for rules that gate on one, of several for each that does; None keeps the default.
        gate_threshold: the gate's dial, of several gates a list; None keeps the default (or the given rule's own).
        gates: more gates, by name or as rules that have options of their own.
        options: the rule's other fields, such as `head_guard` or `sibling`, of several the first one's.

    Raises:
        ValueError: unknown name or option, a value out of range, a rule that is no gate, or a gate without a dial.
        TypeError: a value of the wrong type.
    """
    if not isinstance(rule, (str, Rule)):
        given = {"threshold": threshold, "divergence": divergence, "gate_threshold": gate_threshold, **options}
        return _custom(rule, [name for name, value in given.items() if value is not None] + ["gates"] * bool(gates))
    (first, _), *behind = [*_parts(rule), *(part for gate in gates for part in _parts(gate))]
    if threshold is not None:
        options["threshold"] = threshold
    if divergence is not None:
        if hasattr(first, "divergence") or not any(hasattr(gate, "divergence") for gate, _ in behind):
            options["divergence"] = divergence
        behind = [(replace(gate, divergence=divergence) if hasattr(gate, "divergence") else gate, dial)
                  for gate, dial in behind]
    _check_options(first, options)
    first = replace(first, **options)
    if behind:
        return _gated(first, [gate for gate, _ in behind], gate_threshold, [dial for _, dial in behind])
    if gate_threshold is not None:
        raise ValueError(f"gate_threshold is the dial of a gate behind a +, and {first.name!r} has none")
    return first


def _custom(function: object, given: Sequence[str]) -> Custom:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"a rule is a name, a rule or a function, got {function!r}")
    if given:
        raise ValueError(f"a function as rule takes no options, got {', '.join(given)}")
    return Custom(function=function)


def _parts(rule: str | Rule) -> list[tuple[Rule, float | None]]:
    """The rules of a name or a rule, each with its dial as a gate; None where it is a name that has no default."""
    if isinstance(rule, Rule):
        return [(part, part.threshold) for part in rule.parts]
    if not isinstance(rule, str):
        raise TypeError(f"a gate is a rule's name or a rule, got {rule!r}")
    names = rule.split("+")
    for name in names:
        if name not in RULES:
            where = "" if name == rule else f" in {rule!r}"
            raise ValueError(f"unknown rule {name!r}{where}; accepted: {', '.join(RULES)}, a rule or a function")
    return [(RULES[name](), getattr(RULES[name], "gate_default", None)) for name in names]


def _gated(
    first: Rule, gates: Sequence[Rule], given: float | Sequence[float] | None, defaults: Sequence[float | None]
) -> Gated:
    """The rule with these gates at the dials that are given, else at their defaults."""
    name = "+".join(part.name for part in (first, *gates))
    for part in (first, *gates):
        if not isinstance(part, GatingRule):
            raise ValueError(f"rule {part.name!r} has no gate, so it cannot be part of {name!r}; rules that have one: "
                             f"{', '.join(GATES)}")
    dials = defaults
    if given is not None:
        dials = [*given] if isinstance(given, (list, tuple)) else [given]
    if len(dials) != len(gates):
        raise ValueError(f"gate_threshold needs one dial for each gate of {name!r}: {len(gates)}, got {given!r}")
    for gate, dial in zip(gates, dials, strict=True):
        if dial is None:
            raise ValueError(f"the gate {gate.name!r} of {name!r} has no default: give gate_threshold")
    gates = tuple(replace(gate, threshold=dial) for gate, dial in zip(gates, dials, strict=True))
    return Gated(first.threshold, rule=first, gates=gates)


def _check_options(rule: Rule, options: dict[str, object]) -> None:
    accepted = [field.name for field in fields(rule)]
    for name in options:
        if name not in accepted:
            raise ValueError(f"rule {rule.name!r} has no option {name!r}; accepted: {', '.join(accepted)}")
