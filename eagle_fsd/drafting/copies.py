"""Drafts copied from earlier occurrences of the text's last tokens, in the prompt, the answer or a reference.

An index of n-grams finds where the text's last tokens occurred before. The tokens after those places are copied, as a
small trie where they differ. The acceptance probability of a copied token depends on the number of matched tokens
before it: a fitted table gives the rates, corrected by counts of the request itself. (Prompt lookup, arXiv 2304.04487;
the longest match wins as in SAM-Decoding, 2411.10666; copies have estimates as in SuffixDecoding, 2411.04975.)

M tokens that matched.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..utils.checks import require_integer

GRAMS = (6, 2)  # lengths of the indexed n-grams; the shorter ones are used where no longer one matches
MOST_PLACES = 12  # places compared for a match, newest first
LONGEST_MATCH = 32  # longer matches do not raise the acceptance rate
SEPARATOR = -1  # between texts; matches nothing
ORIGINS = ("head", "text", "grammar")  # of a tree's nodes; "head" stands for any `Drafter`


@dataclass(frozen=True)
class TextDrafts:
    """Limits of drafts from the text.

    Args:
        longest: most tokens copied in a row (1 to 256).
        places: most places that are copied from in one cycle (1 to 12), the longest matches first.
    """

    longest: int = 48
    places: int = 4

    def __post_init__(self) -> None:
        for name, least, most in (("longest", 1, 256), ("places", 1, MOST_PLACES)):
            require_integer(f"TextDrafts.{name}", getattr(self, name), least, most)


class TextIndex:
    """The places of a text's n-grams, as chains from each occurrence to the previous one (as in LZ77).

    It takes some 1.6 microseconds and 240 bytes per token: 31 MB for 128k tokens.
    """

    def __init__(self, *texts: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._last: dict[int, dict[int, int]] = {count: {} for count in GRAMS}  # gram -> end of its last occurrence
        self._before: dict[int, list[int]] = {count: [] for count in GRAMS}  # end of a gram -> end of its previous one
        for text in texts:
            self.extend([*text, SEPARATOR])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        for count in GRAMS:
            last, before = self._last[count], self._before[count]
            for end in range(start + 1, len(self.tokens) + 1):
                gram = hash(tuple(self.tokens[max(0, end - count) : end]))
                before.append(last.get(gram, 0))
                last[gram] = end

    def matches(self, text: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Where suffixes of a text occur: pairs of the number of matching tokens and the place after them, the longest
        and then the newest first.

        Args:
            text: this index's own tokens, whose end is not matched with itself, or another text.
            most: number of pairs.
        """
        for count in GRAMS:
            if len(text) < count:
                continue
            own = text is self.tokens
            place = self._before[count][-1] if own else self._last[count].get(hash(tuple(text[-count:])), 0)
            matches = []
            while place and len(matches) < MOST_PLACES:
                matched = self._matched(text, place)
                if matched >= count:
                    matches.append((matched, place))
                place = self._before[count][place - 1]
            if matches:
                return sorted(matches, key=lambda match: (-match[0], -match[1]))[:most]
        return []

    def _matched(self, text: Sequence[int], place: int) -> int:
        """The number of tokens before a place that equal the end of the text."""
        most = min(LONGEST_MATCH, place, len(text))
        if text[len(text) - most :] == self.tokens[place - most : place]:
            return most
        count, end = 0, len(text) - 1
        while count < most and text[end - count] == self.tokens[place - 1 - count]:
            count += 1
        return count

    def continuation(self, place: int, most: int) -> list[int]:
        """At most `most` tokens after a place, repeated if the text ends before."""
        tokens = self.tokens[place : place + most]
        if place + len(tokens) == len(self.tokens):
            tokens = (tokens * -(-most // max(1, len(tokens))))[:most]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class Copies(NamedTuple):
    """A trie of copied tokens after the root: parents precede children, first children precede others."""

    tokens: list[int]
    parents: list[int]  # index of the parent; -1: the root
    scores: list[float]  # cumulative log acceptance probability
    matched: list[int]  # number of matched tokens before each; 0: a grammar forces the token
    ranks: list[int]  # among siblings

    @property
    def depths(self) -> list[int]:
        """Of each, below the root, whose depth is 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def origins(self) -> list[int]:
        """Of each, an index into `ORIGINS`."""
        return [ORIGINS.index("text" if matched else "grammar") for matched in self.matched]


def forced_copies(tokens: Sequence[int]) -> Copies:
    """A chain that a grammar forces, except for its last token, which is a guess."""
    count = len(tokens)
    scores = [FORCED * (at + 1) for at in range(count - 1)] + [FORCED * count + GUESSED]
    return Copies(list(tokens), list(range(-1, count - 1)), scores, [0] * count, [0] * count)


# Log acceptance probabilities of forced tokens (other tokens may spell the same text), and of the last one.
FORCED, GUESSED = math.log(0.98), math.log(0.7)
# Acceptance rates of copied tokens after an accepted parent, by the number of matched tokens: the means of
# eval/results/smollm2-copies.json (Spec-Bench) and qwen-copies.json (MBPP and an edit), smoothed where data is sparse.
BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
FIRST = (0.48, 0.61, 0.68, 0.84, 0.86, 0.91, 0.95, 0.96, 0.97)
OTHERS = (0.22, 0.24, 0.25, 0.20, 0.20, 0.15, 0.15, 0.15, 0.15)  # of further children, after those before were rejected
PRIOR_TOKENS = 12.0  # weight of the fitted rate, in observed tokens
LEAST_SCORE = math.log(0.05)  # tokens less likely to be accepted are not copied


class Rates:
    """Acceptance rates of copied tokens by the number of matched tokens: the fitted rates, corrected by counts."""

    def __init__(self) -> None:
        self.seen = [[0.0] * len(BOUNDS), [0.0] * len(BOUNDS)]  # of first children, and of others
        self.accepted = [[0.0] * len(BOUNDS), [0.0] * len(BOUNDS)]

    def of(self, matched: int, rank: int) -> float:
        bin, kind = bisect_right(BOUNDS, matched) - 1, min(rank, 1)
        fitted = (FIRST, OTHERS)[kind][bin]
        return (PRIOR_TOKENS * fitted + self.accepted[kind][bin]) / (PRIOR_TOKENS + self.seen[kind][bin])

    def learn(self, matched: int, rank: int, accepted: bool) -> None:
        bin, kind = bisect_right(BOUNDS, matched) - 1, min(rank, 1)
        self.seen[kind][bin] += 1
        self.accepted[kind][bin] += accepted


class TextSource:
    """Drafts of one request, copied from its own text and from others. In each cycle call `propose`, then `extend`.

    Args:
        tokens: of the prompt.
        others: indices of other texts, such as references; they are not changed, so requests may share them.
    """

    def __init__(self, tokens: Sequence[int], config: TextDrafts, others: Sequence[TextIndex] = ()) -> None:
        self.config, self.others = config, others
        self.index, self.rates = TextIndex(), Rates()
        self.index.extend(tokens)
        self.proposed: Copies | None = None  # in this cycle

    def propose(self, forced: Copies | None = None, left: int = 256) -> Copies | None:
        """Copies that may follow the text; None if nothing is likely enough.

        Args:
            forced: tokens that a grammar forces; the copies are added to them.
            left: tokens left until the answer's limit, not counting the target's own one.
        """
        text, most = self.index.tokens, self.config.places
        matches = [(matched, place, index) for index in (self.index, *self.others)
                   for matched, place in index.matches(text, most)]
        matches.sort(key=lambda match: -match[0])  # stable: among equals the request's own text, then the newest place
        copies = Copies([], [], [], [], []) if forced is None else forced
        children = {edge: node for node, edge in enumerate(zip(copies.parents, copies.tokens, strict=True))}
        counts = dict.fromkeys(copies.parents, 1)  # children by node
        for matched, place, index in matches[:most]:
            node, score = -1, 0.0
            for ahead, token in enumerate(index.continuation(place, min(self.config.longest, left))):
                child = children.get((node, token))
                if child is None:
                    rank, reached = counts.get(node, 0), min(matched + ahead, LONGEST_MATCH)
                    score += math.log(self.rates.of(reached, rank) * (self._missed(node, copies) if rank else 1.0))
                    if score < LEAST_SCORE:
                        break
                    child = children[node, token] = len(copies.tokens)
                    counts[node] = rank + 1
                    for column, value in zip(copies, (token, node, score, reached, rank), strict=True):
                        column.append(value)
                node, score = child, copies.scores[child]
        self.proposed = copies if copies.tokens else None
        return self.proposed

    @staticmethod
    def _missed(parent: int, copies: Copies) -> float:
        """The probability that none of a node's children so far is accepted, if the node is."""
        above = 0.0 if parent < 0 else copies.scores[parent]
        accepted = sum(math.exp(score - above) for mine, score in zip(copies.parents, copies.scores, strict=True)
                       if mine == parent)
        return max(1e-6, 1.0 - accepted)

    def extend(self, emitted: Sequence[int]) -> None:
        """Append the emitted tokens to the text, and learn from them."""
        self.learn(emitted)
        self.index.extend(emitted)

    def learn(self, emitted: Sequence[int]) -> None:
        """Count which of the proposed tokens were emitted."""
        copies, node = self.proposed, -1
        self.proposed = None
        for token in emitted if copies is not None else ():
            children = [child for child, parent in enumerate(copies.parents) if parent == node]
            node = -1
            for child in children:
                accepted = copies.tokens[child] == token
                if copies.matched[child]:
                    self.rates.learn(copies.matched[child], copies.ranks[child], accepted)
                if accepted:
                    node = child
                    break
            if node < 0:
                break
