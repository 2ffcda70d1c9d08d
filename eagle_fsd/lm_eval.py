"""The model `eagle_fsd` of lm-evaluation-harness.

    python -m eagle_fsd.lm_eval --model eagle_fsd --model_args target=T,draft=D,acceptance=fsd,threshold=0.2 \\
        --tasks gsm8k

takes the arguments of `lm_eval`. With versions after 0.4.13 the command `lm_eval` finds the model, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor

from .drafting.config import TreeConfig
from .hf import custom_generate
from .loading.load import load
from .options.generate import GenerateOptions
from .options.load import LoadOptions
from .utils.installation import install_command

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    missing = f"lm-evaluation-harness is not installed: {install_command('lm_eval')}"
    if __name__ == "__main__":
        sys.exit(f"eagle_fsd.lm_eval: {missing}")
    raise ImportError(missing) from error

LOADING = [name for name in LoadOptions.declared if name != "quantization_config"]
DECODING = ["acceptance", "threshold", "divergence", "head_guard", "budget"]
# Arguments of the harness' own `hf` model, with the same meaning.
HARNESS = ["batch_size", "max_batch_size", "tokenizer", "use_fast_tokenizer", "max_length", "add_bos_token",
           "prefix_token_id", "truncation", "logits_cache", "softmax_dtype", "think_end_token", "enable_thinking",
           "chat_template_args"]


def sort_arguments(arguments: Mapping[str, object]) -> tuple[dict[str, object], GenerateOptions, dict[str, object]]:
    """Split `--model_args` into those of `load`, of all requests, and of `HFLM`, and validate them.

    Raises:
        ValueError, TypeError: an unknown argument or an invalid value.
    """
    if "pretrained" in arguments:
        raise ValueError("the model eagle_fsd takes target= and draft=, not pretrained=")
    accepted = [*LOADING, *DECODING, *HARNESS]
    unknown = [name for name in arguments if name not in accepted]
    if unknown:
        raise ValueError(f"unknown model_args {', '.join(unknown)}; accepted: {', '.join(accepted)}")
    loading, decoding, harness = (
        {name: arguments[name] for name in names if arguments.get(name) is not None}
        for names in (LOADING, DECODING, HARNESS))
    # The harness reads a name such as "7" as a number.
    loading |= {name: str(loading[name]) for name in ("target", "draft") if name in loading}
    if "tree" in arguments:
        loading["tree"] = tree_of(arguments["tree"])
    if decoding.get("head_guard") == "none":
        decoding["head_guard"] = None
    LoadOptions(**loading)
    return loading, GenerateOptions(**decoding), harness


def tree_of(tree: object) -> TreeConfig | str | None:
    """The `tree` of `load`, from "auto", "none", or the fields of a `TreeConfig` as a list such as [16, 5, 4]."""
    if tree in (None, "none"):
        return None
    if tree == "auto" or isinstance(tree, TreeConfig):
        return tree
    try:
        return TreeConfig(*tree)
    except (TypeError, ValueError) as error:
        raise ValueError("tree must be auto, none or [total_tokens,depth,top_k], optionally with a draft temperature, "
                         f"got {tree!r} ({error})") from error


class EagleLM(HFLM):
    """The harness' `hf` model with speculative decoding; tokenisation, prompts, stops, cache and scoring stay its own.

    Answers are drafted and verified; log-likelihoods are the target's alone, as in `hf`.

    Args:
        arguments: `--model_args`, `--device` and `--batch_size`; see `sort_arguments`.

    Raises:
        ValueError, TypeError: an unknown argument or an invalid value.
    """

    def __init__(self, **arguments: object) -> None:
        loading, self.decoding, harness = sort_arguments(arguments)
        self.pair = load(**loading)
        super().__init__(
            self.pair.target.model, trust_remote_code=loading.get("trust_remote_code", False), **harness)
        limit = self.pair.target.max_positions
        if limit is not None and self.max_length > limit:
            raise ValueError(f"max_length {self.max_length} exceeds the target's {limit} positions")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs) -> Tensor:
        """As `hf`, with `custom_generate` as the decoder: [B, L] -> [B, L + new tokens]."""
        return super()._model_generate(
            context, max_length, stop, custom_generate=custom_generate, draft=self.pair.draft,
            acceptance=self.decoding.rule, budget=self.decoding.budget, tree=self.pair.default_tree,
            **generation_kwargs)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    import eagle_fsd.lm_eval  # noqa: F401  # registers the class under the module's name; this file runs as __main__

    from .cli.exits import escape_unencodable

    escape_unencodable()  # in the harness' tables
    cli_evaluate()
else:
    register_model("eagle_fsd")(EagleLM)
