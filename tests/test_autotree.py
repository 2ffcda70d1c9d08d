"""tree="auto": the confidence, the replay of logged cycles, the choice, stopping and pauses."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import PROMPT, save_pair, tiny_pair
from transformers import LogitsProcessorList

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli import main
from eagle_fsd.drafting import fitting
from eagle_fsd.drafting.choice import TRIED_NODES, AutoTree, choose
from eagle_fsd.drafting.confidence import apply_confidence, confidence_lines
from eagle_fsd.drafting.config import CPU_TREE, Choice, Confidence, TreeConfig
from eagle_fsd.drafting.fitting import fit_confidence
from eagle_fsd.drafting.latency import Latency, between
from eagle_fsd.drafting.logs import LEAST_CYCLES, LOGGED_TREE, CycleLog, LoggedCycle, TreeLog, read_logs, store_log
from eagle_fsd.drafting.machine import known_latency
from eagle_fsd.drafting.measuring import ROW_TREE, ROWS, _with_rows, measure, share_of
from eagle_fsd.drafting.policy import Pause
from eagle_fsd.drafting.replay import Replay
from eagle_fsd.engine.decoder import Decoder
from eagle_fsd.engine.request import BatchSettings, RequestSettings
from eagle_fsd.heads.checkpoint import save_head

FREE = Latency({1: 1.0}, {k: 0.0 for k in (1, 2, 3, 4)}, 1.0)  # drafting costs nothing
TREE = TreeConfig(16, 5, 4)
DEAR = Latency({1: 10.0, 2: 18.0}, {k: 9.0 for k in (1, 2, 3, 4)}, 1.0)


def prompts(count: int) -> list[list[int]]:
    return torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(3)).tolist()


def logged(model, tree: TreeConfig, count: int = 12, tokens: int = 30) -> list[LoggedCycle]:
    noted = CycleLog(make_rule("exact"))
    for prompt in prompts(count):
        eagle_fsd.generate(prompt, model, acceptance=noted, tree=tree, max_new_tokens=tokens)
    return noted.cycles


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def cycles(pair):
    return logged(pair, LOGGED_TREE, count=24)


def test_a_logged_cycle_is_the_tree_and_what_became_of_it(cycles):
    for cycle in cycles[:20]:
        assert len(cycle.parents) == LOGGED_TREE.total_tokens - 1
        assert all(parent < node for node, parent in enumerate(cycle.parents))
        for node, parent in enumerate(cycle.parents):
            siblings = [n for n, other in enumerate(cycle.parents) if other == parent]
            assert sorted(cycle.ranks[n] for n in siblings) == list(range(len(siblings)))
            better = [n for n in siblings if cycle.ranks[n] < cycle.ranks[node]]
            assert all(cycle.log_probs[n] >= cycle.log_probs[node] for n in better)
        taken = [node for node, kept in enumerate(cycle.accepted) if kept]
        assert [cycle.parents[node] for node in taken] == [-1, *taken[:-1]][: len(taken)]  # one path from the root


@pytest.mark.parametrize("shape", [(2, 1, 1), (5, 4, 1), (8, 3, 3), (12, 5, 2), (16, 6, 4)], ids=str)
def test_a_replay_equals_decoding_with_the_smaller_tree(pair, shape):
    """In the first cycle after a prompt both see the same state."""
    wide, small = TreeConfig(64, 12, 4), TreeConfig(*shape)
    for prompt in prompts(20):
        noted = CycleLog(make_rule("exact"))
        eagle_fsd.generate(prompt, pair, acceptance=noted, tree=wide, max_new_tokens=14)
        real = eagle_fsd.generate(prompt, pair, acceptance="exact", tree=small, max_new_tokens=14)
        replay = Replay(noted.cycles[:1], None, small.top_k)
        tokens, _, _ = replay.run(small, np.array([small.total_tokens]))
        assert tokens.item() == 1 + real.stats.accepted_lengths[0]


def test_isotonic_rates_by_hand(monkeypatch):
    """Three bins of two edges; the second rate, 0.5, falls behind the first, 2.5 of 3: together 4 of 6."""
    monkeypatch.setattr(fitting, "BINS", 3)
    at, rates = fitting._isotonic(np.array([-3.0, -3, -2, -2, -1, -1]), np.array([1.0, 1, 0, 1, 1, 1]))
    assert at.tolist() == [-3, -2, -1] and np.exp(rates) == pytest.approx([4 / 6, 4 / 6, 2.5 / 3])


def test_isotonic_fit_finds_the_rates():
    """Edges that are accepted as often as a rising function of their probability says."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(6000):
        probability = random.uniform(0.05, 0.95)
        first, second = random.random() < probability**2, random.random() < (1 - probability) / 4
        made.append(LoggedCycle([-1, -1], [0, 1], [math.log(probability), math.log(1 - probability)],
                          [first, second and not first]))
    fitted = confidence_lines(fit_confidence(made), 2, torch.device("cpu"))
    for probability in (0.2, 0.5, 0.8):
        found = apply_confidence(fitted, torch.tensor([[math.log(probability), math.log(1 - probability)]])).exp()[0]
        assert found[0].item() == pytest.approx(probability**2, abs=0.05)
        assert found[1].item() == pytest.approx((1 - probability) / 4 * (1 - probability**2), abs=0.05)
    assert fit_confidence(made[:20]) is None


