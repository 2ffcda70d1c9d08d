"""Drafts from the text: what followed the last tokens where they stood before, in prompt, answer or a reference.

The text's last tokens are looked up in an index of n-grams, and what came after them there is copied, as a small trie
where the places differ. How likely a copied token is to be accepted is told by how many tokens matched before it, from
a fitted table that counts of the request itself correct. (Prompt lookup, arXiv 2304.04487; the longest match wins as in
SAM-Decoding, 2411.10666, and copies carry estimates as in SuffixDecoding, 2411.04975.)

M tokens that matched.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checks import require_integer

GRAMS = (6, 2)  # lengths of the indexed n-grams; the shorter ones are asked where no longer one is found
TRIED = 12  # places looked at, newest first
LONGEST_MATCH = 32  # beyond, a longer match says no more
APART = -1  # stands between texts, matches nothing


@dataclass(frozen=True)
class TextDrafts:
    """What is copied from the text.

    Args:
        longest: tokens copied in a row, at most (1 to 256).
        places: of a match that are followed, where what comes after them differs.
    """

    longest: int = 48
    places: int = 4

    def __post_init__(self) -> None:
        for name, least, most in (("longest", 1, 256), ("places", 1, TRIED)):
            require_integer(f"TextDrafts.{name}", getattr(self, name), least, most)


MOST_NODES = 64  # of a tree with copies, unless its `TreeConfig` has more
NODES = 16  # of a tree of copies alone, where neither a `TreeConfig` nor latencies say how many


class TextIndex:
    """The places of a text's n-grams, as chains from each to the one before (LZ77's).

    Some 1.6 microseconds and 240 bytes a token: 31 MB for 128k.
    """

    def __init__(self, *texts: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._last: dict[int, dict[int, int]] = {count: {} for count in GRAMS}  # gram -> where it ended last
        self._before: dict[int, list[int]] = {count: [] for count in GRAMS}  # by end: where the same gram ended before
        for text in texts:
            self.extend([*text, APART])

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        for count in GRAMS:
            last, before = self._last[count], self._before[count]
            for end in range(start + 1, len(self.tokens) + 1):
                gram = hash(tuple(self.tokens[max(0, end - count) : end]))
                before.append(last.get(gram, 0))
                last[gram] = end

    def matches(self, text: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Places where the longest suffixes of a text end, with how many tokens match there: long ones first, then new
        ones.

        Args:
            text: this index's own tokens, which are not matched with themselves, or another text.
        """
        for count in GRAMS:
            if len(text) < count:
                continue
            own = text is self.tokens
            place = self._before[count][-1] if own else self._last[count].get(hash(tuple(text[-count:])), 0)
            found = []
            while place and len(found) < TRIED:
                matched = self._matched(text, place)
                if matched >= count:
                    found.append((matched, place))
                place = self._before[count][place - 1]
            if found:
                return sorted(found, key=lambda each: (-each[0], -each[1]))[:most]
        return []

    def _matched(self, text: Sequence[int], place: int) -> int:
        """How many tokens before a place are the last of the text."""
        most = min(LONGEST_MATCH, place, len(text))
        if text[len(text) - most :] == self.tokens[place - most : place]:
            return most
        count, end = 0, len(text) - 1
        while count < most and text[end - count] == self.tokens[place - 1 - count]:
            count += 1
        return count

    def after(self, place: int, most: int) -> list[int]:
        """Tokens that followed a place, at most so many; past the end of the text what is copied is copied again."""
        tokens = self.tokens[place : place + most]
        if place + len(tokens) == len(self.tokens):
            tokens = (tokens * -(-most // max(1, len(tokens))))[:most]
        return tokens[: tokens.index(APART)] if APART in tokens else tokens


class Copies(NamedTuple):
    """A trie of copied tokens after the root: parents come before children, first children before others."""

    tokens: list[int]
    parents: list[int]  # number of the parent; -1: the root
    scores: list[float]  # cumulative log acceptance probability
    matched: list[int]  # tokens that matched before each; 0: a grammar forces it
    ranks: list[int]  # among siblings


def forced_copies(tokens: Sequence[int]) -> Copies:
    """A chain that a grammar forces, whose last token is a guess."""
    count = len(tokens)
    scores = [FORCED * (at + 1) for at in range(count - 1)] + [FORCED * count + GUESSED]
    return Copies(list(tokens), list(range(-1, count - 1)), scores, [0] * count, [0] * count)


# Log-probabilities that forced tokens are accepted (others may spell the same text), and that the last one is.
FORCED, GUESSED = math.log(0.98), math.log(0.7)
# By how many tokens matched: how often a copied token is accepted after an accepted parent. The means of
# eval/results/smollm2-copies.json (Spec-Bench) and qwen-copies.json (MBPP and an edit), smoothed where little was seen.
BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
FIRST = (0.48, 0.61, 0.68, 0.84, 0.86, 0.91, 0.95, 0.96, 0.97)
OTHERS = (0.22, 0.24, 0.25, 0.20, 0.20, 0.15, 0.15, 0.15, 0.15)  # of further children, once those before are refused
WEIGHT = 12.0  # tokens that the fitted rate counts as
LEAST_SCORE = math.log(0.05)  # less likely tokens are not copied


class Rates:
    """How often copied tokens are accepted, by what matched before them: the fitted rates, corrected by counts."""

    def __init__(self) -> None:
        self.seen = [[0.0] * len(BOUNDS), [0.0] * len(BOUNDS)]  # of first children, and of others
        self.taken = [[0.0] * len(BOUNDS), [0.0] * len(BOUNDS)]

    def of(self, matched: int, rank: int) -> float:
        bin, kind = bisect_right(BOUNDS, matched) - 1, min(rank, 1)
        fitted = (FIRST, OTHERS)[kind][bin]
        return (WEIGHT * fitted + self.taken[kind][bin]) / (WEIGHT + self.seen[kind][bin])

    def learn(self, matched: int, rank: int, taken: bool) -> None:
        bin, kind = bisect_right(BOUNDS, matched) - 1, min(rank, 1)
        self.seen[kind][bin] += 1
        self.taken[kind][bin] += taken


class TextSource:
    """Drafts of one request from its own text and from further ones: propose, then accept what was emitted.

    Args:
        tokens: of the prompt.
        others: indices of further texts, such as references; shared ones too, since they are only read.
    """

    def __init__(self, tokens: Sequence[int], config: TextDrafts, others: Sequence[TextIndex] = ()) -> None:
        self.config, self.others = config, others
        self.index, self.rates = TextIndex(), Rates()
        self.index.extend(tokens)
        self.proposed: Copies | None = None  # last

    def add_texts(self, texts: Sequence[TextIndex]) -> None:
        """Copy from these as well."""
        self.others = [*self.others, *texts]

    def propose(self, forced: Copies | None = None, room: int = 256) -> Copies | None:
        """What may follow the text, beside what a grammar forces; None: nothing that is likely enough.

        Args:
            room: tokens that the answer may still have beside the target's own one.
        """
        text, most = self.index.tokens, self.config.places
        found = [(matched, place, index) for index in (self.index, *self.others)
                 for matched, place in index.matches(text, most)]
        found.sort(key=lambda each: -each[0])  # stable: among equals the request's own text, the newest place
        copies = Copies([], [], [], [], []) if forced is None else forced
        children = {edge: node for node, edge in enumerate(zip(copies.parents, copies.tokens, strict=True))}
        counts = dict.fromkeys(copies.parents, 1)  # children of a node
        for matched, place, index in found[:most]:
            node, score = -1, 0.0
            for ahead, token in enumerate(index.after(place, min(self.config.longest, room))):
                child = children.get((node, token))
                if child is None:
                    rank, reached = counts.get(node, 0), min(matched + ahead, LONGEST_MATCH)
                    score += math.log(self.rates.of(reached, rank) * (self._left(node, rank, copies) if rank else 1.0))
                    if score < LEAST_SCORE:
                        break
                    child = children[node, token] = len(copies.tokens)
                    counts[node] = rank + 1
                    for column, value in zip(copies, (token, node, score, reached, rank), strict=True):
                        column.append(value)
                node, score = child, copies.scores[child]
        self.proposed = copies if copies.tokens else None
        return self.proposed

    def _left(self, parent: int, rank: int, copies: Copies) -> float:
        """The probability that none of a node's children so far is accepted after it."""
        above = 0.0 if parent < 0 else copies.scores[parent]
        taken = sum(math.exp(score - above) for mine, score in zip(copies.parents, copies.scores, strict=True)
                    if mine == parent)
        return max(1e-6, 1.0 - taken)

    def accept(self, emitted: Sequence[int]) -> None:
        """Go on with what was emitted, and take note of what of the last proposal it was."""
        self.learn(emitted)
        self.index.extend(emitted)

    def learn(self, emitted: Sequence[int]) -> None:
        """Take note of what of the last proposal was emitted."""
        copies, node = self.proposed, -1
        self.proposed = None
        for token in emitted if copies is not None else ():
            children = [child for child, parent in enumerate(copies.parents) if parent == node]
            node = -1
            for child in children:
                taken = copies.tokens[child] == token
                if copies.matched[child]:
                    self.rates.learn(copies.matched[child], copies.ranks[child], taken)
                if taken:
                    node = child
                    break
            if node < 0:
                break
