"""Log what a wide tree's nodes do on prompts of the user's, for `tree="auto"` to choose by."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from .acceptance import Rule
from .autotree import WIDE, CycleLog, TreeLog
from .config import TreeConfig
from .methods import engine
from .model import EagleModel
from .questions import Question, converse


def log_cycles(
    model: EagleModel, questions: Sequence[Question], rule: Rule, temperature: float = 0.0, *,
    max_new_tokens: int = 256, seed: int = 0, wide: TreeConfig = WIDE,
) -> TreeLog:
    """Answer the questions by a rule with a wide tree, and note every cycle.

    Raises:
        ValueError: not one draft tree was verified.
    """
    noted = CycleLog(rule)
    answer = engine(model, acceptance=noted, tree=wide, temperature=temperature, seed=seed)
    for question in tqdm(questions, desc="logging cycles", unit="prompt", disable=None):
        converse(lambda chat: answer(chat, max_new_tokens), question.turns)
    if not noted.cycles:
        raise ValueError(f"{len(questions)} prompts gave no cycle to log: longer answers are needed")
    return TreeLog(repr(rule), float(temperature), noted.cycles)