def test_confidence_is_linear_between_knots_and_constant_outside():
    confidence = Confidence((-4.0, -2.0, 0.0), (-3.0, -1.0, -0.5), (-6.0, -5.0, -4.0))
    lines = confidence_lines(confidence, 2, torch.device("cpu"))
    found = apply_confidence(lines, torch.tensor([[-1.0, -1.0], [-9.0, -9.0], [0.0, -3.0]]))
    assert found.tolist() == [[-0.75, -4.5], [-3.0, -6.0], [-0.5, -5.5]]


@pytest.mark.parametrize("knots", [((0.0,), (0.0,), (0.0,)), ((0, -1), (-1, 0), (-1, 0)), ((-1, 0), (0, -1), (-1, 0)),
                                   ((-1, 0), (-1, 0.5), (-1, 0)), ((-1, 0), (-1, 0), (-math.inf, 0)),
                                   ((-1, -1), (-1, 0), (-1, 0))])
def test_bad_confidences_are_refused(knots):
    with pytest.raises(ValueError, match="Confidence"):
        Confidence(*knots)


def test_the_choice_depends_on_what_drafting_costs(cycles):
    free, dear = choose(cycles, FREE), choose(cycles, DEAR)
    assert free.tree is not None and free.tree.total_tokens > 16 and free.rate > 1.5
    assert dear.tree is None and dear.cost(2, 1) == 18
    middling = choose(cycles, Latency({1: 1.1, 64: 5.1}, {k: 0.1 * k for k in (1, 2, 3, 4)}, 1.0))
    assert middling.tree is not None and middling.tree.total_tokens < free.tree.total_tokens
    assert middling.tree.confidence is not None
    fixed = choose(cycles, FREE, stopping=False).tree
    assert fixed is not None and fixed.least_reach == fixed.least_probability == 0


def test_stopping_rules_shrink_the_tree_and_change_no_token(pair):
    loose = TreeConfig(24, 6, 3)
    for options in ({"least_reach": 0.5}, {"least_probability": 0.2}, {"least_reach": 0.3, "least_probability": 0.1}):
        tree = TreeConfig(24, 6, 3, **options)
        for prompt in prompts(4):
            seen = []

            def rule(verification, seen=seen):
                seen.append(verification.tree)
                return make_rule("exact")(verification)

            found = eagle_fsd.generate(prompt, pair, acceptance=rule, tree=tree, max_new_tokens=30)
            plain = eagle_fsd.generate(prompt, pair, acceptance="exact", tree=loose, max_new_tokens=30)
            assert found.token_ids == plain.token_ids
            assert found.stats.undrafted == sum(tree.max_depth == 0 for tree in seen)
            assert len({tree.tokens.shape[1] for tree in seen}) > 1
            if "least_probability" in options:
                assert all(t.scores.exp().min() >= options["least_probability"] - 1e-6 for t in seen)


