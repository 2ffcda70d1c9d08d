"""tree="auto": the curves and their fit, how much a cycle drafts and verifies, pauses, and measured latencies."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import PROMPT, prefill, save_pair, tiny_pair

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.decoding import cycle
from eagle_fsd.drafting.config import MOST_NODES, TreeConfig
from eagle_fsd.drafting.sizing import (
    PRICES,
    WIDE_TREE,
    Curves,
    Drafting,
    HeadCurves,
    Latency,
    Pause,
    Plan,
    Prices,
    Sizing,
    between,
    log_rates,
)
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.loading import curves
from eagle_fsd.loading.curves import default_curves
from eagle_fsd.loading.timing import (
    ROW_TREE,
    ROWS,
    greedy_batch,
    known_latency,
    measure,
    share_of,
    with_rows,
)
from eagle_fsd.measure import cycles
from eagle_fsd.measure.cycles import Cycle, fit, observed
from eagle_fsd.utils.installation import processor_name

CHEAP = Latency({1: 1.0, 64: 1.3}, {k: 0.01 for k in (1, 2, 3, 4)}, 1.0)
STEEP = Latency({1: 1.0, 4: 1.0, 5: 1.5, 64: 9.0}, {k: 0.05 for k in (1, 2, 3, 4)}, 1.0)
PROMPTS = torch.randint(32, (24, 8), generator=torch.Generator().manual_seed(3)).tolist()


def decode(pair, prompts, plan, tokens):
    """The texts of prompts that are decoded together, and of each cycle the tree, the draft's logits and the paths."""
    seen, batch = [], greedy_batch(pair.target, pair.draft, prompts, plan, len(prompts) * tokens + 20)
    batch.observe = lambda *drafted: seen.append(drafted)
    with torch.inference_mode():
        prefill(batch)
        while min(len(request.answer) for request in batch.requests) < tokens:
            cycle.step(batch)
    return [request.answer[:tokens] for request in batch.requests], seen


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


# Curves -----------------------------------------------------------------------------------------------------------


def test_an_observed_cycle_is_the_tree_and_what_became_of_it(pair):
    """Steps are what the draft gave the node after its parent, whatever the row."""
    _, seen = decode(pair, PROMPTS[:3], Plan(replace(WIDE_TREE, depth=5)), 9)
    for tree, levels, paths in seen:
        for row, path in enumerate(paths):
            cycle = observed(tree.each(lambda part, row=row: part[[row]]), path)
            assert [node + 1 for node, taken in enumerate(cycle.accepted) if taken] == path[1:]
            for node, (parent, rank, step) in enumerate(zip(*cycle[:3], strict=True), 1):
                logits = levels[tree.depths[row, node] - 1][row, tree.draft_rows[row, parent + 1]]
                expected = logits.log_softmax(-1)[tree.tokens[row, node]].item()
                assert parent + 1 == tree.parents[row, node] and step == pytest.approx(expected, abs=1e-4)
                assert logits.topk(4).indices.tolist().index(tree.tokens[row, node]) == rank


def test_isotonic_rates_by_hand(monkeypatch):
    """Three bins of two edges; the second rate, 0.5, falls below the first, 2.5 of 3: together 4 of 6."""
    monkeypatch.setattr(cycles, "BINS", 3)
    at, rates = cycles._curve(np.array([-3.0, -3, -2, -2, -1, -1]), np.array([1.0, 1, 0, 1, 1, 1]))
    assert at.tolist() == [-3, -2, -1] and np.exp(rates) == pytest.approx([4 / 6, 4 / 6, 2.5 / 3])
    pooled = cycles._isotonic(np.array([4.0, 3, 1, 2, 6]), np.array([4.0, 4, 2, 4, 6]))  # one pool after the other
    assert pooled.tolist() == pytest.approx([10 / 14] * 4 + [1])


def chains(count, depth=5):
    """Cycles of a best child and another at each node of the best path, accepted as often as rising functions of
    their probability say."""
    draw, made = random.Random(0), []
    for _ in range(count):
        cycle, parent, alive = Cycle([], [], [], []), -1, True
        for _ in range(depth):
            probability = draw.uniform(0.05, 0.95)
            first = alive and draw.random() < probability**2
            second = alive and not first and draw.random() < (1 - probability) / 4
            for rank, (p, taken) in enumerate(((probability, first), (1 - probability, second))):
                for column, value in zip(cycle, (parent, rank, math.log(p), taken), strict=True):
                    column.append(value)
            parent, alive = len(cycle.parents) - 2, first
        made.append(cycle)
    return made


