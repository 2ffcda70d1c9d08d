"""A small causal LM as the drafter: speculative decoding with a draft model (arXiv 2211.17192, 2302.01318), on trees.

B batch, N tokens of a forward, D hidden size of the draft model, R rows of its vocabulary that the target has, too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.cache import BucketCache, TreeCache
from ..models.target import CausalLM, TargetModel
from ..utils.text import token_difference
from .drafter import Drafter

PADDING = 128  # rows by which one vocabulary may be padded further than another: Qwen2.5 has 151,936 or 152,064


class DraftModel(CausalLM, Drafter):
    """A causal LM that drafts for a larger one with the same tokens.

    It reads the text alone, in a cache of its own. Its dtype, device and packing are its own as well.

    Args:
        tokenizer: compared with the target's; None: unknown.
        fused: see `CausalLM`.

    Attributes:
        max_positions: where a text is longer, nothing is drafted. With a rotary embedding of two kinds (Phi-3), the
            length of short texts.

    Raises:
        ValueError: see `CausalLM`; a draft model has to compute trees, too.
    """

    noun, kind = "a causal LM", "causal LM"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, fused: bool = True
    ) -> None:
        super().__init__(model, fused=fused)
        self.tokenizer, self.draft_vocab_size = tokenizer, self.vocab_size
        self.max_positions = self.position_limit(1)

    def fit(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Draft for this target: logits are those of the common rows, since vocabularies are padded differently.
        A `separate` copy can draft for another target.

        Args:
            tokenizer: the target's; None: unknown.

        Raises:
            ValueError: the target has other tokens: by the tokenizers if both are known, else by the sizes of the
                vocabularies.
        """
        problem = None
        if tokenizer is not None and self.tokenizer is not None:
            problem = token_difference(tokenizer, self.tokenizer)
        elif abs(self.vocab_size - target.vocab_size) > PADDING:
            problem = f"its vocabulary size is {self.vocab_size}, the target's is {target.vocab_size}"
        if problem is not None:
            raise ValueError(f"the draft model does not fit the target: {problem}; accepted: a causal LM with the "
                             "target's tokenizer")
        self.draft_vocab_size = min(self.vocab_size, target.vocab_size)

    @property
    def module(self) -> PreTrainedModel:
        return self.model

    def refresh_for(self, target: TargetModel) -> None:
        self.refresh()

    def pack_for(self, target: TargetModel, form: str | None) -> None:
        self.pack(draft_form(form))

    def predict(
        self,
        states: Tensor | None,  # not read
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        ancestors: Tensor | None,  # [B, N, M] bool
        cache: TreeCache | BucketCache,
    ) -> Tensor:  # [B, N, D]
        """Last hidden states, on the device of the tokens."""
        place = self.input_device
        known = tokens.clamp_max(self.vocab_size - 1)  # the target may have more rows, of padding
        seen = None if ancestors is None else ancestors.to(place)
        return self.verify(known.to(place), positions.to(place), seen, cache).to(tokens.device)

    def own_logits(
        self,
        states: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # not called
    ) -> Tensor:  # [..., R] float32
        """Logits of its own output layer."""
        return self.logits(states.to(self.output_device))[..., : self.draft_vocab_size].to(states.device)


def draft_form(quantization: str | None) -> str | None:
    """In place of "int8" the fast form: what a drafter computes is verified, so its last bits do not matter."""
    return "int8-fast" if quantization == "int8" else quantization
