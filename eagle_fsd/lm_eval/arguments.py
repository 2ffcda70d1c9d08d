"""`--model_args` of the model `eagle_fsd`: checked, and sorted by who takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..acceptance import make_rule
from ..quality.promises import parse_promise
from ..settings import check_budget
from ..trees.config import TreeConfig

LOADING = (
    "target", "draft", "dtype", "device", "device_map", "attn_implementation", "trust_remote_code", "calibration",
    "tree",
)
DECODING = ("acceptance", "threshold", "divergence", "quality", "budget")
# Arguments of the harness' own `hf` model that mean the same here.
HARNESS = (
    "batch_size", "max_batch_size", "tokenizer", "use_fast_tokenizer", "max_length", "add_bos_token",
    "prefix_token_id", "truncation", "logits_cache", "softmax_dtype", "think_end_token", "enable_thinking",
    "chat_template_args",
)


@dataclass(frozen=True)
class Arguments:
    """loading: for `eagle_fsd.load`; decoding: as in `eagle_fsd.generate`; harness: for the harness' `HFLM`."""

    loading: dict[str, object]
    decoding: dict[str, object]
    harness: dict[str, object]


def sort_arguments(given: Mapping[str, object]) -> Arguments:
    """Check the arguments as far as it goes without the models.

    Raises:
        ValueError, TypeError: an unknown argument, or a bad value.
    """
    if "pretrained" in given:
        raise ValueError("the model eagle_fsd takes target= (and draft=), not pretrained=")
    accepted = (*LOADING, *DECODING, *HARNESS)
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise ValueError(f"unknown model_args {', '.join(unknown)}; accepted: {', '.join(accepted)}")
    loading, decoding, harness = ({name: given[name] for name in names if given.get(name) is not None}
                                  for names in (LOADING, DECODING, HARNESS))
    for name in ("target", "draft", "calibration"):
        if not isinstance(loading.get(name, ""), (str, Path)):
            raise TypeError(f"{name} must be a directory or hub id, got {loading[name]!r}")
    if "tree" in given:
        loading["tree"] = parse_tree(given["tree"])
    check_decoding(**decoding)
    return Arguments(loading, decoding, harness)


def check_decoding(
    acceptance: str = "fsd", threshold: float | None = None, divergence: str | None = None,
    quality: str | None = None, budget: float | None = None,
) -> None:
    """Refuse what no request could be decoded with.

    Raises:
        ValueError, TypeError: a bad rule, threshold, divergence, promise or budget.
    """
    if not isinstance(acceptance, str):
        raise TypeError(f"acceptance must be the name of a rule, got {acceptance!r}")
    if quality is not None:
        if acceptance != "fsd" or threshold is not None or divergence is not None:
            raise ValueError(f"quality={quality!r} chooses the rule and its options: leave acceptance, threshold and "
                             "divergence out")
        parse_promise(quality)
    check_budget(budget, make_rule(acceptance, threshold, divergence), greedy=True)


def parse_tree(tree: object) -> TreeConfig | str | None:
    """The `tree` of `eagle_fsd.load`; a list such as [16, 5, 4] or [16, 5, 4, 0.5] holds the fields of a `TreeConfig`.

    Raises:
        ValueError: no such tree.
    """
    if tree in (None, "none"):
        return None
    if tree == "auto" or isinstance(tree, TreeConfig):
        return tree
    try:
        return TreeConfig(*tree)
    except (TypeError, ValueError) as error:
        raise ValueError("tree must be auto, none or [total_tokens,depth,top_k] with a draft temperature or without, "
                         f"got {tree!r} ({error})") from error
