"""A slow and obvious implementation of the walk and the acceptance rules: one row, one node, one token at a time."""

import math
from functools import cached_property

INF = math.inf


def softmax(logits):
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p > 0)


def kl_divergence(first, second):
    return sum(a * math.log(a / b) if b > 0 else INF for a, b in zip(first, second, strict=True) if a > 0)


def divergence(name, target_logits, draft_logits):
    target_probs, draft_probs = softmax(target_logits), softmax(draft_logits)
    if "_top" in name:
        name, count = name.split("_top")
        kept = sorted(range(len(target_probs)), key=lambda token: -target_probs[token])[: int(count)]
        target_probs, draft_probs = (
            [probs[token] for token in kept] + [sum(p for token, p in enumerate(probs) if token not in kept)]
            for probs in (target_probs, draft_probs)
        )
    mean = [(a + b) / 2 for a, b in zip(target_probs, draft_probs, strict=True)]
    if name == "kl":
        return kl_divergence(target_probs, draft_probs)
    if name == "reverse_kl":
        return kl_divergence(draft_probs, target_probs)
    if name == "js":
        return kl_divergence(target_probs, mean) / 2 + kl_divergence(draft_probs, mean) / 2
    if name == "js_fsd_code":
        return kl_divergence(mean, target_probs) / 2 + kl_divergence(mean, draft_probs) / 2
    assert name == "tv"
    return sum(abs(a - b) for a, b in zip(target_probs, draft_probs, strict=True)) / 2


class Reference:
    """One row of a `random_trees.Case` under a rule, with its own threshold and budget."""

    def __init__(self, rule, case, row, threshold, left=INF, inside=True, marks=(-1, -1)):
        self.rule, self.threshold, self.left = rule, threshold, left
        self.inside, self.marks = inside, marks  # whether the rule applies, and the tokens that turn it on and off
        self.tokens, self.parents, depths, draft_rows, self.scores = (
            getattr(case.tree, name)[row].tolist() for name in ("tokens", "parents", "depths", "draft_rows", "scores"))
        self.raw, self.warped = case.raw[row].tolist(), case.warped[row].tolist()
        self.greedy = case.gumbel is None
        self.noise = [[0.0] * len(self.raw[0]) if self.greedy else case.gumbel[row, depth].tolist() for depth in depths]
        # The draft's logits of all tokens at each node that it expanded; -inf outside its vocabulary.
        names = range(len(self.raw[0])) if case.draft_tokens is None else case.draft_tokens.tolist()
        self.draft = [[-INF] * len(self.raw[0]) for _ in depths]
        for v, (depth, at) in enumerate(zip(depths, draft_rows, strict=True)):
            if at >= 0 and depth < len(case.draft_logits):
                for token, logit in zip(names, case.draft_logits[depth][row, at].tolist(), strict=True):
                    self.draft[v][token] = logit

    # --- the walk --------------------------------------------------------------------------------

    def children(self, v):
        return self.child_lists[v]

    @cached_property
    def child_lists(self):
        nodes = range(len(self.parents))
        return [[n for n in nodes if n != 0 and self.parents[n] == v] for v in nodes]

    def drawn(self, v, weights):
        """The first token of the largest log-weight plus noise."""
        noisy = [weight + noise for weight, noise in zip(weights, self.noise[v], strict=True)]
        return noisy.index(max(noisy))

    def exact_token(self, v):
        return self.drawn(v, self.warped[v])

    def walk(self):
        """(node, token, whether the token is exact, whether the budget is spent) of each step."""
        path, v, closed = [], 0, False
        while True:
            exact, (weights, goes_on) = self.exact_token(v), getattr(self, self.rule.name)(v)
            token = self.drawn(v, weights)
            if not self.inside:
                token, goes_on = exact, True
            regret = self.regret(v, token)
            if token != exact and regret > self.left:
                closed = True
            if closed:
                token, goes_on = exact, True
            elif token != exact:
                self.left -= regret
            if token in self.marks:
                self.inside = token == self.marks[0]
            path.append((v, token, token == exact, closed))
            child = next((c for c in self.children(v) if self.tokens[c] == token), None)
            if child is None or not goes_on:
                return path
            v = child

    def regret(self, v, token):
        return max(self.raw[v]) - self.raw[v][token]

    # --- shared by the rules ---------------------------------------------------------------------

    def guarded(self, v, child):
        """p(x) >= (1 - alpha) max p, at temperature 1."""
        probs = softmax(self.raw[v])
        return self.rule.head_guard is None or probs[self.tokens[child]] >= (1 - self.rule.head_guard) * max(probs)

    def candidates(self, v):
        return [c for c in self.children(v) if self.warped[v][self.tokens[c]] > -INF and self.guarded(v, c)]

    def among(self, v, allowed):
        """A fuzzy step to the target's favourite among the allowed children; exact steps stay possible."""
        if not allowed:
            return self.warped[v], True
        kept = {self.tokens[c] for c in allowed} | {self.tokens[c] for c in self.children(v)} & {self.exact_token(v)}
        return [logit if token in kept else -INF for token, logit in enumerate(self.warped[v])], True

    def divergence(self, v):
        return divergence(self.rule.divergence, self.raw[v], self.draft[v])

    def reported(self, v):
        """The divergence in receipts; NaN if no step of the rule depends on it."""
        exact = any(self.tokens[c] == self.exact_token(v) for c in self.children(v))
        asked = self.children(v) if self.rule.name == "fsd_paper" else (
            self.rule.name == "fsd" and not exact and self.candidates(v))
        return self.divergence(v) if asked else math.nan

    # --- the rules: log-weights [V] of all tokens, and whether the walk may go on ------------------

    def exact(self, v):
        return self.warped[v], True

    def fsd(self, v):
        passes = self.children(v) and self.divergence(v) <= self.threshold
        return self.among(v, self.candidates(v) if passes else [])

    def fsd_paper(self, v):
        passes = self.children(v) and self.divergence(v) <= self.threshold
        first = max(self.children(v), key=lambda c: self.scores[c], default=None)  # the first on ties
        allowed = {self.tokens[first]} if passes else set()
        allowed &= {self.tokens[c] for c in self.candidates(v)} | {self.exact_token(v)}
        if not allowed:
            return self.warped[v], False
        return [logit if token in allowed else -INF for token, logit in enumerate(self.warped[v])], True

    def typical(self, v):
        probs = softmax(self.raw[v])
        bar = (1 - self.threshold) * min(0.09, 0.3 * math.exp(-entropy(probs)))
        return self.among(v, [c for c in self.candidates(v) if probs[self.tokens[c]] > bar])

    def relaxed(self, v):
        best = sorted(self.raw[v], reverse=True)[: self.rule.top]
        return self.among(v, [c for c in self.candidates(v) if self.raw[v][self.tokens[c]] in best
                              and self.regret(v, self.tokens[c]) <= self.threshold])

    def lenience(self, v):
        """The mass P of the candidates becomes min(1, P / l), unless a child is the exact token."""
        probs, lifted = softmax(self.warped[v]), {self.tokens[c] for c in self.candidates(v)}
        mass = math.fsum(probs[token] for token in lifted)
        if self.greedy or not mass or any(self.tokens[c] == self.exact_token(v) for c in self.children(v)):
            return self.warped[v], True
        rest = math.fsum(p for token, p in enumerate(probs) if token not in lifted)
        more = min(1.0, mass * math.exp(self.threshold))
        factors = [more / mass if token in lifted else (1 - more) / (rest or 1.0) for token in range(len(probs))]
        return [logit + (math.log(f) if f else -INF) for logit, f in zip(self.warped[v], factors, strict=True)], True