def test_the_fit_finds_rates_and_worth():
    made = chains(4000)
    found = fit(made)
    rates_of = log_rates(found, 2, torch.device("cpu"))
    for probability in (0.2, 0.5, 0.8):
        rates = rates_of(torch.tensor([[math.log(probability), math.log(1 - probability)]])).exp()[0]
        assert rates[0].item() == pytest.approx(probability**2, abs=0.05)
        assert rates[1].item() == pytest.approx((1 - probability) / 4 * (1 - probability**2), abs=0.05)
    # The root's children, at a price: the mean of what each is above it.
    for price in (0.0, 0.1, 0.2, 0.3):
        likely = [(p**2, (1 - p) / 4 * (1 - p**2)) for p in np.linspace(0.05, 0.95, 400)]
        expected = np.mean([sum(max(0, each - price) for each in pair) for pair in likely])
        assert found.level_worth(price)(1.0) == pytest.approx(expected, abs=0.05)
    worth = found.level_worth(0.1)
    assert worth(0.0) == 0 and worth(0.2) < worth(0.5) < worth(1.0) == worth(3.0)
    with pytest.raises(ValueError, match="20 cycles are too few to fit curves to: give more"):
        fit(made[:20])


def test_curves_are_kept_beside_the_head(tmp_path):
    assert curves.read_curves(tmp_path) is None
    found = HeadCurves(fit(chains(300)), default_curves().sampled)
    curves.store_curves(tmp_path, found)
    assert curves.read_curves(tmp_path) == found and found.at(0.3) is found.greedy and found.at(0.7) is found.sampled
    numbers = sum(np.size(value) for each in found for value in vars(each).values())
    assert numbers < 250 and (tmp_path / "curves.json").stat().st_size < 4000
    held = json.loads((tmp_path / "curves.json").read_text())
    good = held["greedy"]
    for bad in ({"knots": [0.0]}, {"first": good["first"][:-1]}, {"reaches": good["reaches"][::-1]}, {"more": 1},
                {"worth": [row[:-1] for row in good["worth"]]}, {"others": [math.nan] * len(good["knots"])},
                {"worth": 5}, {"knots": None}):
        (tmp_path / "curves.json").write_text(json.dumps({**held, "greedy": {**good, **bad}}))
        with pytest.raises(ValueError, match=r"curves.json cannot be read .*run eagle-fsd tune again"):
            curves.read_curves(tmp_path)


