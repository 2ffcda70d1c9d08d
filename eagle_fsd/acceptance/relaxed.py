"""Relaxed acceptance."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..utils.checks import require_integer
from .nodes import Nodes
from .rule import GatingRule


@dataclass(frozen=True)
class Relaxed(GatingRule):
    """Accept a child among the target's top N if its log-probability is within T of the best.

    TensorRT-LLM calls this relaxed acceptance; N is its `relaxed_topk` and T its `relaxed_delta` (10 and 0.6 in its
    setup of DeepSeek-R1).

    Args:
        threshold: T >= 0 in nats. At 0 greedy decoding is lossless; when sampling, the target's best token may still be
            accepted where the target drew another.
        top: N >= 1; tokens as probable as the N-th count too.
        head_guard: see `FuzzyRule`.
    """

    name: ClassVar[str] = "relaxed"

    top: int = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("top", self.top, 1)

    def is_lossless(self, greedy: bool) -> bool:
        return greedy and self.threshold == 0

    def gate(self, nodes: Nodes) -> tuple[Tensor, None]:
        best = nodes.raw.topk(min(self.top, nodes.raw.shape[-1]), dim=-1).values  # [B, N]
        # p, the target: log p(top-1) - log p(x) <= T and x among the top N; a common normaliser cancels
        bar = best[:, -1].maximum(best[:, 0] - nodes.threshold.float())
        return nodes.raw.gather(1, nodes.tokens) >= bar[:, None], None
