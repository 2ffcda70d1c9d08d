"""Acceptance length estimated from text, without generating: what the decoder would accept at each of its cycles.

A text is walked through as the decoder would: at each root a real draft tree is grown from the true features and
verified by one forward of the target; every rule says how far it would have gone, and the walk moves on along the
text by as many tokens as the tree foresaw. On the target's own greedy answers these are the decoder's own cycles for
`exact`; for fuzzy rules the next root differs, since a fuzzy token would have changed the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eagle_fsd.acceptance import Rule, Verification, walk
from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.models.target import TargetModel
from eagle_fsd.trees.config import TreeConfig
from eagle_fsd.trees.growth import draft_tree


def last_answers(documents: Documents, indices: Iterable[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids: the last run of learned tokens of each document, and all before it.

    Documents learned from their start on (plain text) are cut in the middle.
    """
    for index in indices:
        tokens, learned = documents.document(index)
        stops = np.flatnonzero(~learned[: np.flatnonzero(learned)[-1]]) if learned.any() else []
        if not learned.any():
            continue
        start = int(stops[-1]) + 1 if len(stops) else 0
        if start < 2:
            start = len(tokens) // 2
        end = int(np.flatnonzero(learned)[-1]) + 1
        if start >= 2 and end - start >= 4:
            yield tokens[:start].tolist(), tokens[start:end].tolist()


@torch.inference_mode()
def text_cycles(
    target: TargetModel, head: DraftHead, prompt: list[int], answer: list[int], tree: TreeConfig
) -> Iterator[Verification]:
    """The greedy verifications of one answer, root by root along the text."""
    ids = torch.tensor([prompt + answer], device=target.output_device)
    beyond = torch.full((1, tree.depth + 1), -1, device=ids.device)  # matches no token
    expected = torch.cat([ids, beyond], 1)
    root = len(prompt)
    cache = target.new_cache(ids.shape[1] + tree.nodes)
    draft_cache = head.new_cache(ids.shape[1] + tree.nodes + tree.depth * tree.top_k)
    features = target.prefill(ids[:, :root].to(target.device), cache).to(ids.device)
    tokens = ids[:, 1 : root + 1]
    while root + 1 < ids.shape[1]:
        drafted, draft_logits = draft_tree(head, target, features, tokens, draft_cache, tree)
        node_features = target.verify(drafted.tokens, drafted.depths + root, drafted.ancestors, cache)
        logits = target.logits(node_features)
        named = None if head.names_all else head.target_tokens
        verification = Verification(drafted, logits, logits, draft_logits, draft_tokens=named)
        yield verification
        on_text = verification.on_whole_path(drafted.tokens == expected[0, root + drafted.depths])
        path = on_text[0].nonzero()[:, 0].tolist()
        cache.commit([root], [[root + node for node in path]])
        features = node_features[:, path]
        tokens = ids[:, root + 1 : root + 1 + len(path)]
        root += len(path)


def accepted_length(verification: Verification, rule: Rule) -> Tensor:
    """[B] draft tokens that the rule would accept."""
    return walk(verification, rule(verification)).length


def estimate_tau(
    target: TargetModel, head: DraftHead, documents: Documents, indices: Iterable[int], rules: dict[str, Rule],
    tree: TreeConfig,
) -> dict[str, float]:
    """Estimated acceptance length (tokens per target forward) of each rule, over the cycles of all answers.

    Raises:
        ValueError: no document has an answer that is long enough.
    """
    accepted: dict[str, list[Tensor]] = {name: [] for name in rules}
    answers = list(last_answers(documents, indices))
    for prompt, answer in tqdm(answers, desc="tau", unit="text", disable=None, leave=False):
        for verification in text_cycles(target, head, prompt, answer, tree):
            for name, rule in rules.items():
                accepted[name].append(accepted_length(verification, rule))
    if not any(accepted.values()):
        raise ValueError("tau cannot be estimated: no held-out document has an answer of four tokens or more")
    return {name: torch.cat(lengths).double().mean().item() + 1 for name, lengths in accepted.items()}
