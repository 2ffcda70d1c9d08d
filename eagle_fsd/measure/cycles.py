"""Log what a wide tree's nodes do on prompts of the user's, for `tree="auto"` to choose by."""

from __future__ import annotations

from collections.abc import Sequence

from ..acceptance import Rule
from ..data.progress import Progress
from ..drafting.config import TreeConfig
from ..drafting.logs import LOGGED_TREE, CycleLog, TreeLog
from ..pair import EagleModel
from ..prompts import check_length, encode_prompts
from ..settings import equipped
from .methods import engine


def log_cycles(
    model: EagleModel, prompts: Sequence, rule: Rule, temperature: float = 0.0, *, max_new_tokens: int = 256,
    seed: int = 0, wide: TreeConfig = LOGGED_TREE,
) -> TreeLog:
    """Answer prompts (texts, chats or token ids) by a rule with a wide tree, and note every cycle.

    Raises:
        ValueError: a prompt that is too long or otherwise bad, before anything is generated; or not one draft tree was
            verified.
    """
    for ids in encode_prompts(list(prompts), model)[0]:
        check_length(len(ids), 1, model)
    noted = CycleLog(equipped(rule, model))
    answer = engine(model, acceptance=noted, tree=wide, temperature=temperature, seed=seed)
    for prompt in Progress(prompts, desc="logging cycles", unit="prompt"):
        answer(prompt, max_new_tokens)
    if not noted.cycles:
        raise ValueError(f"{len(prompts)} prompts gave no cycle to log: longer answers are needed")
    return TreeLog(repr(rule), float(temperature), noted.cycles)
