"""What a draft head is trained to minimise.

T tokens of a pack of texts, N positions that predict (`unrolling`), M learned ones among them, C those whose
distributions are compared, D hidden size, F width of the target's features (`TargetModel`), V target vocabulary, R
draft vocabulary (R = V by default). p is the target's next-token distribution, q the head's.

Training unrolls the head as decoding does. One step is the published EAGLE-1/2 training. Several steps are HASS or,
without feature regression, the training of EAGLE-3. Logits [C, R] never exist as a whole: they are computed in chunks
of positions (`InChunks`).

With a reduced draft vocabulary, p and q are distributions over its R tokens, as in EAGLE-3's training. Positions whose
token is not in it are skipped, and the rest of the target's output layer is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn

from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.utils.checks import require_integer, require_number

from .unrolling import predicting, unroll

MOST_STEPS = 32  # each step needs the memory of one more forward pass
LK_ETA = 3.0  # the paper's best
CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**25}  # logits in memory at a time, a few times over


@dataclass(frozen=True)
class Objective:
    """Weights of the terms, each a mean over learned positions, and the unrolling of the head.

    Args:
        regression: SmoothL1 between predicted and true feature (EAGLE, arXiv 2401.15077, section 4.2).
        soft_ce: cross-entropy from p to q (same section).
        top_k: the same over the target's `top_k_tokens` best tokens (HASS, arXiv 2408.15766, eq. 5).
        tv: total variation, 1 - sum min(p, q): the rejection rate of lossless speculative sampling.
        lk: -log a, for the acceptance rate a = sum min(p, q) (LK losses, arXiv 2602.23881).
        lk_hybrid: w KL(p || q) + (1 - w) (1 - a), for each position with the weight w = exp(-LK_ETA a), which is not
            learned from (the same paper): KL where the head is far off, the rejection rate where it is near.
        aligned_steps: number of unrolled steps, including the first, which reads the target's features.
        step_decay: weight of step s is step_decay ** (s - 1).
        logit_stride: compute the terms on distributions at every `logit_stride`-th position, with a different offset in
            each step, and scale them accordingly. The output layer, which regression does not need, dominates the cost
            of a step. Without such terms, the stride applies to the logged accuracy.
        noise: add uniform noise of +- noise * 512 / document length to the features that the head reads.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    regression: float = 0.0
    soft_ce: float = 0.0
    top_k: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    top_k_tokens: int = 10
    aligned_steps: int = 1
    step_decay: float = 1.0
    logit_stride: int = 1
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in (*TERMS, "noise"):
            require_number(f"objective: {name}", getattr(self, name), "a number of at least 0", lambda x: x >= 0)
        if not any(getattr(self, name) for name in TERMS):
            raise ValueError(f"objective: one of {', '.join(TERMS)} must have a weight above 0")
        for name in ("aligned_steps", "logit_stride", "top_k_tokens"):
            require_integer(f"objective: {name}", getattr(self, name), 1)
        if self.aligned_steps > MOST_STEPS:
            raise ValueError(f"objective: aligned_steps must be at most {MOST_STEPS}, got {self.aligned_steps}")
        require_number("objective: step_decay", self.step_decay, "a number in (0, 1]", lambda x: 0 < x <= 1)

    @property
    def learns_logits(self) -> bool:
        """Whether any term compares distributions."""
        return any(getattr(self, name) for name in ON_LOGITS)


ON_LOGITS = ("soft_ce", "top_k", "tv", "lk", "lk_hybrid")
TERMS = ("regression", *ON_LOGITS)

# Objectives by name. To add one, add a line here; to add a term, add a field above and a line in `logit_sum`.
OBJECTIVES: dict[str, Objective] = {
    "eagle": Objective(regression=1.0, soft_ce=0.1, noise=0.1),
    "sparse": Objective(regression=1.0, soft_ce=0.1, logit_stride=4),
    "hass": Objective(regression=1.0, soft_ce=0.1, top_k=1.0, aligned_steps=3),
    "eagle3": Objective(soft_ce=1.0, aligned_steps=7, step_decay=0.8),
}


