"""Loose acceptance with a window of agreement."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..utils.checks import require_integer
from .nodes import Nodes
from .rule import GatingRule

BEST = 3  # tokens whose entropy is compared


@dataclass(frozen=True)
class Fly(GatingRule):
    """Accept a child where the target is uncertain, if the target then agrees with the draft on the next W tokens.

    FLy (arXiv 2511.22972) and vLLM's `rejection_sample_method="fly"`: the entropy of the target's three best tokens,
    -sum of p log p at temperature 1, not normalised, must reach a bar, and the W tokens drafted after the fuzzy one
    must be the target's own. A window that the path does not complete counts as rejected, so that only trees of more
    than W levels can gain; a chain of 15 suits the default W.

    Args:
        threshold: T in [0, 1] lowers the bar to 1 - T nats: 0 is lossless, 0.7 the published bar of 0.3, and 1 leaves
            the decision to the window.
        window: W >= 0; 6 as published, and 0 leaves the decision to the entropy.
        head_guard: see `FuzzyRule`; None as published.
    """

    name: ClassVar[str] = "fly"
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, True)

    window: int = field(default=6, kw_only=True)
    head_guard: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("window", self.window, 0)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def gate(self, nodes: Nodes) -> tuple[Tensor, None]:
        log_probs = nodes.raw.log_softmax(-1).topk(min(BEST, nodes.raw.shape[-1])).values  # [B, 3]
        entropy = -(log_probs.exp() * log_probs).nan_to_num(nan=0.0).sum(-1)  # 0 * log 0 = 0
        return (entropy >= 1 - nodes.threshold.float())[:, None], None
