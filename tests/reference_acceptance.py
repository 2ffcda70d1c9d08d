"""The acceptance rules once more, slow and obvious: one row, one node, one token at a time."""

import math
from functools import cached_property

import torch
from tiny import TEXTS

INF = math.inf


def softmax(logits):
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kl_divergence(first, second):
    total = 0.0
    for a, b in zip(first, second, strict=True):
        if a > 0:
            total += a * math.log(a / b) if b > 0 else INF
    return total


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
    """One row of a verification under a rule: what is drawn at each node, and if the walk goes on there."""

    def __init__(self, rule, verification, row):
        tree = verification.tree
        self.rule, *self.gates = rule.parts  # the first one decides, the gates behind it veto
        self.threshold = rule.threshold
        self.tokens = tree.tokens[row].tolist()
        self.parents = tree.parents[row].tolist()
        self.draft_rows = tree.draft_rows[row].tolist()
        self.scores = tree.scores[row].tolist()
        self.target_logits = verification.target_logits[row].tolist()
        self.warped_logits = verification.warped_logits[row].tolist()
        self.draft_logits = verification.draft_logits[row].tolist()
        self.features = None if verification.features is None else verification.features[row].tolist()
        self.greedy = verification.noise is None
        self.regret_before = 0.0 if verification.regret is None else verification.regret[row].item()
        self.answer = [] if verification.answers is None else verification.answers[row].tolist()
        self.said = 1 if verification.said is None else verification.said[row].item()
        noise = torch.zeros_like(verification.warped_logits) if self.greedy else verification.noise
        self.noise = noise[row].tolist()
        self.noisy = (verification.warped_logits[row] + noise[row]).tolist()

    @cached_property
    def child_lists(self):
        nodes = range(len(self.parents))
        return [[n for n in nodes if n != 0 and self.parents[n] == v] for v in nodes]

    def children(self, v):
        return self.child_lists[v]

    def exact_token(self, v):
        return max(range(len(self.noisy[v])), key=lambda token: self.noisy[v][token])

    def exact_child(self, v):
        return next((c for c in self.children(v) if self.tokens[c] == self.exact_token(v)), None)

    def guarded(self, v, child):
        if self.rule.head_guard is None:
            return True
        probs = softmax(self.target_logits[v])
        return probs[self.tokens[child]] >= (1 - self.rule.head_guard) * max(probs)

    def candidates(self, v):
        return [c for c in self.children(v) if self.warped_logits[v][self.tokens[c]] > -INF and self.guarded(v, c)]

    def open_to(self, rule, v):
        """`candidates` of a rule that may stand behind a +, where the first one's guard is not its own."""
        return [c for c in self.children(v) if self.warped_logits[v][self.tokens[c]] > -INF
                and (rule.head_guard is None or self.guarded(v, c))]

    def shut(self, rule):
        """Whether the gate is closed throughout."""
        return rule.threshold == 0 and (
            rule.name in ("fsd", "fly", "regret", "judge", "prose", "afterword")
            or rule.name == "relaxed" and self.greedy)

    def allowed(self, v):
        """Children that all gates let a fuzzy step go to."""
        found = self.candidates(v)
        for rule in (self.rule, *self.gates):
            passes = getattr(self, f"{rule.name}_passes")
            found = [c for c in found if not self.shut(rule) and passes(rule, v, c)]
        return found

    def preferred(self, v, children):
        return max(children, key=lambda c: self.noisy[v][self.tokens[c]])

    def choice(self, v):
        """(token drawn at v, whether the walk may go on below v)."""
        if hasattr(self, f"{self.rule.name}_passes"):
            return self.among(v)
        return getattr(self, self.rule.name)(v)

    def walk(self):
        path, v = [0], 0
        while True:
            token, goes_on = self.choice(v)
            child = next((c for c in self.children(v) if self.tokens[c] == token), None)
            if child is None or not goes_on:
                return path, token
            path.append(child)
            v = child

    # --- the rules -------------------------------------------------------------------------------

    def exact(self, v):
        return self.exact_token(v), True

    def among(self, v):
        """A fuzzy step to one of the children allowed, if any; exact steps stay open to every rule."""
        exact_child, allowed = self.exact_child(v), self.allowed(v)
        if not allowed:
            return self.exact_token(v), True
        if self.rule.sibling == "longest":
            eligible = set(allowed) | ({exact_child} - {None})
            lengths = {c: self.longest_path(c) for c in eligible}
            best = self.preferred(v, [c for c in eligible if lengths[c] == max(lengths.values())])
        elif exact_child is not None:
            best = exact_child
        elif self.rule.sibling == "target":
            best = self.preferred(v, allowed)
        else:
            best = max(allowed, key=lambda c: self.scores[c])
        return self.tokens[best], True

    def longest_path(self, v):
        eligible = set(self.allowed(v)) | ({self.exact_child(v)} - {None})
        return max((1 + self.longest_path(c) for c in eligible), default=0)

    def node_divergence(self, v, rule=None):
        return divergence((rule or self.rule).divergence, self.target_logits[v], self.draft_logits[self.draft_rows[v]])

    def fsd_passes(self, rule, v, child):
        return self.node_divergence(v, rule) <= rule.threshold

    def fsd_paper(self, v):
        if self.children(v) and self.node_divergence(v) <= self.threshold:
            first = max(self.children(v), key=lambda c: self.scores[c])
            if first in self.candidates(v) or first == self.exact_child(v):
                return self.tokens[first], True
        return self.exact_token(v), False

    def typical_passes(self, rule, v, child):
        probs = softmax(self.target_logits[v])
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        return probs[self.tokens[child]] > (1 - rule.threshold) * min(0.09, 0.3 * math.exp(-entropy))

    def relaxed_passes(self, rule, v, child):
        best = sorted(self.target_logits[v], reverse=True)[: rule.top]
        logit = self.target_logits[v][self.tokens[child]]
        return logit in best and best[0] - logit <= rule.threshold

    def fly_passes(self, rule, v, child):
        three = sorted(softmax(self.target_logits[v]), reverse=True)[:3]
        if rule.renormalised:
            three = [p / sum(three) for p in three]
        entropy = -sum(p * math.log(p) for p in three if p > 0)
        node = child
        for _ in range(rule.window - 1):
            node = None if node is None else self.exact_child(node)
        return node is not None and entropy >= math.log(3) - rule.threshold

    def regret_passes(self, rule, v, child):
        spent, fuzzy, depth, node = self.regret_before, 0, 0, child
        while node != 0:
            parent = self.parents[node]
            if node != self.exact_child(parent):
                spent += max(self.target_logits[parent]) - self.target_logits[parent][self.tokens[node]]
                fuzzy += 1
            node, depth = parent, depth + 1
        parent, within = self.parents[child], spent <= rule.threshold * math.ceil((self.said + depth) / 100)
        return within and fuzzy <= rule.most and child == self.preferred(parent, self.open_to(rule, parent))

    def prose_passes(self, rule, v, child, behind_only=False):
        path, node = [], v
        while node != 0:
            path, node = [self.tokens[node], *path], self.parents[node]
        fences = "".join(TEXTS[token] for token in [*self.answer, *path] if token >= 0).count("```")
        token, best = self.tokens[child], max(self.target_logits[v])
        if fences % 2 or (behind_only and not fences) or "`" in TEXTS[token] + TEXTS[self.exact_token(v)]:
            return False
        return best - self.target_logits[v][token] <= rule.threshold and child == self.preferred(
            v, self.open_to(rule, v))

    def afterword_passes(self, rule, v, child):
        return self.prose_passes(rule, v, child, behind_only=True)

    def judge_passes(self, rule, v, child):
        token, draft_logits = self.tokens[child], self.draft_logits[self.draft_rows[v]]
        probs, drafted = softmax(self.target_logits[v]), softmax(draft_logits)
        known = self.features[child][-rule.learned.width :] + [
            math.log(probs[token]), max(self.target_logits[v]) - self.target_logits[v][token],
            -sum(p * math.log(p) for p in probs if p > 0), math.log(drafted[token]),
            divergence("js", self.target_logits[v], draft_logits)]
        parts = (rule.learned.weight.tolist(), rule.learned.mean.tolist(), rule.learned.scale.tolist(), known)
        odds = rule.learned.bias + sum(w * (x - m) / s for w, m, s, x in zip(*parts, strict=True))
        best = max(self.open_to(rule, v), key=lambda c: self.target_logits[v][self.tokens[c]])
        if probs[token] < rule.learned.floor * max(probs):  # nothing like it was mined
            return False
        return child == best and 1 / (1 + math.exp(-odds)) < rule.threshold

    def lenience(self, v):
        lifted = [self.tokens[c] for c in self.candidates(v)]
        probs = softmax(self.warped_logits[v])
        mass = sum(probs[token] for token in lifted)
        if self.greedy or self.threshold == 0 or mass == 0 or self.exact_child(v) is not None:
            return self.exact_token(v), True
        lifted_mass = min(1.0, mass / math.exp(-self.threshold))
        weights = []
        for token, p in enumerate(probs):
            p *= lifted_mass / mass if token in lifted else (1 - lifted_mass) / (1 - mass)
            weights.append(math.log(p) + self.noise[v][token] if p > 0 else -INF)
        return max(range(len(weights)), key=lambda token: weights[token]), True

    def tilt(self, v):
        if self.threshold == 0:
            return self.exact_token(v), True
        return self.tilt_greedy(v) if self.greedy else self.tilt_sampling(v)

    def reward(self, v, child):
        """1 while the path from the root to the child stays inside the head, else 0."""
        while child != 0:
            if not self.guarded(self.parents[child], child):
                return 0
            child = self.parents[child]
        return 1

    def tilt_value(self, v):
        probs = softmax(self.warped_logits[v])
        total = 0.0
        for c in self.children(v):
            gain = self.threshold * self.reward(v, c) + self.tilt_value(c)
            total += probs[self.tokens[c]] * math.expm1(gain)
        return math.log1p(total)

    def tilt_sampling(self, v):
        weights = list(self.noisy[v])
        for c in self.children(v):
            weights[self.tokens[c]] += self.threshold * self.reward(v, c) + self.tilt_value(c)
        return max(range(len(weights)), key=lambda token: weights[token]), True

    def tilt_options(self, v):
        """Admissible children with what the best path through each gains."""
        gains = {}
        for c in self.children(v):
            regret = max(self.warped_logits[v]) - self.warped_logits[v][self.tokens[c]]
            if c == self.exact_child(v):
                gains[c] = 1 + self.tilt_best(c)
            elif c in self.candidates(v) and regret <= self.rule.max_regret:
                gains[c] = 1 - regret / self.threshold + self.tilt_best(c)
        return gains

    def tilt_best(self, v):
        return max(0.0, *self.tilt_options(v).values(), 0.0)

    def tilt_greedy(self, v):
        gains = {c: gain for c, gain in self.tilt_options(v).items() if gain > 0}
        if not gains:
            return self.exact_token(v), True
        best = self.preferred(v, [c for c in gains if gains[c] == max(gains.values())])
        return self.tokens[best], True