# The rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", [1.0, 1.7, 4.0])
def test_as_many_nodes_are_verified_as_pay(pace):
    """The number with the most tokens beyond lambda times its cost, also where costs have steps; of the mean row. In a
    cycle that is better than lambda, the number with the best rate."""
    draw, found = random.Random(0), set()
    for _ in range(150):
        scores = [[0.0, *sorted((draw.uniform(-8, 0) for _ in range(draw.randrange(90))), reverse=True)]
                  for _ in range(draw.randint(1, 3))]
        steep, step = 10 ** draw.uniform(-5, 0), draw.randint(1, 8)

        def cost(nodes, levels, steep=steep, step=step):
            return 1 + steep * (nodes // step * step) + 0.1 * levels

        tokens = {nodes: sum(math.exp(score) for row in scores for score in row[:nodes]) / len(scores)
                  for nodes in range(1, min(MOST_NODES, max(map(len, scores))) + 1)}
        rate = max(expected / cost(nodes, 1) for nodes, expected in tokens.items())
        surplus = {nodes: expected - max(pace, rate) * cost(nodes, 1) for nodes, expected in tokens.items()}
        count = Plan(TreeConfig(MOST_NODES), False, Prices(cost), pace).nodes(scores)
        assert surplus[count] == pytest.approx(max(surplus.values()), abs=1e-9)
        found.add((count, rate > pace))
    assert {1, MOST_NODES} <= {count for count, _ in found} and len(found) > 20 and {True, False} <= dict(
        (good, count) for count, good in found).keys()


def test_levels_are_drafted_as_an_optimal_stopper_would():
    """A chain whose steps are accepted with probabilities drawn at random: the best policy is known by backward
    induction over the probability of the path, and what ours brings is next to it."""
    steps = [0.1, 0.5, 0.9]  # equally likely, known once the level is drafted
    worths = tuple(tuple(np.mean([max(0.0, reach * step - price) for step in steps]) for price in PRICES)
                   for reach in np.linspace(0.02, 1, 50))
    known = Curves((-9.0, 0.0), (-9.0, 0.0), (-9.0, -9.0), tuple(np.linspace(0.02, 1, 50)), worths)
    for level in (0.01, 0.05, 0.1, 0.2):
        for node in (0.0, 0.05, 0.2):
            prices = Prices(lambda nodes, levels: 1 + node * nodes + level * levels, known)  # noqa: B023
            plan = Plan(WIDE_TREE, prices=prices, pace=1.0)

            def value(path, left, best, node=node, level=level, plan=plan):
                """What levels are worth from here on: of the best policy, or of ours."""
                if left == 0 or not best and not plan.level_pays([[math.log(path)]]):
                    return 0.0
                on = np.mean([max(0.0, path * step - node) + value(path * step, left - 1, best)
                              for step in steps]) - level
                return max(0.0, on) if best else on

            ours, most = value(1.0, 6, False), value(1.0, 6, True)
            assert most - 0.02 <= ours <= most + 1e-9
    likely, unlikely = [[math.log(0.9)]], [[math.log(0.02)]]
    cheap = Plan(WIDE_TREE, prices=Prices(lambda nodes, levels: 1 + 0.05 * levels, known), pace=1.0)
    assert cheap.level_pays(likely) and not cheap.level_pays(unlikely)
    assert cheap.level_pays([*likely, *likely, [math.log(0.3)]])  # the mean row counts
    assert not replace(cheap, missed=0.05).level_pays(likely)  # what copies hold already is worth nothing


def test_lambda_is_what_was_achieved():
    """A running mean of tokens by cost, at least that of plain decoding."""
    prices = Prices(lambda nodes, levels: 1 + 0.02 * nodes + 0.05 * levels, default_curves().greedy)
    policy = Drafting(lambda _: Plan(WIDE_TREE, prices=prices))
    policy.resize([None, None])
    assert policy.plan([None, None]).pace == pytest.approx(1.6)
    for _ in range(300):
        policy.learn(policy.plan([None, None]), 10, 4, [5, 3], copied=False)
    assert policy.pace == pytest.approx(4 / prices.cost(10, 4), rel=0.02)
    for _ in range(3000):
        policy.learn(policy.plan([None, None]), 10, 4, [1, 1], copied=False)
    assert policy.pace == 1.0
    given = Drafting(lambda _: Plan(WIDE_TREE))
    given.resize([None])
    given.learn(given.plan(), 10, 4, [9], copied=False)
    assert given.plan() == Plan(WIDE_TREE)  # always whole


def test_levels_are_as_wide_as_costs_hardly_more():
    for level, rows, expected in (({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.5}, 1, 3), ({1: 1.0, 2: 1.3, 3: 1.5}, 1, 2),
                                  ({1: 1.0, 2: 1.4}, 1, 1), ({1: 1.0, 2: 1.4, 4: 1.4}, 4, 3),
                                  ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.5}, 8, 1), ({1: 0.0}, 3, 3)):
        sizing = Sizing(Latency({1: 1.0, 2: 1.1}, level, 1.0), default_curves())
        assert sizing.top_k(rows) == expected == sizing.of(rows).tree.top_k <= sizing.largest_tree.top_k
    assert Sizing(CHEAP, default_curves(), vocabulary=2).top_k() == 2
    sizing = Sizing(CHEAP, default_curves())
    assert sizing.of(2, 0.0) is sizing.of(2, 0.2) is not sizing.of(2, 1.0)
    assert sizing.of(2, 1.0).curves is default_curves().sampled and not Sizing(CHEAP, None).of().drafts
    dear = replace(CHEAP, row=1.0)  # what a row adds to a drafted cycle is more than it can bring
    assert Sizing(dear, default_curves()).of(1).drafts and not Sizing(dear, default_curves()).of(8).drafts


def test_the_outlook_is_the_best_number_of_levels_on_average():
    for level in (0.01, 0.05, 0.2, 0.9):
        prices = Prices(lambda nodes, levels: 1 + 0.02 * nodes + level * levels, default_curves().greedy)  # noqa: B023
        gain, count = prices.outlook(1.5)
        worth, reach, gains = prices.curves.level_worth(0.03), 1.0, [0.0]
        for _ in range(WIDE_TREE.depth):
            gains.append(gains[-1] + worth(reach))
            reach = prices.curves.level_worth(0.0)(reach)
        nets = [each - 1.5 * level * number for number, each in enumerate(gains)]
        assert count == nets.index(max(nets)) and gain == pytest.approx(gains[count]) and (count > 0) == (level < 0.4)


