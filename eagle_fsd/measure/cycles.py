"""Log what a wide tree's nodes do on prompts of the user's, for `tree="auto"` to choose by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..api import decode_requests
from ..data.progress import Progress
from ..drafting.coupling import Coupling
from ..drafting.logs import LOGGED_TREE, LoggedCycle, Setting, TreeLog, logged_cycle
from ..drafting.tree import DraftTree
from ..options import GenerateOptions
from ..pair import EagleModel
from ..requests import encode_prompts, make_requests


def log_cycles(model: EagleModel, prompts: Sequence, options: GenerateOptions) -> TreeLog:
    """Answer prompts (texts, chats or token ids) with a wide tree, and note every cycle.

    Raises:
        ValueError: a prompt that is too long or otherwise bad, before anything is generated; or not one draft tree was
            verified.
    """
    options = replace(options, tree=LOGGED_TREE, text_drafts="off")
    requests = make_requests(model, encode_prompts(list(prompts), model)[0], options)
    named = None if model.draft.names_all else model.draft.target_tokens
    cycles: list[LoggedCycle] = []

    def observe(
        tree: DraftTree, draft_logits: list[Tensor], paths: list[list[int]], coupling: Coupling | None
    ) -> None:
        cycles.append(logged_cycle(tree, draft_logits, paths[0], draft_tokens=named, coupling=coupling))

    for request in Progress(requests, desc="logging cycles", unit="prompt"):
        decode_requests(model, [request], LOGGED_TREE, observe=observe)
    if not cycles:
        raise ValueError(f"{len(prompts)} prompts gave no cycle to log: longer answers are needed")
    return TreeLog(Setting.of(options.rule, options.temperature), cycles)
