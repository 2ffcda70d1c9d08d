"""The options of a request, checked against the pair that decodes it."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real

from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .acceptance import Rule, make_rule
from .engine.sampling import require_integer
from .models.parallel import of_first
from .pair import EagleModel
from .prompts import check_ids, encodable, need_tokenizer
from .trees.config import Choice, TreeConfig

log = logging.getLogger(__name__)


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends the streamer also where decoding fails: who reads it in another thread would wait for ever.

    Raises:
        TypeError: it is no streamer.
    """
    check_streamer(streamer)
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def ends_streamer(function: Callable) -> Callable:
    """The function, inside `ending` for its keyword `streamer`."""

    @functools.wraps(function)
    def wrapped(*args, streamer: BaseStreamer | None = None, **options):
        with ending(streamer):
            return function(*args, streamer=streamer, **options)

    return wrapped


def resolve_rule(
    acceptance: object, threshold: float | None, divergence: str | None, model: EagleModel, *, temperature: float,
    tree: TreeConfig | None, shaped: bool = False,
) -> Rule:
    """The rule of these options; without a threshold the head's calibrated one, else the lossless end.

    Args:
        shaped: whether more than the temperature shapes the distribution: no threshold was calibrated for that.
    """
    if threshold is None and acceptance == "fsd" and not shaped:
        threshold = model.default_threshold(divergence or "js", temperature, tree)
        if threshold is None:
            log.info("no threshold given and none calibrated for this head: decoding losslessly (threshold 0)")
    return warn_of_infinity(make_rule(acceptance, threshold=threshold, divergence=divergence), model)


def warn_of_infinity(rule: Rule, model: EagleModel) -> Rule:
    """The rule, with a warning where its divergence is infinite because the draft cannot name every token."""
    divergence = getattr(rule, "divergence", None)
    if divergence in ("kl", "js_fsd_code") and model.draft is not None:
        if rule.threshold > 0 and model.draft.draft_vocab_size < model.target.vocab_size:
            log.warning("%s is infinite with a draft that names %d of %d tokens: nothing passes; take js, tv or "
                        "reverse_kl", divergence, model.draft.draft_vocab_size, model.target.vocab_size)
    return rule


def check_seed(seed: object) -> int:
    require_integer("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return int(seed)


def check_seeds(seed: object, count: int) -> list[int]:
    """One for each prompt, drawn where none is given."""
    if seed is None:
        return [random.SystemRandom().getrandbits(48) for _ in range(count)]
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise ValueError(f"a list of seeds needs one for each prompt: {count}, got {len(seed)}")
        return [check_seed(each) for each in seed]
    return [check_seed(check_seed(seed) + number) for number in range(count)]


def check_streamer(streamer: object) -> None:
    """Raise unless it is None or has the methods of the streamers of `transformers`."""
    if streamer is not None and not (callable(getattr(streamer, "put", None))
                                     and callable(getattr(streamer, "end", None))):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")


def check_budget(budget: float | None, rule: Rule, greedy: bool) -> float | None:
    """The budget, refused where the rule's cost cannot be known."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"budget must be a number of nats, got {budget!r}")
    if not budget >= 0:
        raise ValueError(f"budget must be at least 0 nats, got {budget!r}")
    if not greedy and not rule.knows_kl:
        raise ValueError(f"a budget needs a rule whose KL is known when sampling; that of {rule!r} is not")
    return float(budget)


def resolve_tree(
    tree: TreeConfig | None, rule: Rule, temperature: float, model: EagleModel, rows: int = 1
) -> Choice:
    """The tree given, else the one chosen for the rule, temperature and batch, else the model's default."""
    if tree is None and model.trees is not None and model.draft is not None:
        return model.trees.of(rule, temperature, rows)
    return Choice(check_tree(model.default_tree if tree is None else tree, model))


def check_tree(tree: TreeConfig, model: EagleModel) -> TreeConfig:
    """The tree, with a warning where it asks for more nodes than can be scored."""
    if not isinstance(tree, TreeConfig):
        raise TypeError(f"tree must be a TreeConfig or None (what load(tree=...) said), got {tree!r}")
    vocabulary = model.target.vocab_size if model.draft is None else model.draft.draft_vocab_size
    if tree.top_k > vocabulary:
        raise ValueError(f"TreeConfig.top_k {tree.top_k} exceeds the draft's vocabulary ({vocabulary} tokens)")
    if tree.total_tokens > tree.nodes:
        log.warning(
            "TreeConfig.total_tokens lowered from %d to %d: depth %d with top_k %d scores no more nodes",
            tree.total_tokens, tree.nodes, tree.depth, tree.top_k,
        )
    return tree


def check_stop_strings(stop: str | Sequence[str] | None, model: EagleModel) -> list[str]:
    if not (stop is None or isinstance(stop, (str, list, tuple))):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    for string in stops:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}")
        encodable("stop", string)
    if stops:
        need_tokenizer(model)
    return stops


def check_stop_ids(stop_token_ids: Sequence[int] | None, model: EagleModel) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset()
    if not isinstance(stop_token_ids, Iterable) or isinstance(stop_token_ids, (str, bytes)):
        raise TypeError(f"stop_token_ids must be a sequence of token ids, got {stop_token_ids!r}")
    ids = list(stop_token_ids)
    for token in ids:
        require_integer("stop_token_ids", token, 0)
    return frozenset(check_ids(ids, model)) if ids else frozenset()


def agreed_criteria(criteria: Sequence[Callable], model: EagleModel) -> StoppingCriteriaList:
    """Criteria that say in all processes what they say in the first: some go by a clock, or by Ctrl-C."""
    group = model.target.group

    def agreed(criterion: Callable) -> Callable:
        return lambda ids, scores: of_first(group, lambda: criterion(ids, scores))

    return StoppingCriteriaList(criteria if group is None else map(agreed, criteria))
