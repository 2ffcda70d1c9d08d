"""The harness' `hf` model with another decoder: its tokenisation, prompts, stop handling, cache and scoring stay."""

from __future__ import annotations

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..drafting.config import TreeConfig
from ..hf import custom_generate
from ..pair import load
from ..settings import resolve_rule, tree_chooser
from .arguments import sort_arguments

SMALLEST = TreeConfig(2, 1, 1)  # where plain decoding would be faster: `custom_generate` always drafts


@register_model("eagle_fsd")
class EagleLM(HFLM):
    """Generates with draft trees; log-likelihoods are the target's alone, as `hf` computes them.

    Args:
        given: `--model_args`, `--device` and `--batch_size`; see `arguments`.

    Raises:
        ValueError, TypeError: an unknown argument or a bad value.
    """

    def __init__(self, **given: object) -> None:
        arguments = sort_arguments(given)
        self.pair = load(**arguments.loading)
        self.decoding = arguments.decoding
        self.decoding_at: dict[tuple[float, int], dict[str, object]] = {}  # by temperature and rows of the batch
        super().__init__(
            self.pair.target.model, trust_remote_code=arguments.loading.get("trust_remote_code", False),
            **arguments.harness,
        )
        limit = self.pair.target.max_positions
        if limit is not None and self.max_length > limit:
            raise ValueError(f"max_length {self.max_length} exceeds the target's {limit} positions")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs) -> Tensor:
        """The call that `hf` would make, decoded by `custom_generate`: [B, L] -> [B, L + new tokens]."""
        sampled = generation_kwargs.get("do_sample")
        temperature = float(generation_kwargs.get("temperature", 0.0)) if sampled else 0.0
        options = self._options(temperature, len(context))
        return super()._model_generate(
            context, max_length, stop, custom_generate=custom_generate, draft=self.pair.draft, **options,
            **generation_kwargs,
        )

    def _options(self, temperature: float, rows: int) -> dict[str, object]:
        """Rule, tree and budget of `custom_generate`: those that `eagle_fsd.generate` would take."""
        if (temperature, rows) not in self.decoding_at:
            rule = resolve_rule(self.decoding, self.pair, temperature)
            self.decoding_at[temperature, rows] = {
                "acceptance": rule, "budget": self.decoding.budget,
                "tree": tree_chooser(None, rule, temperature, self.pair)(rows).tree or SMALLEST,
            }
        return self.decoding_at[temperature, rows]