def test_replayed_stopping_equals_real_stopping(pair):
    tree, deepest = TreeConfig(24, 6, 3, least_reach=0.4, least_probability=0.05), 0
    for prompt in prompts(20):
        noted, seen = CycleLog(make_rule("exact")), []

        def rule(verification, seen=seen):
            seen.append(verification.tree)
            return make_rule("exact")(verification)

        eagle_fsd.generate(prompt, pair, acceptance=noted, tree=TreeConfig(64, 12, 4), max_new_tokens=14)
        real = eagle_fsd.generate(prompt, pair, acceptance=rule, tree=tree, max_new_tokens=14)
        replay = Replay(noted.cycles[:1], None, tree.top_k)
        tokens, verified, levels = replay.run(tree, np.array([tree.total_tokens]))
        assert tokens.item() == 1 + real.stats.accepted_lengths[0]
        assert verified.item() == seen[0].tokens.shape[1]
        if seen[0].max_depth:
            assert levels.item() >= seen[0].max_depth  # a drafted level may have no node that is kept
            deepest += levels.item() == seen[0].max_depth
    assert deepest


@pytest.mark.parametrize("options", [{}, {"least_reach": 0.4, "least_probability": 0.05}], ids=str)
def test_a_replayed_batch_equals_a_real_one(pair, options):
    """Rows share levels and number of nodes: both go by their mean."""
    tree, sizes = TreeConfig(10, 4, 3, **options), set()
    for start in range(0, 18, 3):
        noted, seen = CycleLog(make_rule("exact")), []

        def rule(verification, seen=seen):
            seen.append(verification.tree)
            return make_rule("exact")(verification)

        batch, first = prompts(18)[start : start + 3], []
        for prompt in batch:
            before = len(noted.cycles)
            eagle_fsd.generate(prompt, pair, acceptance=noted, tree=TreeConfig(64, 12, 4), max_new_tokens=14)
            first.append(noted.cycles[before])
        real = eagle_fsd.generate(batch, pair, acceptance=rule, tree=tree, max_new_tokens=14)
        tokens, verified, _ = Replay(first, None, tree.top_k).run(tree, np.array([tree.total_tokens]), rows=3)
        assert tokens.item() == pytest.approx(np.mean([1 + own.stats.accepted_lengths[0] for own in real]))
        assert verified.item() == seen[0].tokens.shape[1]
        sizes.add(verified.item())
    assert (len(sizes) > 1) == bool(options)


def test_logs_deeper_than_ours_are_replayed_in_batches():
    chains = [LoggedCycle(list(range(-1, depth - 1)), [0] * depth, [-0.1] * depth, [True] * depth) for depth in (20, 3)]
    tokens, _, _ = Replay(chains, None, 1).run(TreeConfig(30, 16, 1), np.array([30]), rows=2)
    assert tokens.item() == (17 + 4) / 2
    fewer = TreeConfig(30, 16, 1, least_probability=0.01)
    assert Replay(chains, None, 1).run(fewer, np.array([30]), rows=2)[0].item() == (1 + 10 + 4) / 2  # half of 16 + 3


def test_a_pause_comes_when_drafting_does_not_pay_and_grows():
    pause, drafted = Pause(), []
    for _ in range(400):
        drafted.append(pause.drafts())
        if drafted[-1]:
            pause.learn(-1)
    assert drafted[:6] == [True] * 6 and sum(drafted) < 20  # soon found out, then tried now and then
    assert sum(drafted[200:]) >= 2
    pause = Pause()
    for gain in [1] * 50 + [0.5] * 50 + [-1, 2] * 50:  # it pays on average
        assert pause.drafts()
        pause.learn(gain)


def test_the_next_request_knows_that_drafting_did_not_pay():
    """It tries once, and goes on as long as that pays."""
    pause = Pause()
    for _ in range(60):
        if pause.drafts():
            pause.learn(-1)
    for _ in range(3):
        pause.begin()
        assert pause.drafts()
        pause.learn(-1)
        assert not any(pause.drafts() for _ in range(60))
    pause.begin()
    for _ in range(30):
        assert pause.drafts()
        pause.learn(2)
    pause.begin()  # success is not trusted for long
    drafted = []
    for _ in range(12):
        drafted.append(pause.drafts())
        if drafted[-1]:
            pause.learn(-1)
    assert drafted == [True] * 6 + [False] * 6


def test_requests_share_what_they_learn_only_where_texts_do_not_depend_on_it(pair):
    pair.trees = AutoTree([], Latency({1: 1.0, 16: 9.0}, {1: 1.0}, 1.0), stopping=True)  # drafting never pays

    def drafted(**options):
        output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=40, **options)
        return output.stats.target_forwards - output.stats.undrafted
    plain = eagle_fsd.generate(PROMPT, pair, max_new_tokens=40, acceptance="exact", tree=TreeConfig(2, 1, 1)).token_ids
    assert drafted(acceptance="exact") > drafted(acceptance="exact") > 0
    assert eagle_fsd.generate(PROMPT, pair, max_new_tokens=40, acceptance="exact").token_ids == plain
    assert drafted(threshold=0.3) == drafted(threshold=0.3) > drafted(threshold=0.0)