def test_sized_cycles_change_no_token(pair):
    """Rows share levels and number of nodes; where drafting costs more, less is drafted."""
    rows, verified = PROMPTS[:3], {}
    expected, _ = decode(pair, rows, Plan(TreeConfig(24, 6, 3)), 30)
    for name, latency in (("cheap", CHEAP), ("steep", STEEP)):
        said, seen = decode(pair, rows, Sizing(latency, default_curves()).of(len(rows)), 30)
        assert said == expected
        verified[name] = [tree.tokens.shape[1] for tree, *_ in seen]
        assert len({len(levels) for _, levels, _ in seen}) > 1
    assert max(verified["steep"]) < np.mean(verified["cheap"]) and len(set(verified["cheap"])) > 1


def test_sizes_of_lossless_cycles_stay(pair):
    """Nodes and levels of each cycle, recorded at f4895d3."""
    for latency, rows, recorded in (
        (CHEAP, 1, [(26, 6), (26, 7), (29, 7), (29, 8), (28, 8), (31, 8), (33, 9), (34, 9), (33, 9), (30, 10)]),
        (CHEAP, 3, [(14, 6), (15, 7), (16, 7), (14, 7), (15, 7), (15, 7), (14, 8), (15, 8), (15, 8), (15, 8)]),
        (STEEP, 1, [(4, 2), (4, 2), (4, 2), (4, 2), (4, 2), (4, 3), (4, 4), (4, 4), (4, 4), (4, 4)]),
    ):
        _, seen = decode(pair, PROMPTS[:rows], Sizing(latency, default_curves()).of(rows), 30)
        assert [(tree.tokens.shape[1], len(levels)) for tree, levels, _ in seen[:10]] == recorded


def paused(pause: Pause, gain: float, count: int) -> list[bool]:
    """Which of so many cycles draft, where each drafted one gains so much."""
    drafted = []
    for _ in range(count):
        drafted.append(pause.next_cycle())
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
    tree = TreeConfig(8, 3, 2)
    expected, _ = decode(pair, [PROMPT], Plan(tree), 70)
    dear = Plan(tree, prices=Prices(lambda nodes, levels: 3.9))
    batch = greedy_batch(pair.target, pair.draft, [PROMPT], dear, 80)
    (row,), undrafted = batch.requests, []
    with torch.inference_mode():
        prefill(batch)
        while len(row.receipts) < 70:
            cycle.step(batch)
            undrafted.append(row.stats.undrafted)
    assert batch.draft_cache.length + len(batch.feature(0)) == len(row.tokens) - 1
    assert [row.answer[:70]] == expected and 0 < undrafted[-1] and undrafted[-1] - undrafted[9] < len(undrafted) - 10


# Latencies --------------------------------------------------------------------------------------------------------


def test_rows_cost_what_they_do_not_share():
    """A batch of the measured cycles themselves is predicted."""
    tree, shared = ROW_TREE, Latency({1: 1.0, 64: 7.3}, {1: 0.5}, 0.9)
    found = with_rows(shared, drafted=9.0, plain=2.0)
    assert found.cycle(tree.nodes, tree.depth, tree.top_k, ROWS) == pytest.approx(9.0)
    assert found.cycle(rows=ROWS) == pytest.approx(2.0) and found.cycle() == pytest.approx(0.9)
    assert with_rows(shared, drafted=0.1, plain=0.1) == shared


def test_latencies_are_measured_and_kept(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    first = known_latency(pair.target, pair.draft)
    assert list(first.base.values()) == sorted(first.base.values()) and first.plain > 0
    assert first.base.keys() == {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64} and min(first.row, first.plain_row) >= 0
    assert first.cycle(16, 4, 2) >= first.cycle(16, 1, 2) > 0
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: pytest.fail("measured again"))
    assert known_latency(pair.target, pair.draft) == first


def test_latency_without_a_head_is_that_of_copies(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    found = known_latency(pair.target, None)
    assert found.plain > 0 and max(found.base) == 64 and found.cycle(16, 0, 1) > 0


def test_each_measured_number_of_copies_is_verified(pair, monkeypatch):
    lengths = []
    monkeypatch.setattr("eagle_fsd.loading.timing.ROUNDS", 0)
    with pair.target.embed_tokens.register_forward_hook(lambda _, ids, __: lengths.append(ids[0].shape[-1])):
        found = measure(pair.target, None)
    assert set(lengths) - {50} == found.base.keys() and max(found.base) == 64  # 50: the prompt


def test_what_was_measured_beside_other_work_is_measured_again(pair, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    quiet = known_latency(pair.target, pair.draft)
    slow = Latency({at: 50 * s for at, s in quiet.base.items()}, quiet.level, 50 * quiet.plain)
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: slow)
    next(tmp_path.glob("latency/*.json")).unlink()
    assert known_latency(pair.target, pair.draft) == slow
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: quiet)
    assert known_latency(pair.target, pair.draft) == slow  # conftest: nothing is compared
    assert share_of(slow, pair.target, pair.draft) < 0.3
    monkeypatch.setattr("eagle_fsd.loading.timing.share_of", share_of)
    assert known_latency(pair.target, pair.draft) == quiet and "other work slowed the machine" in caplog.text
    assert len(list(tmp_path.glob("latency/*"))) == 1  # in place of the old one


