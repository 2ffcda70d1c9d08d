"""tree="auto": the confidence, the replay of logged cycles, the choice, stopping and pauses."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import PROMPT, save_pair, tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli import main
from eagle_fsd.drafting import autotree, logs
from eagle_fsd.drafting.autotree import AutoTree, Replay, choose, fit_confidence
from eagle_fsd.drafting.config import Choice, TreeConfig
from eagle_fsd.drafting.growth import apply_confidence, confidence_lines
from eagle_fsd.drafting.latency import Latency, between
from eagle_fsd.drafting.logs import LOGGED_TREE, LoggedCycle, Setting, TreeLog, read_logs, store_log
from eagle_fsd.drafting.pause import Drafting, Pause
from eagle_fsd.engine.timing import ROW_TREE, ROWS, greedy_decoder, known_latency, measure, share_of, with_rows
from eagle_fsd.heads.checkpoint import save_head

LEAST_CYCLES = logs.LEAST_CYCLES
WIDE = TreeConfig(64, 12, 4)
FREE = Latency({1: 1.0}, {k: 0.0 for k in (1, 2, 3, 4)}, 1.0)  # drafting costs nothing
TREE = TreeConfig(16, 5, 4)
DEAR = Latency({1: 10.0, 2: 18.0}, {k: 9.0 for k in (1, 2, 3, 4)}, 1.0)
EXACT, FUZZY = Setting("exact", 0.0, None, 0.0), Setting("fsd", 0.2, 0.7, 0.0)
PROMPTS = torch.randint(32, (24, 8), generator=torch.Generator().manual_seed(3)).tolist()


def decode(pair, prompts, tree, tokens):
    """The texts of prompts that are decoded together, and of each cycle the tree, the draft's logits and the paths."""
    seen, decoder = [], greedy_decoder(pair.target, pair.draft, prompts, tree, len(prompts) * tokens + 20)
    decoder.observe = lambda *drafted: seen.append(drafted)
    with torch.inference_mode():
        decoder.prefill()
        while min(len(request.emitted) for request in decoder.requests) < tokens:
            decoder.step()
    return [request.emitted[:tokens] for request in decoder.requests], seen


def logged(pair, tree, tokens) -> list[LoggedCycle]:
    """All prompts' first cycles, then all their second ones."""
    _, seen = decode(pair, PROMPTS, tree, tokens)
    return [logs.logged_cycle(tree, levels, path, row) for tree, levels, paths, _ in seen
            for row, path in enumerate(paths)]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture(scope="module")
def cycles(pair):
    return logged(pair, LOGGED_TREE, 12)


@pytest.fixture(scope="module")
def first_cycles(pair):
    return logged(pair, WIDE, 2)[: len(PROMPTS)]


def test_a_logged_cycle_is_the_tree_and_what_became_of_it(pair, cycles):
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


def test_logged_steps_are_those_that_the_draft_took(pair):
    """At draft temperature 1 a node's score is the sum of its path's; a row of a batch is logged as it would be alone,
    and a draft that numbers its tokens otherwise as one that does not."""
    _, ((tree, levels, paths, _), *_) = decode(pair, PROMPTS[:3], TREE, 9)
    for row, path in enumerate(paths):
        found = logs.logged_cycle(tree, levels, path, row)
        scores = [0.0] * (len(found.parents) + 1)  # the root's is the last: parent -1
        for node, parent in enumerate(found.parents):
            scores[node] = scores[parent] + found.log_probs[node]
        assert scores[:-1] == pytest.approx(tree.scores[row, 1:].tolist(), abs=1e-5)
        assert [node + 1 for node, kept in enumerate(found.accepted) if kept] == path[1:]
        order = torch.randperm(32, generator=torch.Generator().manual_seed(row))
        renamed = logs.logged_cycle(tree, [level[..., order] for level in levels], path, row, order)
        assert renamed.log_probs == pytest.approx(found.log_probs, abs=1e-6) and renamed.ranks == found.ranks


STOPPING = {"least_reach": 0.4, "least_probability": 0.05}