def test_decoding_with_pauses_gives_the_same_tokens(pair):
    """The draft reads what it missed: afterwards it drafts as if there had been no pause."""
    def decode(cost: Callable | None) -> tuple[list[int], list[bool]]:
        batch = BatchSettings(lambda requests: Choice(TreeConfig(8, 3, 2), cost=cost))
        settings = RequestSettings(LogitsProcessorList(), seed=0, max_new_tokens=80)
        decoder = Decoder(pair.target, pair.draft, [PROMPT], batch, [settings])
        (row,) = decoder.requests
        decoder.prefill()
        drafted = []
        while len(row.tokens) < len(PROMPT) + 70:
            drafted.append(decoder.step()[0].drafted)
        assert decoder.forwards.draft_cache.length + len(row.features) == len(row.tokens) - 1
        return row.tokens[: len(PROMPT) + 70], drafted

    with torch.inference_mode():
        steady, paused = decode(None), decode(lambda nodes, levels: 3.9)
    assert steady[0] == paused[0] and all(steady[1]) and not all(paused[1]) and any(paused[1][10:])


def test_latencies_are_measured_and_kept(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    first = known_latency(pair.target, pair.draft)
    assert list(first.base.values()) == sorted(first.base.values()) and first.plain > 0
    assert first.base.keys() == {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert first.cycle(16, 4, 2) >= first.cycle(16, 1, 2) > 0
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: pytest.fail("measured again"))
    assert known_latency(pair.target, pair.draft) == first
    (tmp_path / "latency.json").write_text("{broken")
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: FREE)
    assert known_latency(pair.target, pair.draft) == FREE


def test_what_was_measured_beside_other_work_is_measured_again(pair, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    quiet = known_latency(pair.target, pair.draft)
    slow = Latency({at: 50 * s for at, s in quiet.base.items()}, quiet.level, 50 * quiet.plain)
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: slow)
    (tmp_path / "latency.json").unlink()
    assert known_latency(pair.target, pair.draft) == slow
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: quiet)
    assert known_latency(pair.target, pair.draft) == slow  # conftest: nothing is compared
    monkeypatch.setattr("eagle_fsd.drafting.machine.share_of", share_of)
    assert share_of(slow, pair.target, pair.draft) < 0.3
    assert known_latency(pair.target, pair.draft) == quiet and "when other work slowed the machine" in caplog.text
    assert json.loads((tmp_path / "latency.json").read_text())  # kept in place of the old one
    monkeypatch.setattr("eagle_fsd.drafting.machine.share_of", lambda *_: 1.0)
    assert known_latency(pair.target, pair.draft) == quiet


def test_rows_cost_what_they_do_not_share(pair, cycles):
    """A batch of the measured cycles themselves is predicted; where rows cost much, nothing is drafted for many."""
    tree, measured = ROW_TREE, {1: 1.0, 64: 7.3}
    shared = Latency(measured, {1: 0.5}, 0.9)
    found = _with_rows(shared, drafted=9.0, plain=2.0)
    assert found.cycle(tree.nodes, tree.depth, tree.top_k, ROWS) == pytest.approx(9.0)
    assert found.plain_cycle(ROWS) == pytest.approx(2.0) and found.plain_cycle() == pytest.approx(0.9)
    assert _with_rows(shared, drafted=0.1, plain=0.1) == shared
    real = measure(pair.target, pair.draft)
    assert real.row >= 0 and real.plain_row >= 0 and real.cycle(4, 2, 1, 8) >= real.cycle(4, 2, 1, 4)
    cheap = Latency({1: 1.0, 64: 1.1}, {k: 0.01 for k in (1, 2, 3, 4)}, 1.0)
    dear = replace(cheap, row=1.0)
    assert choose(cycles, dear).tree == choose(cycles, cheap).tree
    assert choose(cycles, cheap, rows=8).tree is not None and choose(cycles, dear, rows=8).tree is None


