"""One tree of drafts from all sources: the head's nodes, copies from the text, what a grammar forces; by score.

B rows, N nodes of a tree. It is done on the host: there are a hundred nodes, and each is looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .text import Copies
from .tree import DraftTree, ancestors_of


class JoinedRow:
    """The nodes of one row: those of the head's tree, then copies that are not among them, parents first.

    Where both propose a token at a node they are one node with the better score, and what the head thought of its
    descendants counts from there.
    """

    def __init__(
        self, tokens: list[int], parents: list[int], scores: list[float], draft_rows: list[int], copies: Copies | None
    ) -> None:
        self.tokens, self.parents, self.draft_rows = list(tokens), list(parents), list(draft_rows)
        self.drafters = [0] * len(tokens)
        places = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True)) if node}
        steps = [_step(scores[parent], score) for score, parent in zip(scores, parents, strict=True)]
        numbers, above = {-1: 0}, {-1: 0.0}  # of copies: their nodes, and their scores
        for copy, (token, parent, score, matched) in enumerate(zip(*(copies or [[]] * 4)[:4], strict=True)):
            step, node = _step(above[parent], score), places.get((numbers[parent], token))
            if node is not None:
                steps[node] = max(steps[node], step)
            else:
                node = len(self.tokens)
                for column, value in zip((self.tokens, self.parents, self.draft_rows, self.drafters, steps),
                                         (token, numbers[parent], -1, 1 if matched else 2, step), strict=True):
                    column.append(value)
            numbers[copy], above[copy] = node, score
        self.scores, self.depths = [0.0], [0]
        for parent, step in zip(self.parents[1:], steps[1:], strict=True):
            self.scores.append(self.scores[parent] + step)
            self.depths.append(self.depths[parent] + 1)
        # The best first; where scores tie, parents before children.
        self.order = sorted(range(len(self.tokens)), key=lambda node: (node > 0, -self.scores[node], node))

    def best(self, count: int) -> list[tuple]:
        """Token, parent, depth, draft row, score and drafter of each of the best nodes, parents before
        children and level by level; where there are fewer than wanted, roots that are their own parents come after."""
        kept = sorted(self.order[:count], key=lambda node: (self.depths[node], node))
        place = {node: number for number, node in enumerate(kept)}
        return [(self.tokens[node], place[self.parents[node]], self.depths[node], self.draft_rows[node],
                 self.scores[node], self.drafters[node]) for node in kept] + [
            (self.tokens[0], number, 0, 0, 0.0, 0) for number in range(len(kept), count)]


def _step(above: float, score: float) -> float:
    """The log-probability that a node adds to its parent's; that of a broken head's NaN is -inf."""
    return min(0.0, score - above) if math.isfinite(score) else -math.inf


def join_drafts(
    tree: DraftTree,  # what the head drafted, more than will be verified; or roots alone
    copies: Sequence[Copies | None],
    count: Callable[[list[list[float]]], int],  # nodes to verify, from each row's scores in descending order
) -> DraftTree:
    """The best nodes of both sources, as many in each row; a row that has fewer is filled up with copies of its root,
    which are nobody's children."""
    columns = [part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.draft_rows)]
    rows = [JoinedRow(*parts, mine) for *parts, mine in zip(*columns, copies, strict=True)]
    nodes = count([[row.scores[node] for node in row.order] for row in rows])
    columns = [torch.tensor(column, device=tree.tokens.device)
               for column in zip(*(zip(*row.best(nodes), strict=True) for row in rows), strict=True)]
    tokens, parents, depths, draft_rows, scores, drafters = columns
    deepest = max(row.depths[node] for row in rows for node in row.order[:nodes])
    return DraftTree(tokens, parents, depths, ancestors_of(parents, deepest), draft_rows, scores, deepest, drafters)