def make_objective(text: str) -> Objective:
    """An objective from "NAME", "FIELD=VALUE,..." or "NAME,FIELD=VALUE,...".

    Raises:
        ValueError: unknown name or field, or a value has the wrong type or is out of range.
    """
    name, *changes = text.split(",")
    if "=" in name:
        name, changes = "", [name, *changes]
    if name and name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; accepted: {', '.join(OBJECTIVES)}, or FIELD=VALUE,...")
    known = {field.name: type(field.default) for field in fields(Objective)}
    values = vars(OBJECTIVES[name]).copy() if name else {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in known:
            raise ValueError(f"objective has no field {key!r}; accepted: {', '.join(known)}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise ValueError(f"objective: {key} must be {known[key].__name__}, got {value!r}") from None
    return Objective(**values)


def objective_text(objective: Objective) -> str:
    """The text from which `make_objective` makes this objective."""
    for name, known in OBJECTIVES.items():
        if objective == known:
            return name
    return ",".join(f"{field.name}={getattr(objective, field.name):g}" for field in fields(objective)
                    if getattr(objective, field.name) != field.default)


def regression_sum(
    predicted: Tensor,  # [M, D]
    true_features: Tensor,  # [M, D]
) -> Tensor:
    """The regression term's sum over the positions, a scalar."""
    distance = nn.functional.smooth_l1_loss(predicted.float(), true_features.float(), reduction="none")
    return distance.mean(-1).sum()


def logit_sum(
    objective: Objective,
    log_q: Tensor,  # [C, R], the head's log-probabilities
    p: Tensor,  # [C, R], the target's probabilities
) -> Tensor:
    """Weighted sum of the terms that compare distributions over the positions, a scalar."""
    total = log_q.new_zeros(())
    if objective.soft_ce:
        total = total - objective.soft_ce * (p * log_q).sum()
    if objective.top_k:
        best = p.topk(min(objective.top_k_tokens, p.shape[-1]))
        total = total - objective.top_k * (best.values * log_q.gather(-1, best.indices)).sum()
    if objective.tv or objective.lk or objective.lk_hybrid:
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        total = total + objective.tv * (1 - overlap).sum()
        if objective.lk:
            total = total - objective.lk * overlap.clamp_min(1e-6).log().sum()
        if objective.lk_hybrid:
            weight, kl = (-LK_ETA * overlap.detach()).exp(), (p.xlogy(p) - p * log_q).sum(-1)
            total = total + objective.lk_hybrid * (weight * kl + (1 - weight) * (1 - overlap)).sum()
    return total


class InChunks(torch.autograd.Function):
    """The sum of a function over chunks of positions, one chunk of one step in memory at a time: its gradients are
    computed beside its value (as in Liger's fused linear cross-entropy, arXiv 2410.10989)."""

    @staticmethod
    def forward(
        ctx,
        function: Callable[[slice], Callable[[Tensor, int], tuple[Tensor, Tensor]]],  # see `AlignedLoss.comparison`
        rows: int,  # positions in a chunk
        predicted: Tensor,  # [steps, C, D]
        *weights: Tensor,  # other tensors that the function reads
    ) -> tuple[Tensor, Tensor]:  # the sum of its first result, and [steps] the sums of its second
        learns = any(ctx.needs_input_grad)
        total, counts = predicted.new_zeros((), dtype=torch.float32), predicted.new_zeros(len(predicted), dtype=int)
        ctx.grads = [torch.zeros_like(predicted) if learns else None, *[None] * len(weights)]
        for first in range(0, predicted.shape[1], rows):
            compare = function(chunk := slice(first, first + rows))
            for step, each in enumerate(predicted):
                with torch.set_grad_enabled(learns):
                    value, count = compare(read := each[chunk].detach().requires_grad_(learns), step)
                total, counts[step] = total + value.detach(), counts[step] + count
                if learns:
                    ctx.grads[0][step, chunk], *others = torch.autograd.grad(value, [read, *weights], allow_unused=True)
                    for number, grad in enumerate(others, 1):
                        known = ctx.grads[number]
                        if grad is not None:  # summed in float32, and cast to the weight's dtype by autograd
                            ctx.grads[number] = grad.float() if known is None else known.add_(grad)
        ctx.mark_non_differentiable(counts)
        return total, counts

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple:
        return None, None, *(None if each is None else each.mul_(grad) for each in ctx.grads)


class AlignedLoss(nn.Module):
    """The objective over all aligned steps, in one module: data parallelism needs a single forward pass per step.

    Args:
        head: with a reduced vocabulary, its `output_rows` are the rows of the target's output layer for these tokens.
        logits: the target's frozen output layer, features [..., D] -> logits [..., V] float32. It is not a submodule.

    Raises:
        ValueError: the objective has regression, but the head predicts no features.
    """

    def __init__(self, head: DraftHead, objective: Objective, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if objective.regression and isinstance(head, Eagle3Head):
            raise ValueError(
                f"objective: an EAGLE-3 head predicts no features, regression must be 0, got {objective.regression!r}"
            )
        self.head, self.objective = head, objective
        self.residue = 0  # offset of the compared positions, modulo `logit_stride`
        self._logits = [logits]  # in a list, so that it is not a submodule, and neither trained nor saved

    def forward(
        self,
        features: Tensor,  # [T, F] of the target
        tokens: Tensor,  # [T]
        learned: Tensor,  # [T] bool
        lengths: Sequence[int],  # of the texts
        noise: Tensor | None = None,  # [T, F], added to the features that the head reads
    ) -> tuple[Tensor, Tensor]:
        """Sums over learned positions: the loss, and for each aligned step [steps] how often q's best token is p's.

        With a `logit_stride`, the latter are estimates from some of the positions.
        """
        head, objective = self.head, self.objective
        slots, positions = predicting(lengths, tokens.device)
        true, chosen = features[slots + 1, -head.target_hidden_size :], learned[slots + 2]
        compared = chosen & (positions % objective.logit_stride == self.residue) & head.names(tokens[slots + 2])
        loss, kept = features.new_zeros((), dtype=torch.float32), []
        read = features if noise is None else features + noise
        for step, predicted in enumerate(unroll(head, read, tokens, lengths, objective.aligned_steps)):
            if objective.regression:
                weight = objective.regression * objective.step_decay**step
                loss = loss + weight * regression_sum(predicted[chosen], true[chosen])
            kept.append(predicted[compared])
        kept, weights = torch.stack(kept), [weight for weight in head.parameters() if weight.requires_grad]
        if not (objective.learns_logits and torch.is_grad_enabled()):
            kept, weights = kept.detach(), []
        width = head.config.vocab_size if head.output_rows is None else head.draft_vocab_size
        rows = max(1, CHUNK_LOGITS.get(tokens.device.type, CHUNK_LOGITS["cuda"]) // width)
        on_logits, agreement = InChunks.apply(partial(self.comparison, true[compared]), rows, kept, *weights)
        return loss + on_logits * objective.logit_stride, agreement * objective.logit_stride

    def comparison(
        self,
        true_features: Tensor,  # [C, D]
        chunk: slice,
    ) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """A function of a step's predictions [c, D] for a chunk of the positions, and the number of the step: the terms
        that compare distributions, and how often their best tokens are the same."""
        objective, output = self.objective, self._logits[0]
        with torch.no_grad():
            p = self.head.target_logits(true_features[chunk], output).float().softmax(-1)  # [c, R]

        def compare(predicted: Tensor, step: int) -> tuple[Tensor, Tensor]:
            log_q = self.head.own_logits(predicted, output).float().log_softmax(-1)
            terms = objective.step_decay**step * logit_sum(objective, log_q, p)
            return terms, (log_q.argmax(-1) == p.argmax(-1)).sum()

        return compare