def test_a_steady_tree_pays_for_all_numbers_of_rows(cycles):
    """The best geometric mean of all shapes, by trying each."""
    latency = Latency({1: 1.0, 16: 1.5, 64: 6.0}, {k: 0.05 * k for k in (1, 2, 3, 4)}, 1.0, row=0.1)
    trees = AutoTree([TreeLog("FSD(0.3)", 0.0, cycles), TreeLog("Exact()", 0.0, cycles[:50])], latency, stopping=True)
    rows, found = [1, 2, 4, 6], trees.steady(6)
    assert not found.least_reach and not found.least_probability

    replays = {top_k: Replay(cycles, found.confidence, top_k) for top_k in (1, 2, 3, 4)}

    def mean(tree: TreeConfig) -> float:
        return float(np.prod([replays[tree.top_k].rate(tree, latency, rows=count)[0] for count in rows]))

    every = [replace(found, total_tokens=nodes, depth=depth, top_k=top_k)
             for nodes in TRIED_NODES[::3] for depth in range(1, 17, 3) for top_k in (1, 2, 3, 4)]
    assert mean(found) >= max(map(mean, every)) - 1e-12
    assert found.total_tokens < trees.steady(1).total_tokens
    assert AutoTree([], latency, stopping=True).steady(4) == CPU_TREE


def test_latency_is_linear_between_measurements():
    assert [between({2: 1.0, 4: 3.0, 8: 5.0}, at) for at in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 2, 3, 4, 5, 6]


def test_a_target_without_room_is_refused():
    small = tiny_pair(max_position_embeddings=40)
    with pytest.raises(ValueError, match="40 positions"):
        measure(small.target, small.draft)


def test_logs_are_kept_beside_the_head(cycles, tmp_path):
    assert read_logs(tmp_path) == []
    store_log(tmp_path, TreeLog("Exact()", 0.0, cycles[:5]))
    store_log(tmp_path, TreeLog("Exact()", 0.7, cycles[5:7]))
    store_log(tmp_path, TreeLog("Exact()", 0.0, cycles[:3]))
    found = {entry.temperature: entry for entry in read_logs(tmp_path)}
    assert (len(found[0.0].cycles), len(found[0.7].cycles)) == (3, 2)
    for ours, stored in zip(cycles[:3], found[0.0].cycles, strict=True):
        assert (stored.parents, stored.ranks, stored.accepted) == (ours.parents, ours.ranks, ours.accepted)
        assert stored.log_probs == pytest.approx(ours.log_probs, abs=1e-2)
    (tmp_path / "tree.json").write_text(json.dumps({"logs": [{"rule": 1}]}))
    with pytest.raises(ValueError, match="tree.json cannot be read"):
        read_logs(tmp_path)


def test_auto_takes_the_nearest_log(cycles):
    exact, fuzzy = repr(make_rule("exact")), make_rule("fsd", 0.2)
    trees = AutoTree([TreeLog(exact, 0.0, cycles), TreeLog(repr(fuzzy), 0.0, cycles[:40]),
                      TreeLog(exact, 0.7, cycles[40:80])], FREE, stopping=True)
    assert trees.of(fuzzy, 0.0) is trees.of(fuzzy, 0.0) is not trees.of(make_rule("exact"), 0.0)
    assert trees.of(make_rule("tilt", 0.5), 0.0) is trees.of(make_rule("exact"), 0.0)
    assert trees.of(fuzzy, 0.9) is trees.of(make_rule("exact"), 0.7)


def test_a_loaded_pair_chooses_its_tree(tmp_path, monkeypatch, cycles, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    save_pair(tmp_path)
    places = (tmp_path / "target", tmp_path / "head")
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: FREE)
    unknown = eagle_fsd.load(*places, device="cpu")
    choice = unknown.trees.of(make_rule("exact"), 0.0)
    assert all("measuring once" in record.getMessage() for record in caplog.records)
    assert choice.tree == unknown.default_tree and choice.cost(16, 6) > 0  # no log: the default, which may pause
    store_log(tmp_path / "head", TreeLog(repr(make_rule("exact")), 0.0, cycles))
    fixed = eagle_fsd.load(*places, device="cpu", tree=TreeConfig(8, 3, 2))
    assert fixed.trees is None and fixed.default_tree == TreeConfig(8, 3, 2)
    model = eagle_fsd.load(*places, device="cpu")
    plain = eagle_fsd.generate(PROMPT, fixed, acceptance="exact", max_new_tokens=40)
    assert eagle_fsd.generate(PROMPT, model, acceptance="exact", max_new_tokens=40).token_ids == plain.token_ids
    model.trees = AutoTree(model.trees.logs, DEAR, stopping=True)
    found = eagle_fsd.generate(PROMPT, model, acceptance="exact", max_new_tokens=40)
    assert found.token_ids == plain.token_ids and "plain decoding" in found.stats.plain_because
    assert found.stats.undrafted == found.stats.target_forwards == 39


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Status, output and errors of the command for a pair that is saved in `tmp_path`."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: FREE)
    monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", 8)
    monkeypatch.setattr("eagle_fsd.drafting.choice.choose", lambda *_, **__: Choice(TREE, 7.0))
    save_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": a + b}) for a in "abcd" for b in "efgh"))

    def run(*arguments):
        status = main(["tune", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device",
                       "cpu", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "24", *arguments])
        return status, *capsys.readouterr()

    return run


