"""Relaxed acceptance."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..checks import check_choice
from .rule import GatingRule
from .verification import Verification


@dataclass(frozen=True)
class Relaxed(GatingRule):
    """Allow a child among the target's top N whose log-probability is within T of the best.

    "Relaxed acceptance" in TensorRT-LLM, where N is `relaxed_topk` and T `relaxed_delta` (10 and 0.6 in its setup of
    DeepSeek-R1). With N = 2 and T = -ln of a ratio it is MARS (arXiv 2601.15498) on probabilities: the second best
    token will do where p2 / p1 is above the ratio. The paper states it on raw logits, whose ratio changes with a
    constant added to all of them.

    Args:
        threshold: T >= 0 in nats. At 0 greedy decoding is lossless; sampling may still descend to the
            target's best token where it drew another.
        top: N >= 1; ties with the N-th count.
        sibling: among allowed children the one the "target" prefers, or the "longest" path, see `restrict`.
    """

    name: ClassVar[str] = "relaxed"
    reads_draft: ClassVar[bool] = False
    gate_default: ClassVar[float] = 0.6
    threshold_scale: ClassVar[float] = 4.0
    siblings: ClassVar[tuple[str, ...]] = ("target", "longest")

    top: int = field(default=10, kw_only=True)
    sibling: str = field(default="target", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.top, bool) or not isinstance(self.top, int):
            raise TypeError(f"top must be an integer, got {self.top!r}")
        if self.top < 1:
            raise ValueError(f"top must be at least 1, got {self.top}")
        check_choice("sibling", self.sibling, self.siblings)

    def is_lossless(self, greedy: bool) -> bool:
        return greedy and self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        target_logits = verification.target_logits
        best = target_logits.topk(min(self.top, target_logits.shape[-1]), dim=-1).values  # [B, N, top]
        # log p(top-1) - log p(x) <= T and x among the top N; a common normaliser cancels
        bar = best[..., -1].maximum(best[..., 0] - self.threshold)
        return verification.of_step(target_logits) >= verification.of_parent(bar)