@pytest.mark.parametrize("tree", [TreeConfig(2, 1, 1), TreeConfig(16, 6, 4), TreeConfig(24, 6, 3, **STOPPING)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_equals_decoding_with_the_smaller_tree(pair, first_cycles, tree, rows):
    """In the first cycle after a prompt both see the same state; rows of a batch share levels and number of nodes."""
    sizes, deepest = set(), 0
    for start in range(0, 12, rows):
        prompts = PROMPTS[start : start + rows]
        drafted, _, paths, _ = decode(pair, prompts, tree, 2)[1][0]
        replay = Replay(first_cycles[start : start + rows], None, tree.top_k)
        tokens, verified, levels = replay.run(tree, np.array([tree.total_tokens]), rows)
        assert tokens.item() == pytest.approx(np.mean([len(path) for path in paths]))
        if tree.least_probability:  # else the log may lack unlikely nodes that fill the tree
            assert verified.item() == drafted.tokens.shape[1]
        if drafted.max_depth:
            assert levels.item() >= drafted.max_depth  # a drafted level may have no node that is kept
            deepest += levels.item() == drafted.max_depth
        sizes.add(drafted.tokens.shape[1])
    assert deepest and (len(sizes) > 1) == bool(tree.least_reach)


def test_isotonic_rates_by_hand(monkeypatch):
    """Three bins of two edges; the second rate, 0.5, falls below the first, 2.5 of 3: together 4 of 6."""
    monkeypatch.setattr(autotree, "BINS", 3)
    at, rates = autotree._curve(np.array([-3.0, -3, -2, -2, -1, -1]), np.array([1.0, 1, 0, 1, 1, 1]))
    assert at.tolist() == [-3, -2, -1] and np.exp(rates) == pytest.approx([4 / 6, 4 / 6, 2.5 / 3])
    pooled = autotree._isotonic(np.array([4.0, 3, 1, 2, 6]), np.array([4.0, 4, 2, 4, 6]))  # one pool after the other
    assert pooled.tolist() == pytest.approx([10 / 14] * 4 + [1])


def test_logs_deeper_than_ours_are_replayed_in_batches():
    chains = [LoggedCycle(list(range(-1, depth - 1)), [0] * depth, [-0.1] * depth, [True] * depth) for depth in (20, 3)]
    tokens, _, _ = Replay(chains, None, 1).run(TreeConfig(30, 16, 1), np.array([30]), rows=2)
    assert tokens.item() == (17 + 4) / 2
    fewer = TreeConfig(30, 16, 1, least_probability=0.01)
    assert Replay(chains, None, 1).run(fewer, np.array([30]), rows=2)[0].item() == (1 + 10 + 4) / 2  # half of 16 + 3


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


def test_the_choice_depends_on_what_drafting_costs(cycles):
    cycles = cycles[::2]
    free, dear = choose(cycles, FREE), choose(cycles, DEAR)
    assert free.tree is not None and free.tree.total_tokens > 16 and free.rate > 1.5
    assert dear.tree is None and dear.cost(2, 1) == 18
    middling = choose(cycles, Latency({1: 1.1, 64: 5.1}, {k: 0.1 * k for k in (1, 2, 3, 4)}, 1.0))
    assert middling.tree is not None and middling.tree.total_tokens < free.tree.total_tokens
    assert middling.tree.confidence is not None
    fixed = choose(cycles, FREE, stopping=False).tree
    assert fixed is not None and fixed.least_reach == fixed.least_probability == 0


def test_rows_cost_what_they_do_not_share(pair, cycles):
    """A batch of the measured cycles themselves is predicted; where rows cost much, nothing is drafted for many."""
    tree, measured = ROW_TREE, {1: 1.0, 64: 7.3}
    shared = Latency(measured, {1: 0.5}, 0.9)
    found = with_rows(shared, drafted=9.0, plain=2.0)
    assert found.cycle(tree.nodes, tree.depth, tree.top_k, ROWS) == pytest.approx(9.0)
    assert found.plain_cycle(ROWS) == pytest.approx(2.0) and found.plain_cycle() == pytest.approx(0.9)
    assert with_rows(shared, drafted=0.1, plain=0.1) == shared
    cycles = cycles[:60]
    cheap = Latency({1: 1.0, 64: 1.1}, {k: 0.01 for k in (1, 2, 3, 4)}, 1.0)
    dear = replace(cheap, row=1.0)
    assert choose(cycles, dear).tree == choose(cycles, cheap).tree
    assert choose(cycles, cheap, rows=8).tree is not None and choose(cycles, dear, rows=8).tree is None


def test_stopping_rules_shrink_the_tree_and_change_no_token(pair):
    for prompt in PROMPTS[:2]:
        said, seen = decode(pair, [prompt], TreeConfig(24, 6, 3, **STOPPING), 20)
        assert said == decode(pair, [prompt], TreeConfig(24, 6, 3), 20)[0]
        assert len({tree.tokens.shape[1] for tree, *_ in seen}) > 1
        assert all(tree.scores.exp().min() >= STOPPING["least_probability"] - 1e-6 for tree, *_ in seen)


def paused(pause: Pause, gain: float, cycles: int) -> list[bool]:
    """Which of so many cycles draft, where each drafted one gains so much."""
    drafted = []
    for _ in range(cycles):
        drafted.append(pause.drafts())
        if drafted[-1]:
            pause.learn(gain)
    return drafted


def test_the_next_request_knows_that_drafting_did_not_pay():
    """It tries once, and goes on as long as that pays."""
    drafted = paused(Pause(), -1, 400)
    assert drafted[:6] == [True] * 6 and 2 < sum(drafted) < 20  # soon found out, then tried now and then
    pause = Pause()
    paused(pause, -1, 60)
    for _ in range(3):
        pause.begin()
        assert paused(pause, -1, 61) == [True] + [False] * 60
    pause.begin()
    assert all(paused(pause, 2, 30))
    pause.begin()  # success is not trusted for long
    assert paused(pause, -1, 12) == [True] * 6 + [False] * 6


def test_decoding_with_pauses_gives_the_same_tokens(pair):
    """The draft reads what it missed: afterwards it drafts as if there had been no pause."""
    expected, _ = decode(pair, [PROMPT], TreeConfig(8, 3, 2), 70)
    decoder = greedy_decoder(pair.target, pair.draft, [PROMPT], TreeConfig(8, 3, 2), 80)
    decoder.drafting = Drafting(lambda requests: Choice(TreeConfig(8, 3, 2), cost=lambda nodes, levels: 3.9), 1)
    (row,), drafted = decoder.requests, []
    with torch.inference_mode():
        decoder.prefill()
        while len(row.emitted) < 70:
            drafted.append(decoder.step()[0].drafted)
    assert decoder.forwards.draft_cache.length + len(row.features) == len(row.tokens) - 1
    assert [row.emitted[:70]] == expected and not all(drafted) and any(drafted[10:])


def test_latencies_are_measured_and_kept(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    first = known_latency(pair.target, pair.draft)
    assert list(first.base.values()) == sorted(first.base.values()) and first.plain > 0
    assert first.base.keys() == {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64} and min(first.row, first.plain_row) >= 0
    assert first.cycle(16, 4, 2) >= first.cycle(16, 1, 2) > 0
    monkeypatch.setattr("eagle_fsd.engine.timing.measure", lambda *_: pytest.fail("measured again"))
    assert known_latency(pair.target, pair.draft) == first


def test_latency_without_a_head_is_that_of_copies(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    found = known_latency(pair.target, None)
    assert found.plain > 0 and max(found.base) == 64 and found.cycle(16, 0, 1) > 0


def test_what_was_measured_beside_other_work_is_measured_again(pair, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    quiet = known_latency(pair.target, pair.draft)
    slow = Latency({at: 50 * s for at, s in quiet.base.items()}, quiet.level, 50 * quiet.plain)
    monkeypatch.setattr("eagle_fsd.engine.timing.measure", lambda *_: slow)
    next(tmp_path.glob("latency/*.json")).unlink()
    assert known_latency(pair.target, pair.draft) == slow
    monkeypatch.setattr("eagle_fsd.engine.timing.measure", lambda *_: quiet)
    assert known_latency(pair.target, pair.draft) == slow  # conftest: nothing is compared
    assert share_of(slow, pair.target, pair.draft) < 0.3
    monkeypatch.setattr("eagle_fsd.engine.timing.share_of", share_of)
    assert known_latency(pair.target, pair.draft) == quiet and "when other work slowed the machine" in caplog.text
    assert len(list(tmp_path.glob("latency/*"))) == 1  # in place of the old one


def test_latency_is_linear_between_measurements():
    assert between({2: 1.0, 4: 3.0, 8: 5.0}, [1, 2, 3, 4, 6, 8, 10]).tolist() == [1, 1, 2, 3, 4, 5, 6]
    assert between({3: 2.0}, [1, 5]).tolist() == [2, 2]


def test_a_target_without_room_is_refused():
    small = tiny_pair(max_position_embeddings=40)
    with pytest.raises(ValueError, match="40 positions"):
        measure(small.target, small.draft)


def test_logs_are_kept_beside_the_head(cycles, tmp_path):
    assert read_logs(tmp_path) == []
    for setting, count in ((EXACT, 5), (FUZZY, 2), (EXACT, 3)):
        store_log(tmp_path, TreeLog(setting, cycles[:count]))
    found = {entry.setting: entry.cycles for entry in read_logs(tmp_path)}
    assert {setting: len(own) for setting, own in found.items()} == {EXACT: 3, FUZZY: 2}
    for ours, stored in zip(cycles[:3], found[EXACT], strict=True):
        assert (stored.parents, stored.ranks, stored.accepted) == (ours.parents, ours.ranks, ours.accepted)
        assert stored.log_probs == pytest.approx(ours.log_probs, abs=1e-2)
    for damage in ({"rule": "Exact(threshold=0.0)", "temperature": 0.0, "cycles": []},
                   {**EXACT._asdict(), "cycles": [[[0], [0], [-1.0], []]]}, {**EXACT._asdict(), "threshold": None}):
        (tmp_path / "tree.json").write_text(json.dumps({"logs": [damage]}))
        with pytest.raises(ValueError, match="tree.json cannot be read .*run eagle-fsd tune again"):
            read_logs(tmp_path)


def test_auto_takes_the_nearest_log(cycles):
    trees = AutoTree([TreeLog(EXACT, cycles[:30]), TreeLog(FUZZY, cycles[:40]),
                      TreeLog(EXACT._replace(temperature=0.7), cycles[40:80])], FREE, stopping=True)
    exact, fuzzy = trees.of(EXACT), trees.of(FUZZY)
    assert fuzzy is trees.of(FUZZY) is not exact
    for other in ({"threshold": 0.3}, {"head_guard": None}, {"rule": "tilt"}):
        assert trees.of(FUZZY._replace(**other)) is exact
    assert trees.of(FUZZY._replace(temperature=0.9)) is trees.of(EXACT._replace(temperature=0.7)) is not exact
    assert trees.of(EXACT, rows=3) is trees.of(EXACT, rows=4) is not exact
    rule = make_rule("fsd", 0.2)
    assert Setting.of(rule, 0.0) == ("fsd", 0.2, rule.head_guard, 0.0)
    assert Setting.of(make_rule("fsd", 0.0), 0.7) == ("exact", 0.0, None, 0.7)  # lossless: accepts what exact accepts


def test_a_loaded_pair_chooses_its_tree(tmp_path, monkeypatch, cycles, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    save_pair(tmp_path)
    places = (tmp_path / "target", tmp_path / "head")
    monkeypatch.setattr("eagle_fsd.engine.timing.measure", lambda *_: FREE)
    unknown = eagle_fsd.load(*places, device="cpu")
    choice = unknown.trees.of(EXACT)
    assert all("measuring how long" in record.getMessage() for record in caplog.records)
    assert choice.tree == unknown.default_tree and choice.cost(16, 6) > 0  # no log: the default, which may pause
    store_log(tmp_path / "head", TreeLog(EXACT, cycles[:60]))
    fixed = eagle_fsd.load(*places, device="cpu", tree=TreeConfig(8, 3, 2))
    assert fixed.trees is None and fixed.default_tree == TreeConfig(8, 3, 2)
    model = eagle_fsd.load(*places, device="cpu")
    plain = eagle_fsd.generate(PROMPT, fixed, acceptance="exact", max_new_tokens=40)
    assert eagle_fsd.generate(PROMPT, model, acceptance="exact", max_new_tokens=40).token_ids == plain.token_ids
    model.trees = AutoTree(model.trees.logs, DEAR, stopping=True)
    found = eagle_fsd.generate(PROMPT, model, acceptance="exact", max_new_tokens=40)
    assert found.token_ids == plain.token_ids and "no tree is expected" in found.stats.plain_because
    assert found.stats.undrafted == found.stats.target_forwards == 39


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Status, output and errors of the command for a pair that is saved in `tmp_path`."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eagle_fsd.engine.timing.measure", lambda *_: FREE)
    monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", 4)
    monkeypatch.setattr("eagle_fsd.drafting.autotree.choose", lambda *_, **__: Choice(TREE, 7.0))
    save_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": a + b}) for a in "abc" for b in "ef"))

    def run(*arguments):
        status = main(["tune", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device",
                       "cpu", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12", *arguments])
        return status, *capsys.readouterr()

    return run


def in_cache(folder):
    (file,) = folder.glob("cache/trees/*/tree.json")
    return {entry.setting: len(entry.cycles) for entry in read_logs(file.parent)}


def test_the_command_stores_a_log_and_says_what_it_leads_to(tmp_path, tune):
    """In the cache, where `load` finds it; never in the head's folder, which may be anybody's, unless it is named."""
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()}
    assert tune("--limit", "3")[0] == tune("--limit", "3", "--acceptance", "fsd", "--threshold", "0.2")[0] == 0
    settings = EXACT, Setting.of(make_rule("fsd", 0.2), 0.0)
    found = in_cache(tmp_path)
    assert list(found) == list(settings) and min(found.values()) >= 4
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()} == before
    loaded = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    assert [entry.setting for entry in loaded.trees.logs] == list(settings)
    other = tiny_pair(seed=1)
    save_head(other.draft, tmp_path / "other")
    assert not eagle_fsd.load(tmp_path / "target", tmp_path / "other", device="cpu").trees.logs
    for bad in (["--limit", "0"], ["--out", str(tmp_path / "nowhere")]):
        assert tune(*bad)[0] == 2


def test_of_two_logs_that_with_more_cycles_is_used(tmp_path, tune, cycles):
    status, shown, _ = tune()
    (setting, count), = in_cache(tmp_path).items()
    assert status == 0 and f"{count} cycles stored in {tmp_path}" in shown and "7.0 tokens/s expected" in shown
    for beside, expected in ((count - 1, count), (count + 1, count + 1)):
        store_log(tmp_path / "head", TreeLog(setting, cycles[:beside]))
        loaded = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
        assert [len(entry.cycles) for entry in loaded.trees.logs] == [expected]


@pytest.mark.parametrize("few", [["--max-new-tokens", "6"], ["--limit", "2"]], ids=str)
def test_a_log_of_few_cycles_is_refused(tmp_path, tune, few, monkeypatch):
    """Where there cannot be enough, and where there turn out not to be."""
    monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", LEAST_CYCLES)
    if few[0] == "--limit":
        monkeypatch.setattr("eagle_fsd.drafting.logs.LEAST_CYCLES", 2 * 12)
    else:
        monkeypatch.setattr("eagle_fsd.measure.cycles.log_cycles", lambda *_, **__: pytest.fail("decoded"))
    status, _, errors = tune(*few)
    assert status == 2 and "at least" in errors and "are needed. Give more prompts" in errors
    assert not list(tmp_path.glob("cache/trees/*/tree.json")) and not (tmp_path / "head" / "tree.json").exists()


def test_a_damaged_log_in_the_cache_stops_no_load(tmp_path, tune, caplog):
    assert tune("--limit", "3")[0] == 0
    (file,) = tmp_path.glob("cache/trees/*/tree.json")
    file.write_text("[")
    assert not eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu").trees.logs
    assert str(file) in caplog.text and tune()[0] == 2  # which says what to do
