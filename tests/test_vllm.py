"""Acceptance on vLLM's chains, without vLLM; with it: test_vllm_server.py."""

import sys
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from reference_acceptance import divergence

from eagle_fsd.serve import vllm as plugin

VOCAB, LENGTH, ROWS = 5, 2, 6000
DRAFT = [3, 1]  # the chain: other tokens end it


def logits(seed: int, count: int) -> torch.Tensor:
    return 1.5 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


RAW, HEAD = logits(4, LENGTH + 1), logits(4, LENGTH) + logits(7, LENGTH) / 3
P, PROCESSED = RAW.softmax(-1).tolist(), RAW / 0.7
Q = PROCESSED.softmax(-1).tolist()


def request(threshold=None, temperature=0.7, **more):
    extra = {"other": 1} if threshold is None else {"eagle_fsd_threshold": threshold, **more}
    return SimpleNamespace(sampling_params=SimpleNamespace(temperature=temperature, extra_args=extra))


def verify(requests, drafted=None, tokens=None, bonus=None, processed=PROCESSED, generators=None, head=HEAD):
    """vLLM's rejection sampler for these requests, which said 9 for all of them, and what the plug-in makes of it."""
    rows, drafted = plugin.FuzzyRows(), [LENGTH] * len(requests) if drafted is None else drafted
    for number, each in enumerate(requests):
        each.req_id = str(number)
    ends = [[*range(count), LENGTH] for count in drafted]  # the nodes of each chain, and the one after it
    if head is not None:
        rows.draft = {each.req_id: row for row, each in enumerate(requests)}, head.expand(len(requests), -1, -1)
    rows.verifying = rows.rules(requests), requests, RAW[sum(ends, [])]
    rows.generator = torch.Generator().manual_seed(0)
    output = torch.full((len(requests), LENGTH + 1), 9, dtype=torch.int32)
    nodes = [node for each in ends for node in each[:-1]]
    bonus = torch.full((len(requests), 1), 4) if bonus is None else bonus
    rows.replace(output, drafted, torch.tensor(tokens or DRAFT, dtype=torch.int32)[nodes], processed[nodes], bonus,
                 generators or {})
    return output, rows


def chances(rule: str, threshold: float) -> list[float]:
    """By hand: the probability that the draft's token is taken at each of its nodes."""
    found = []
    for node, token in enumerate(DRAFT):
        p, q = P[node], Q[node]
        entropy = -sum(x * torch.tensor(x).log().item() for x in p)
        passes = {
            "fsd": divergence("js", RAW[node].tolist(), HEAD[node].tolist()) <= threshold,
            "typical": p[token] > (1 - threshold) * min(0.09, 0.3 * 2.718281828 ** -entropy),
            "relaxed": p[token] >= max(p) * 2.718281828 ** -threshold,
        }
        found.append(min(1, q[token] * 2.718281828 ** threshold) if rule == "lenience" else
                     1.0 if passes[rule] else q[token])
    return found


@pytest.mark.parametrize(("rule", "threshold"), [
    ("fsd", 0.01), ("fsd", 0.05), ("fsd", 9.0), ("typical", 0.1), ("relaxed", 0.5), ("lenience", 0.4)])
