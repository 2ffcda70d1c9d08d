"""Fit a head's curves on prompts of the user's, by which `tree="auto"` sizes its cycles."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..api import decode_requests
from ..data.progress import Progress
from ..drafting.curves import WIDE_TREE, Cycle, HeadCurves, fit, observed
from ..drafting.tree import DraftTree
from ..options import GenerateOptions
from ..pair import EagleModel
from ..prompts import encode_prompts
from ..requests import make_requests


def wide_cycles(model: EagleModel, prompts: Sequence, max_new_tokens: int, temperature: float) -> list[Cycle]:
    """What a wide tree's nodes do in exact answers to prompts (texts, chats or token ids).

    Raises:
        ValueError: a prompt that is too long or otherwise bad, before anything is generated.
    """
    options = GenerateOptions(acceptance="exact", text_drafts="off", temperature=temperature, seed=0, tree=WIDE_TREE,
                              max_new_tokens=max_new_tokens)
    requests = make_requests(model, encode_prompts(list(prompts), model)[0], options)
    cycles: list[Cycle] = []

    def observe(tree: DraftTree, draft_logits: list[Tensor], paths: list[list[int]]) -> None:
        cycles.append(observed(tree, paths[0]))

    for request in Progress(requests, desc=f"cycles at temperature {temperature:g}", unit="prompt"):
        decode_requests(model, [request], observe=observe)
    return cycles


def fit_curves(model: EagleModel, prompts: Sequence, max_new_tokens: int) -> HeadCurves:
    """The curves of greedy and of sampled answers to these prompts.

    Raises:
        ValueError: a bad prompt, or too few cycles to fit to.
    """
    return HeadCurves(*(fit(wide_cycles(model, prompts, max_new_tokens, temperature)) for temperature in (0.0, 1.0)))
