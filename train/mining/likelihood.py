"""What a substitution costs the rest of the target's own answer, by one forward and without generating.

Behind the substitute the rest may go on in three ways: it took the place of one token, of two, or of none. L positions
before the substitute, N nodes of the tree of these three continuations, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.models.target import TargetModel

OFFSETS = (0, 1, -1)  # tokens of the answer that the substitute takes the place of, less one
MEETING = 4  # so many tokens in a row that are the target's own again, and the texts have met
WINDOW = 16  # within which they have to
HORIZON = 128  # of the rest so many tokens count


@dataclass(frozen=True)
class Loss:
    """What a substitution does to the rest of an answer.

    Args:
        nats: by how much the rest becomes less likely from where the texts have met; None: they do not meet.
        offset: see `OFFSETS`; where they do not meet 0.
    """

    nats: float | None
    offset: int = 0

    def is_harm(self, limit: float) -> bool:
        """Whether more than `limit` nats are lost."""
        return self.nats is None or self.nats > limit


@torch.inference_mode()
def losses(
    target: TargetModel, prompt: Sequence[int], answer: Sequence[int], substitutions: Sequence[tuple[int, int]]
) -> list[Loss]:
    """What each substitution (place in the answer, token) does on its own.

    The answer is read once; each substitution is then one forward behind the positions before it.
    """
    cache = target.new_cache(len(prompt) + len(answer) + len(OFFSETS) * HORIZON + 1)
    text = torch.tensor([[*prompt, *answer]], device=target.device)
    features = target.prefill(text, cache)[:, len(prompt) - 1 : -1]  # each predicts a token of the answer
    own = own_log_probs(target.logits(features)[0], text[0, len(prompt) :])[0].tolist()
    found: dict[int, Loss] = {}
    for number in sorted(range(len(substitutions)), key=lambda n: -substitutions[n][0]):  # so that the cache can shrink
        at, token = substitutions[number]
        cache.truncate(len(prompt) + at)
        found[number] = _loss(target, cache, answer, own, at, token)
    return [found[number] for number in range(len(substitutions))]


def own_log_probs(
    logits: Tensor,  # [N, V]
    tokens: Tensor,  # [N] long
) -> tuple[Tensor, Tensor]:
    """[N] log-probability of each token, and [N] bool, whether it is the most likely."""
    log_probs = logits.log_softmax(-1).gather(-1, tokens.to(logits.device)[:, None])[:, 0]
    return log_probs, logits.argmax(-1) == tokens.to(logits.device)


def _loss(target: TargetModel, cache, answer: Sequence[int], own: Sequence[float], at: int, token: int) -> Loss:
    rests = {offset: list(answer[at + 1 + offset :][:HORIZON]) for offset in OFFSETS}
    tokens, parents = [token], [0]
    for rest in rests.values():
        parents += [0, *range(len(tokens), len(tokens) + len(rest) - 1)][: len(rest)]
        tokens += rest
    parents = torch.tensor([parents], device=target.device)
    ancestors = ancestors_of(parents, HORIZON)
    depths = ancestors.sum(-1) - 1
    before = cache.length
    features = target.verify(torch.tensor([tokens], device=target.device), before + depths, ancestors, cache)
    cache.truncate(before)
    place, found = 1, []
    for offset, rest in rests.items():
        nodes = [0, *range(place, place + len(rest) - 1)][: len(rest)]  # that predict the rest
        place += len(rest)
        if not rest:
            continue
        log_probs, best = own_log_probs(target.logits(features[0, nodes]), torch.tensor(rest))
        met = meeting(best.tolist())
        if met is not None:
            since = at + 1 + offset + met
            nats = sum(own[since : at + 1 + offset + len(rest)]) - log_probs[met:].double().sum().item()
            found.append((met, nats, offset))
    if not found:
        return Loss(None)
    _, nats, offset = min(found)  # the first to meet; of these the likeliest
    return Loss(nats, offset)


def meeting(is_own: Sequence[bool]) -> int | None:
    """Where the texts have met: `MEETING` tokens in a row, or all up to the end, are the target's own again."""
    for place in range(min(WINDOW, len(is_own))):
        if all(is_own[place : place + MEETING]):
            return place
    return None
