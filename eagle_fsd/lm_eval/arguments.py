"""`--model_args` of the model `eagle_fsd`: checked, and sorted by who takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..acceptance import make_rule
from ..drafting.config import TreeConfig
from ..options import AcceptanceOptions, LoadOptions, names_of

# Those of one process, without what is no text; `tree` is that of `load`.
LOADING = [name for name in names_of(LoadOptions) if name not in ("tp_plan", "quantization_config", "compile")]
DECODING = [name for name in names_of(AcceptanceOptions) if name != "tree"]
# Arguments of the harness' own `hf` model that mean the same here.
HARNESS = (
    "batch_size", "max_batch_size", "tokenizer", "use_fast_tokenizer", "max_length", "add_bos_token",
    "prefix_token_id", "truncation", "logits_cache", "softmax_dtype", "think_end_token", "enable_thinking",
    "chat_template_args",
)


@dataclass(frozen=True)
class Arguments:
    """loading: for `eagle_fsd.load`; decoding: of all requests; harness: for the harness' `HFLM`."""

    loading: dict[str, object]
    decoding: AcceptanceOptions
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
        loading["tree"] = tree_of_argument(given["tree"])
    LoadOptions(**loading)
    if not isinstance(decoding.get("acceptance", ""), str):
        raise TypeError(f"acceptance must be the name of a rule, got {decoding['acceptance']!r}")
    if isinstance(decoding.get("gate_threshold"), str):
        decoding["gate_threshold"] = dials_of_argument(decoding["gate_threshold"])
    accepting = AcceptanceOptions(**decoding)
    make_rule(**accepting.rule)
    return Arguments(loading, accepting, harness)


def dials_of_argument(text: str) -> float | list[float]:
    """The `gate_threshold` that a text such as "0.5" or "[0.5, 2]" says.

    Raises:
        ValueError: it says none.
    """
    try:
        value = json.loads(text)
        return [float(dial) for dial in value] if isinstance(value, list) else float(value)
    except (ValueError, TypeError):
        raise ValueError(f"gate_threshold must be a number or a list of them such as [0.5, 2], got {text!r}") from None


def tree_of_argument(tree: object) -> TreeConfig | str | None:
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
