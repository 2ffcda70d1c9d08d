"""A learned gate: what is known of a substitution against what such substitutions have done to answers.

B batch, N tree nodes verified (root included), F width of the target's features, D its hidden size, S signals.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .rule import GatingRule, preferred
from .verification import Verification

SIGNALS = ("log_prob", "regret", "entropy", "draft_log_prob", "js")


def step_signals(verification: Verification) -> Tensor:  # [B, N, S]
    """`SIGNALS` of each step, in nats, all of raw logits; of the root's, which has no step, not to be read.

    Of the step's token x: log p(x) and max z - z(x) of the target, log q(x) of the draft. Of its parent: the target's
    entropy, and the Jensen-Shannon divergence of target and draft.
    """
    raw = verification.target_logits
    log_probs = raw.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).nan_to_num(nan=0.0).sum(-1)  # 0 * log 0 = 0
    draft = verification.of_step(verification.node_draft_logits.log_softmax(-1))
    return torch.stack([
        verification.of_step(log_probs),
        verification.of_parent(raw.amax(-1)) - verification.of_step(raw),
        verification.of_parent(entropy),
        draft,
        verification.of_parent(verification.divergence("js")),
    ], -1)


@dataclass(frozen=True, eq=False)
class LearnedJudge:
    """A logistic regression on the target's feature at a node (its last layer) and on `SIGNALS`, standardised.

    Args:
        weight, mean, scale: [D + S] float32. bias: a number.
        card: how it was made. In it `target` and `head`, digests of what it belongs to, and `floor`, see there.
    """

    weight: Tensor
    mean: Tensor
    scale: Tensor
    bias: float
    card: dict

    @property
    def width(self) -> int:
        """D."""
        return len(self.weight) - len(SIGNALS)

    @property
    def floor(self) -> float:
        """Least probability of a substitute, in those of the target's best token, that was mined."""
        return self.card["floor"]

    def harm(
        self,
        features: Tensor,  # [..., F], which end with the last layer
        signals: Tensor,  # [..., S]
    ) -> Tensor:  # [...]
        """The probability that taking the node's token changes what the answer comes to."""
        known = torch.cat([features[..., -self.width :].float(), signals.float()], -1)
        weight, mean, scale = (part.to(known.device) for part in (self.weight, self.mean, self.scale))
        return (((known - mean) / scale) @ weight + self.bias).sigmoid()


@dataclass(frozen=True)
class Judge(GatingRule):
    """Allow a child whose judged probability of harm is below T (after AutoJudge, arXiv 2504.20039).

    Of a node's children only the target's most likely is judged, whatever the dial, the noise and the processors, and
    only if it has at least `floor` times the probability of the target's best token: that is what the judge has seen,
    in greedy decoding. It is learned from mined examples (`python -m train.mine`, `python -m train.judge`) and stored
    beside the head; decoding with the pair of that head finds it there.

    Args:
        threshold: T in [0, 1]; 0 is lossless. Strictly below: at 1 all passes that is not surely harm.
        learned: the judge; None: that beside the head.
    """

    name: ClassVar[str] = "judge"
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, True)
    reads_features: ClassVar[bool] = True

    learned: LearnedJudge | None = field(default=None, kw_only=True, repr=False)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        if self.learned is None:
            raise ValueError("rule 'judge' is decoded with a pair whose head has a judge, and was asked without one")
        harm = self.learned.harm(verification.features, step_signals(verification))  # [B, N]
        steps = verification.of_step(verification.target_logits)
        seen = steps - verification.of_parent(verification.target_logits.amax(-1)) >= math.log(self.learned.floor)
        best = preferred(verification, self.candidates(verification), steps)
        return best & seen & (harm < self.threshold)  # P(harm) < T