def test_rows_with_a_threshold_have_the_rules_law_and_others_stay(rule, threshold):
    fuzzy = request(threshold, eagle_fsd_rule=rule, **{} if rule == "lenience" else {"eagle_fsd_head_guard": 1})
    bonus = torch.multinomial(torch.tensor(Q[LENGTH]), ROWS, True, generator=torch.Generator().manual_seed(1))[:, None]
    requests = [request(threshold, **fuzzy.sampling_params.extra_args) if row % 2 else request() for row in range(ROWS)]
    output, rows = verify(requests, bonus=bonus)
    assert (output[::2] == 9).all()
    assert rows.counts[:2] == [ROWS // 2, ROWS // 2 * LENGTH]
    taken, law = chances(rule, threshold), {}
    for node, token in product(range(LENGTH + 1), range(VOCAB)):
        accepted = torch.tensor(taken[:node]).prod().item()
        if node == LENGTH:
            law[(*DRAFT, token)] = accepted * Q[node][token]
        elif token != DRAFT[node]:
            law[(*DRAFT[:node], token)] = accepted * (1 - taken[node]) * Q[node][token] / (1 - Q[node][DRAFT[node]])
    counts = Counter(tuple(token for token in row if token >= 0) for row in output[1::2].tolist())
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    for said, chance in law.items():
        expected = chance * ROWS / 2
        assert abs(counts.pop(said, 0) - expected) <= 4.5 * (expected * (1 - chance)) ** 0.5 + (2 if expected else 0)
    assert not counts


def test_greedy_rows_of_different_lengths_and_thresholds():
    """The target's best token is 0 everywhere, the chain's next best; at node 1 the grammar forbids the chain's."""
    raw = torch.tensor([[3.0, 0, 0, 2.9, 0], [3.0, 2.9, 0, 0, 0], [0.0, 0, 5, 0, 0]])
    forbidden = raw.clone()
    forbidden[1, 1] = -torch.inf

    def said(*requests, drafted, processed=raw, tokens=None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "RAW", raw)
            output, rows = verify(requests, drafted, tokens, processed=processed, head=raw[:LENGTH])
        return output.tolist(), rows.counts[3]

    fuzzy, exact, loose = request(0.3, 0), request(0, 0), request(0.5, 0, eagle_fsd_rule="relaxed")
    assert said(exact, fuzzy, loose, drafted=[2, 1, 2]) == ([[9, 9, 9], [3, 4, -1], [3, 1, 4]], 3)
    assert said(fuzzy, request(0.3, 0), drafted=[0, 2], processed=forbidden) == ([[9, 9, 9], [3, 0, -1]], 1)
    assert said(fuzzy, drafted=[2], tokens=[3, -1]) == ([[3, 0, -1]], 1)  # -1: filled up, never a draft token


def test_without_the_drafts_logits_nothing_is_fuzzy_and_a_seed_repeats():
    def seeds():
        return {row: torch.Generator().manual_seed(row % 3) for row in range(6)}

    first, rows = verify([request(9.0) for _ in range(6)], generators=seeds(), head=None)
    assert rows.counts[3] == 0
    again, _ = verify([request(9.0) for _ in range(6)], generators=seeds(), head=None)
    assert first.tolist() == again.tolist() and first[:3].tolist() == first[3:].tolist()


def check(on_cpu=False, temperature=0.0, drafts=True, extra=None, **change):
    """Of a request with a threshold, unless other arguments are given, to a server that drafts with a head."""
    server = {"method": "eagle", "draft_sample_method": "greedy", "rejection_sample_method": "standard"} | change
    extra = {"threshold": 0.3} if extra is None else extra
    extra = {f"eagle_fsd_{name}": each for name, each in extra.items()}
    params = SimpleNamespace(temperature=temperature, extra_args=extra)
    plugin.check_request(params, SimpleNamespace(**server) if drafts else None, on_cpu)


def test_what_can_be_served_is_taken():
    check()
    check(temperature=1.0)
    check(on_cpu=True)
    check(on_cpu=True, temperature=1.0, extra={"threshold": 0})
    check(extra={}, drafts=False)
    check(extra={"threshold": 0.3, "rule": "relaxed"}, method="ngram")


@pytest.mark.parametrize(("given", "message"), [
    ({"extra": {"threshold": -1}}, r"threshold of rule 'fsd' must lie in \[0, inf\], got -1"),
    ({"extra": {"threshold": "0.3"}}, "must be a number, got '0.3'"),
    ({"extra": {"threshold": 0.3, "rule": "x"}}, "unknown rule 'x'; accepted: exact, fsd"),
    ({"extra": {"threshold": 0.3, "guard": 1}}, "no option 'guard'; accepted: threshold, head_guard, divergence"),
    ({"extra": {"rule": "typical"}}, "eagle_fsd_rule without eagle_fsd_threshold"),
    ({"extra": {"threshold": 0.3, "rule": "ensemble"}}, "rule 'ensemble', which was removed: use 'fsd'"),
    ({"method": "ngram"}, "which method 'ngram' does not provide"),
    ({"draft_sample_method": "probabilistic"}, "needs draft_sample_method greedy"),
    ({"drafts": False}, "needs drafts: start the server with --speculative-config"),
    ({"on_cpu": True, "temperature": 1.0}, "needs temperature 0 there, got 1.0"),
])
def test_what_cannot_be_served_is_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check(**given)


def test_it_does_nothing_unless_switched_on_and_refuses_other_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1+cpu"))
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(RuntimeError, match="not tested with vLLM 0.99.1: install 0.32.0, or unset EAGLE_FSD_VLLM"):
        plugin.register()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(RuntimeError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        plugin.register()
