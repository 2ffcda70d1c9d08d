"""The model `eagle_fsd` of lm-evaluation-harness.

    python -m eagle_fsd.lm_eval --model eagle_fsd --model_args target=T,draft=D,acceptance=fsd,threshold=0.2 \\
        --tasks gsm8k

takes the arguments of `lm_eval`; versions after 0.4.13 find the model themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor

from .drafting.config import TreeConfig
from .hf import custom_generate
from .load_options import LoadOptions
from .loading import load
from .options import GenerateOptions

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    missing = "lm-evaluation-harness is not installed: pip install 'eagle_fsd[lm_eval]'"
    if __name__ == "__main__":
        sys.exit(f"eagle_fsd.lm_eval: {missing}")
    raise ImportError(missing) from error

LOADING = [name for name in LoadOptions.names() if name != "quantization_config"]  # its `tree` is that of `load`
DECODING = ["acceptance", "threshold", "divergence", "head_guard", "budget"]
# Arguments of the harness' own `hf` model that mean the same here.
HARNESS = ["batch_size", "max_batch_size", "tokenizer", "use_fast_tokenizer", "max_length", "add_bos_token",
           "prefix_token_id", "truncation", "logits_cache", "softmax_dtype", "think_end_token", "enable_thinking",
           "chat_template_args"]
SMALLEST = TreeConfig(2, 1, 1)  # where decoding without drafts would be faster: `custom_generate` always drafts


def sort_arguments(given: Mapping[str, object]) -> tuple[dict[str, object], GenerateOptions, dict[str, object]]:
    """`--model_args`, checked as far as it goes without the models: those of `load`, of all requests, of `HFLM`.

    Raises:
        ValueError, TypeError: an unknown argument, or a bad value.
    """
    if "pretrained" in given:
        raise ValueError("the model eagle_fsd takes target= (and draft=), not pretrained=")
    accepted = [*LOADING, *DECODING, *HARNESS]
    unknown = [name for name in given if name not in accepted]
    if unknown:
        raise ValueError(f"unknown model_args {', '.join(unknown)}; accepted: {', '.join(accepted)}")
    loading, decoding, harness = ({name: given[name] for name in names if given.get(name) is not None}
                                  for names in (LOADING, DECODING, HARNESS))
    loading |= {name: str(loading[name]) for name in ("target", "draft") if name in loading}  # "7" was read as a number
    if "tree" in given:
        loading["tree"] = tree_of(given["tree"])
    if decoding.get("head_guard") == "none":
        decoding["head_guard"] = None
    LoadOptions(**loading)
    return loading, GenerateOptions(**decoding), harness


def tree_of(tree: object) -> TreeConfig | str | None:
    """The `tree` of `load`; a list such as [16, 5, 4] or [16, 5, 4, 0.5] holds the fields of a `TreeConfig`."""
    if tree in (None, "none"):
        return None
    if tree == "auto" or isinstance(tree, TreeConfig):
        return tree
    try:
        return TreeConfig(*tree)
    except (TypeError, ValueError) as error:
        raise ValueError("tree must be auto, none or [total_tokens,depth,top_k] with a draft temperature or without, "
                         f"got {tree!r} ({error})") from error


class EagleLM(HFLM):
    """The harness' `hf` model with another decoder: its tokenisation, prompts, stop handling, cache and scoring stay.

    Answers are drafted and verified; log-likelihoods are the target's alone, as `hf` computes them.

    Args:
        given: `--model_args`, `--device` and `--batch_size`; see `sort_arguments`.

    Raises:
        ValueError, TypeError: an unknown argument or a bad value.
    """

    def __init__(self, **given: object) -> None:
        loading, self.decoding, harness = sort_arguments(given)
        self.pair = load(**loading)
        super().__init__(
            self.pair.target.model, trust_remote_code=loading.get("trust_remote_code", False), **harness)
        limit = self.pair.target.max_positions
        if limit is not None and self.max_length > limit:
            raise ValueError(f"max_length {self.max_length} exceeds the target's {limit} positions")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs) -> Tensor:
        """The call that `hf` would make, decoded by `custom_generate`: [B, L] -> [B, L + new tokens]."""
        return super()._model_generate(
            context, max_length, stop, custom_generate=custom_generate, draft=self.pair.draft,
            acceptance=self.decoding.rule, budget=self.decoding.budget, tree=self.pair.default_tree,
            **generation_kwargs)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    import eagle_fsd.lm_eval  # noqa: F401  # registers the class of the module, which this run of the file is not

    cli_evaluate()
else:
    register_model("eagle_fsd")(EagleLM)
