"""Divergences between the target's and the draft's next-token distributions.

V vocabulary, R tokens that a draft can name. Every divergence takes raw logits, computes in float32, is never negative
and has the signature `(target_logits [..., V], draft_logits [..., V]) -> [...]`. A token without target or draft mass
(logit -inf) contributes its limit: 0 * log 0 = 0, and infinity if a logarithm of 0 has positive weight.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..utils.checks import OptionError
from ..utils.topk import largest

LEAST = torch.finfo(torch.float32).tiny  # probabilities are clamped to it before division and logarithm
Divergence = Callable[[Tensor, Tensor], Tensor]


def _expectation(probs: Tensor, log_ratio: Tensor) -> Tensor:
    """sum over V of probs * log_ratio, with 0 * inf = 0."""
    return (probs * log_ratio).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).sum(-1)


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(target || draft) = sum of target_probs * log(target_probs / draft_probs)."""
    target_logits, draft_log_probs = target_logits.float(), draft_logits.float().log_softmax(-1)
    # Two fused kernels cost less than one and an exp.
    return _expectation(target_logits.softmax(-1), target_logits.log_softmax(-1) - draft_log_probs).clamp_min(0.0)


def reverse_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(draft || target); `kl_div` in the code published with FSD (arXiv 2502.20704)."""
    return kl(draft_logits, target_logits)


def js(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Jensen-Shannon: KL(target || m) / 2 + KL(draft || m) / 2, m the mean; natural log, at most ln 2."""
    target_probs, draft_probs = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    mean = (target_probs + draft_probs).div_(2).clamp_min_(LEAST)
    to_mean = [(probs * (probs.clamp_min(LEAST) / mean).log_()).sum(-1) for probs in (target_probs, draft_probs)]
    return (sum(to_mean) / 2).clamp(0.0, math.log(2))


def js_fsd_code(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(m || target) / 2 + KL(m || draft) / 2 with m the mean: unbounded, and *not* Jensen-Shannon.

    The code published with FSD (arXiv 2502.20704) computes this under the name JS; use it to reproduce that code's
    thresholds.
    """
    target_log_probs = target_logits.float().log_softmax(-1)
    draft_log_probs = draft_logits.float().log_softmax(-1)
    mean_log_probs = torch.logaddexp(target_log_probs, draft_log_probs) - math.log(2)
    log_ratio = mean_log_probs - (target_log_probs + draft_log_probs) / 2
    return _expectation(mean_log_probs.exp(), log_ratio).clamp_min(0.0)


def tv(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Total variation: half the L1 distance, at most 1."""
    difference = target_logits.float().softmax(-1) - draft_logits.float().softmax(-1)
    return (difference.abs().sum(-1) / 2).clamp(0.0, 1.0)


DIVERGENCES: dict[str, Divergence] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
    "js_fsd_code": js_fsd_code,
}


def coarsen(
    logits: Tensor,  # [..., V]
    kept: Tensor,  # [..., k] long, token ids
) -> Tensor:  # [..., k + 1]
    """Logits of the kept tokens, then of one bucket with the mass of all others."""
    rest = logits.scatter(-1, kept, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, kept), rest], dim=-1)


def widen(
    draft_logits: Tensor,  # [..., R]
    draft_tokens: Tensor | None,  # [R] long; None: the first R tokens
    vocab_size: int,
) -> Tensor:  # [..., V]
    """Logits over the whole vocabulary, -inf for tokens that the draft cannot name."""
    if draft_tokens is None:
        return pad(draft_logits, (0, vocab_size - draft_logits.shape[-1]), value=-math.inf)
    absent = draft_logits.new_full((*draft_logits.shape[:-1], vocab_size), -math.inf)
    return absent.index_copy_(-1, draft_tokens, draft_logits)


def get_divergence(name: str, draft_tokens: Tensor | None = None) -> Divergence:
    """A divergence by its name; `<name>_top<k>` compares the target's k best tokens and one bucket for the rest.

    Args:
        draft_tokens: [R] long, the tokens of the draft's logits [..., R]; None: the first R, usually all.

    Raises:
        ValueError: an unknown name, or a k that is not positive.
    """
    match = re.fullmatch(r"(\w+?)(?:_top([1-9][0-9]*))?", name) if isinstance(name, str) else None
    if match is None or match[1] not in DIVERGENCES:
        accepted = ", ".join(DIVERGENCES)
        raise OptionError("divergence", problem=f"is the unknown divergence {name!r}; accepted: {accepted}, each also "
                          "followed by _top<k>")
    full, top = DIVERGENCES[match[1]], match[2]

    def on_all_tokens(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
        size, named = target_logits.shape[-1], draft_logits.shape[-1]
        if draft_tokens is None and size == named:
            return full(target_logits, draft_logits)
        # Tokens that the draft cannot name have target mass alone, so that every divergence depends on its sum only.
        if draft_tokens is None:
            known, unnamed = target_logits.split((named, size - named), -1)
        else:
            known = target_logits.index_select(-1, draft_tokens)
            unnamed = target_logits.index_fill(-1, draft_tokens, -math.inf)
        both = torch.cat([known, unnamed.logsumexp(-1, keepdim=True)], -1)
        return full(both.float(), pad(draft_logits, (0, 1), value=-math.inf))

    def on_top_tokens(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
        draft_logits = widen(draft_logits, draft_tokens, target_logits.shape[-1])
        kept = largest(target_logits, min(int(top), target_logits.shape[-1]))
        return full(coarsen(target_logits.float(), kept), coarsen(draft_logits.float(), kept))

    return on_all_tokens if top is None else on_top_tokens