def in_cache(folder):
    (file,) = folder.glob("cache/trees/*/tree.json")
    return {entry.rule: len(entry.cycles) for entry in read_logs(file.parent)}


def test_the_command_stores_a_log_and_says_what_it_leads_to(tmp_path, tune):
    """In the cache, where `load` finds it; never in the head's folder, which may be anybody's, unless it is named."""
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()}
    assert tune("--limit", "6")[0] == tune("--limit", "6", "--acceptance", "fsd", "--threshold", "0.2")[0] == 0
    rules = repr(make_rule("exact")), repr(make_rule("fsd", 0.2))
    logs = in_cache(tmp_path)
    assert list(logs) == list(rules) and min(logs.values()) >= 8
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()} == before
    loaded = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    assert [entry.rule for entry in loaded.trees.logs] == list(rules)
    other = tiny_pair(seed=1)
    save_head(other.draft, tmp_path / "other")
    assert not eagle_fsd.load(tmp_path / "target", tmp_path / "other", device="cpu").trees.logs
    for bad in (["--threshold", "nan"], ["--limit", "0"], ["--out", str(tmp_path / "nowhere")]):
        assert tune(*bad)[0] == 2


def test_the_log_of_more_cycles_is_kept(tmp_path, tune, cycles):
    status, shown, _ = tune()
    (rule, count), = in_cache(tmp_path).items()
    assert status == 0 and f"{count} cycles stored in {tmp_path}" in shown and "7.0 tokens/s expected" in shown
    status, shown, _ = tune("--limit", "8")
    assert status == 0 and f"keeps its log of {count}: delete it" in shown and in_cache(tmp_path) == {rule: count}
    assert tune()[0] == 0 and in_cache(tmp_path) == {rule: count}  # one as good takes its place

    def loaded():
        return [len(entry.cycles) for entry in eagle_fsd.load(
            tmp_path / "target", tmp_path / "head", device="cpu").trees.logs]

    for beside, expected in ((count - 1, count), (count + 1, count + 1)):
        store_log(tmp_path / "head", TreeLog(rule, 0.0, (cycles * 9)[:beside]))
        assert loaded() == [expected]
    status, shown, _ = tune("--out", str(tmp_path / "head"))
    assert status == 0 and f"keeps its log of {count + 1}" in shown and loaded() == [count + 1]


@pytest.mark.parametrize("few", [["--max-new-tokens", "6"], ["--limit", "3"]], ids=str)
def test_a_log_of_few_cycles_is_refused(tmp_path, tune, few, monkeypatch):
    """Where there cannot be enough, and where there turn out not to be."""
    monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", LEAST_CYCLES)
    if few[0] == "--limit":
        monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", 3 * 24)
    else:
        monkeypatch.setattr("eagle_fsd.measure.cycles.log_cycles", lambda *_, **__: pytest.fail("decoded"))
    status, _, errors = tune(*few)
    assert status == 2 and "at least" in errors and "are needed. Give more prompts" in errors
    assert not list(tmp_path.glob("cache/trees/*/tree.json")) and not (tmp_path / "head" / "tree.json").exists()


def test_a_damaged_log_in_the_cache_stops_no_load(tmp_path, tune, caplog):
    assert tune("--limit", "6")[0] == 0
    (file,) = tmp_path.glob("cache/trees/*/tree.json")
    file.write_text("[")
    assert not eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu").trees.logs
    assert str(file) in caplog.text and tune()[0] == 2  # which says what to do