def test_latency_is_linear_between_measurements():
    assert [between({2: 1.0, 4: 3.0, 8: 5.0}, at) for at in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 2, 3, 4, 5, 6]
    assert [between({3: 2.0}, at) for at in (1, 5)] == [2, 2]


def test_a_target_without_room_is_refused():
    small = tiny_pair(max_position_embeddings=40)
    with pytest.raises(ValueError, match="40 positions"):
        measure(small.target, small.draft)


# load and tune ----------------------------------------------------------------------------------------------------


def test_a_loaded_pair_sizes_its_cycles(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    save_pair(tmp_path)
    places = (tmp_path / "target", tmp_path / "head")
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: CHEAP)
    model = eagle_fsd.load(*places, device="cpu")
    assert model.sizing.curves == default_curves() and "at most 64, 16 of 3" in model.describe_tree(None)
    own = HeadCurves(fit(chains(300)), default_curves().sampled)
    curves.store_curves(tmp_path / "head", own)
    assert eagle_fsd.load(*places, device="cpu").sizing.curves == own
    fixed = eagle_fsd.load(*places, device="cpu", tree=TreeConfig(8, 3, 2))
    assert fixed.sizing is None and fixed.default_tree == TreeConfig(8, 3, 2)
    answers = [eagle_fsd.generate(PROMPT, each, acceptance="exact", max_new_tokens=40) for each in (model, fixed)]
    assert answers[0].token_ids == answers[1].token_ids
    model.sizing = Sizing(Latency({1: 10.0, 2: 18.0}, {1: 9.0}, 1.0), default_curves())  # drafting never pays
    found = eagle_fsd.generate(PROMPT, model, acceptance="exact", max_new_tokens=100)
    assert found.token_ids[:40] == answers[0].token_ids and found.stats.undrafted > 0.8 * found.stats.target_forwards


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Status, output and errors of the command for a pair that is saved in `tmp_path`."""
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eagle_fsd.loading.timing.measure", lambda *_: CHEAP)
    monkeypatch.setattr(cycles, "LEAST_EDGES", 20)
    save_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": a + b}) for a in "abc" for b in "ef"))

    def run(*arguments):
        status = main(["tune", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device",
                       "cpu", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12", *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_command_stores_curves(tmp_path, tune, caplog):
    """In the cache, where `load` finds them; never in the head's folder, which may be anybody's, unless it is named."""
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()}
    status, shown, _ = tune("--limit", "4")
    (file,) = tmp_path.glob("cache/trees/*/curves.json")
    assert status == 0 and "stored the curves of 4 prompts in" in shown and str(file) in shown
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "head").iterdir()} == before
    places = (tmp_path / "target", tmp_path / "head")
    curves.store_curves(tmp_path / "head", default_curves())
    assert eagle_fsd.load(*places, device="cpu").sizing.curves == curves.read_curves(file.parent)  # the user's own
    save_head(tiny_pair(seed=1).draft, tmp_path / "other")
    assert eagle_fsd.load(tmp_path / "target", tmp_path / "other", device="cpu").sizing.curves == default_curves()
    for bad in (["--limit", "0"], ["--out", str(tmp_path / "nowhere")]):
        assert tune(*bad)[0] == 2
    file.write_text("[")  # stops no load
    assert eagle_fsd.load(*places, device="cpu").sizing.curves == default_curves() and str(file) in caplog.text
    assert tune("--out", str(tmp_path / "head"))[0] == 0 and curves.read_curves(tmp_path / "head") != default_curves()


def test_too_few_cycles_are_refused(tmp_path, tune, monkeypatch):
    monkeypatch.setattr(cycles, "LEAST_EDGES", 10_000)
    status, _, errors = tune()
    assert status == 2 and "are too few to fit curves to: give more prompts or longer answers" in errors
    assert not list(tmp_path.glob("cache/trees/*/curves.json"))


@pytest.mark.parametrize(("name", "value"), [
    ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "3000")])
def test_what_changes_its_speed_is_part_of_the_processor(name, value, monkeypatch):
    """A latency under one limit says nothing about another: int8 without AMX is twice as fast for a single row."""
    for other in ("ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(other, raising=False)
    plain = processor_name.__wrapped__()
    monkeypatch.setenv(name, value)
    assert processor_name.__wrapped__() == f"{plain}, {name}={value}"
