"""Merge the drafter's nodes, copies from the text and tokens that a grammar forces into one tree, by score.

B rows, N nodes of a tree. This runs on the host: there are some hundred nodes, and each is visited once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .copies import Copies
from .sizing import Plan
from .tree import DraftTree, ancestors_of


class JoinedRow:
    """The nodes of one row: the drafter's tree, then those copies that are not in it, parents first.

    A token that both propose at the same place is one node with the better score; its descendants in the drafter's tree
    add their own log-probabilities to that score.
    """

    def __init__(
        self, tokens: list[int], parents: list[int], scores: list[float], draft_rows: list[int], copies: Copies | None
    ) -> None:
        end = next((node for node in range(1, len(parents)) if parents[node] == node), len(parents))  # then fillers
        tokens, parents, scores, draft_rows = (column[:end] for column in (tokens, parents, scores, draft_rows))
        self.tokens, self.parents, self.draft_rows = list(tokens), list(parents), list(draft_rows)
        self.origins = [0] * len(tokens)
        places = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True)) if node}
        log_probs = [log_prob_between(scores[parent], score) for score, parent in zip(scores, parents, strict=True)]
        numbers, above = {-1: 0}, {-1: 0.0}  # by copy: its node, and its score
        columns = (copies.tokens, copies.parents, copies.scores, copies.origins) if copies else ()
        for copy, (token, parent, score, origin) in enumerate(zip(*columns, strict=True)):
            log_prob, node = log_prob_between(above[parent], score), places.get((numbers[parent], token))
            if node is not None:
                log_probs[node] = max(log_probs[node], log_prob)
            else:
                node = len(self.tokens)
                for column, value in zip((self.tokens, self.parents, self.draft_rows, self.origins, log_probs),
                                         (token, numbers[parent], -1, origin, log_prob), strict=True):
                    column.append(value)
            numbers[copy], above[copy] = node, score
        self.scores, self.depths = [0.0], [0]
        for parent, log_prob in zip(self.parents[1:], log_probs[1:], strict=True):
            self.scores.append(self.scores[parent] + log_prob)
            self.depths.append(self.depths[parent] + 1)
        # The best first; if scores tie, parents before children.
        self.order = sorted(range(len(self.tokens)), key=lambda node: (node > 0, -self.scores[node], node))

    def best(self, count: int) -> list[tuple]:
        """Token, parent, depth, draft row, score and origin of each of the `count` best nodes, level by level. A row
        with fewer nodes is filled up with repetitions of the root, each its own parent."""
        kept = sorted(self.order[:count], key=lambda node: (self.depths[node], node))
        place = {node: number for number, node in enumerate(kept)}
        return [(self.tokens[node], place[self.parents[node]], self.depths[node], self.draft_rows[node],
                 self.scores[node], self.origins[node]) for node in kept] + [
            (self.tokens[0], number, 0, 0, 0.0, 0) for number in range(len(kept), count)]


def log_prob_between(above: float, score: float) -> float:
    """The log-probability that a node adds to its parent's; -inf for a broken head's NaN."""
    return min(0.0, score - above) if math.isfinite(score) else -math.inf


def join_drafts(
    tree: DraftTree,  # the drafter's, larger than what will be verified; or roots alone
    copies: Sequence[Copies | None],
    plan: Plan,  # chooses the number of nodes
) -> DraftTree:
    """Best nodes of all sources, the same number in each row. Repetitions of the root fill up shorter rows."""
    columns = [part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.draft_rows)]
    rows = [JoinedRow(*parts, mine) for *parts, mine in zip(*columns, copies, strict=True)]
    nodes = plan.nodes([[row.scores[node] for node in row.order] for row in rows])
    columns = zip(*(zip(*row.best(nodes), strict=True) for row in rows), strict=True)
    dtypes = (torch.long, torch.long, torch.long, torch.long, torch.float32, torch.long)
    tokens, parents, depths, draft_rows, scores, origins = (
        torch.tensor(column, dtype=dtype, device=tree.tokens.device)
        for column, dtype in zip(columns, dtypes, strict=True))
    deepest = max(row.depths[node] for row in rows for node in row.order[:nodes])
    return DraftTree(tokens, parents, depths, ancestors_of(parents, deepest), draft_rows, scores, deepest, origins)
