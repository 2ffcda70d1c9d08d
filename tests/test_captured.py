"""Cycles of fixed shapes, as CUDA graphs replay them: without a graph, and on tensors without data, as if on CUDA."""

import contextlib
import json
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, Graph, Operations, fake_cuda, move
from test_engine import TREE as ENGINE_TREE
from test_engine import assert_as_alone, request, scheduled
from test_oracle import ORACLE
from tiny import (
    NAMED,
    PROMPT,
    PROMPTS,
    prefill,
    random_head,
    small_model,
    tiny_head,
    tiny_pair,
    tiny_target,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper

import eagle_fsd
from eagle_fsd import EagleModel, Session, TextDrafts, TreeConfig
from eagle_fsd.acceptance import Nodes
from eagle_fsd.acceptance.fsd import FSD
from eagle_fsd.captured import programs as captured_programs
from eagle_fsd.captured.capture import Pool, Program, uncollected
from eagle_fsd.captured.cycle import CapturedCycles, log_uncaptured, settings_of
from eagle_fsd.captured.programs import Buffers, draft, join_copies, verify, walk_and_keep
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.language_model import DraftModel
from eagle_fsd.drafting.sizing import Drafting, Plan
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.models.attention import flash_works
from eagle_fsd.options.generate import GenerateOptions

TREE, CHAIN = TreeConfig(12, 3, 3), TreeConfig(16, 15, 1)
RULES = {
    "exact": {}, "fsd": {"acceptance": "fsd", "threshold": 0.3}, "typical": {"acceptance": "typical", "threshold": 0.3},
    "relaxed": {"acceptance": "relaxed", "threshold": 2.0}, "lenience": {"acceptance": "lenience", "threshold": 1.0},
    "fsd_paper": {"acceptance": "fsd_paper", "threshold": 0.4},
    "js_top8": {"acceptance": "fsd", "threshold": 0.3, "divergence": "js_top8", "head_guard": None},
}
DRAWS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}}


def limited():
    target = tiny_target()
    head = tiny_head(target)
    head.limit_vocabulary(torch.tensor(NAMED))
    return EagleModel.from_parts(target, head)


def eagle3(named=None):
    options = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    return EagleModel.from_parts(tiny_target(num_hidden_layers=4), random_head(named, **options))


def causal_lm(family="llama", **options):
    target = tiny_target()
    return EagleModel.from_parts(target, small_model(target, family, **options))


PAIRS = {"EAGLE-2": tiny_pair, "reduced": limited, "EAGLE-3": eagle3, "EAGLE-3, reduced": lambda: eagle3(NAMED),
         "causal LM": lambda: causal_lm(vocab_size=40, num_hidden_layers=1),
         "causal LM, reduced": lambda: causal_lm("qwen3", vocab_size=30, num_hidden_layers=3)}

CASES = {"EAGLE-2": ["exact", "fsd"], "reduced": ["fsd"], "EAGLE-3": ["fsd"], "EAGLE-3, reduced": [*RULES],
         "causal LM": ["fsd", "exact"], "causal LM, reduced": ["exact", "fsd"]}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Texts of the tests cross the borders of buckets."""
    monkeypatch.setattr(captured_programs, "BUCKET", 32)
    monkeypatch.setattr(captured_programs, "ALIGNED", 8)


def capturing(pair: EagleModel) -> EagleModel:
    pair.captured = CapturedCycles(pair.target, pair.draft)
    pair.captured.taken = []  # whether each cycle was captured
    step = pair.captured.step

    def spy(*args):
        walked = step(*args)
        pair.captured.taken.append(walked is not None)
        return walked

    pair.captured.step = spy
    return pair


def assert_equal(found, expected):
    """Tokens, accepted lengths and receipts; numbers up to rounding, as a bucket has more keys than the text."""
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("token_ids", "finish_reason"):
            assert getattr(mine, name) == getattr(theirs, name)
        for name in ("accepted_lengths", "proposed", "accepted", "exact_from", "exact_because", "undrafted"):
            assert getattr(mine.stats, name) == getattr(theirs.stats, name)
        for one, other in zip(mine.receipts, theirs.receipts, strict=True):
            assert one._replace(logprob=0, regret=0, divergence=0) == other._replace(logprob=0, regret=0, divergence=0)
            assert one.divergence == other.divergence or one.divergence == pytest.approx(other.divergence, abs=1e-4)
            assert (one.logprob, one.regret) == pytest.approx((other.logprob, other.regret), abs=1e-4)


def both(pair, prompts, **options):
    """The outputs of the captured path, which must be those of the dynamic one."""
    options = {"max_new_tokens": 24, "tree": TREE, "text_drafts": "off"} | options
    expected = eagle_fsd.generate(prompts, pair, **options)
    found = eagle_fsd.generate(prompts, capturing(pair), **options)
    assert_equal(found, expected)
    return found


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind, rule", [(kind, rule) for kind, rules in CASES.items() for rule in rules])
def test_the_programs_compute_the_cycle(kind, rule, draw):
    pair = PAIRS[kind]()
    outputs = both(pair, PROMPTS[:1], **RULES[rule], **DRAWS[draw])
    assert all(pair.captured.taken) and len(pair.captured.taken) == len(outputs[0].stats.accepted_lengths)


@pytest.mark.parametrize("draw", DRAWS)
def test_warpers_of_ones_own_are_captured(draw):
    """In a batch too: equal ones are called once for all rows."""
    pair, own = tiny_pair(), [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]
    both(pair, PROMPTS[:3], logits_processor=own, **RULES["fsd"], **DRAWS[draw])
    assert all(pair.captured.taken)


COPYING = {"text_drafts": "auto", "stop_token_ids": [9]} | RULES["fsd"]
ROWS = [
    {}, RULES["fsd"], RULES["fsd"] | {"budget": 3.0}, RULES["relaxed"] | {"fuzzy_within": (5, 8)},
    DRAWS["sampled"] | RULES["fsd"] | {"seed": [1, 2, 3, 4, 5]}, {"text_drafts": "auto"}, COPYING,
    {"temperature": 1.0, "seed": 1},
]


@pytest.mark.parametrize("kind, options", [
    *(("EAGLE-2", options) for options in ROWS),
    *(("causal LM", options) for options in [
        {"tree": CHAIN}, COPYING, {"tree": CHAIN} | DRAWS["sampled"] | RULES["fsd"],
        RULES["relaxed"] | {"budget": 3.0, "fuzzy_within": (5, 8)}]),
], ids=str)
def test_rows_of_unequal_length_that_end_at_different_times(kind, options):
    pair = PAIRS[kind]()
    both(pair, PROMPTS, max_new_tokens=60, **options)
    assert all(pair.captured.taken)


def test_many_copies_on_trees_with_few_nodes():
    pair = tiny_pair()
    both(pair, PROMPTS, max_new_tokens=60, text_drafts=TextDrafts(256, 12), tree=TreeConfig(40, 2, 3))
    programs = {key[0] for home in pair.captured._known for key in home.pool.programs}
    assert "join" in programs and all(pair.captured.taken)


@pytest.mark.parametrize("options", [{}, DRAWS["sampled"], {"budget": 2.0} | RULES["relaxed"]], ids=str)
def test_plain_decoding(options):
    pair = tiny_pair()
    both(pair, PROMPTS, max_new_tokens=40, speculative=False, **options)
    (home,) = pair.captured._known
    assert all(pair.captured.taken) and all(each.fed_features is None for each in home.buffers.values())


@pytest.mark.parametrize("limit", [40, 49])
def test_texts_up_to_the_last_position(limit):
    both(tiny_pair(max_position_embeddings=limit), PROMPTS, max_new_tokens=50)


def test_a_small_model_without_positions_for_a_tree_goes_on_uncaptured():
    pair = causal_lm(max_position_embeddings=40)
    outputs = both(pair, PROMPTS, max_new_tokens=50)
    assert any(pair.captured.taken) and not all(pair.captured.taken) and outputs[0].stats.undrafted > 0


def test_what_the_fused_decoder_does_not_compute_is_not_captured():
    pair = causal_lm("mistral-window")
    both(pair, PROMPTS[:2])
    assert not CapturedCycles.support(pair.target, pair.draft) and not any(pair.captured.taken)


@pytest.mark.parametrize("kind", ["EAGLE-2", "causal LM"])
def test_a_chat_changes_between_both_paths(kind):
    """A session grows its caches; processors of one turn cannot be captured; rows of one beginning are kept."""
    pair, outputs = PAIRS[kind](), []
    for _ in range(2):
        session, prompt = Session(), list(PROMPT)
        for penalty in (1.0, 1.0, 1.3, 1.0):
            out = eagle_fsd.generate(prompt, pair, session=session, max_new_tokens=20, tree=TREE, text_drafts="off",
                                     repetition_penalty=penalty)
            outputs.append(out)
            prompt = [*prompt, *out.token_ids, 3, 4]
        pair = capturing(pair) if pair.captured is None else pair
    assert_equal(outputs[4:], outputs[:4])
    assert any(pair.captured.taken) and not all(pair.captured.taken)


def test_a_session_keeps_its_storage_though_one_of_its_caches_was_replaced():
    """A larger tree grows the drafter's cache alone; the target's must not become the spare one of another request."""
    pair, session, prompt = capturing(tiny_pair(max_position_embeddings=1024)), Session(), [*range(32)] * 14
    for tree in (TREE, TreeConfig(12, 8, 6), TREE):
        out = eagle_fsd.generate(prompt, pair, session=session, max_new_tokens=20, tree=tree, text_drafts="off")
        prompt = [*prompt, *out.token_ids, 3, 4]
        caches = session.row.caches
        before = [cache.allocated[0][..., : cache.length, :].clone() for cache in caches]
        eagle_fsd.generate(PROMPTS[1], pair, max_new_tokens=9, tree=TREE, text_drafts="off")
        assert all(torch.equal(cache.allocated[0][..., : cache.length, :], each)
                   for cache, each in zip(caches, before, strict=True))
    assert all(pair.captured.taken)


def test_flash_attn_that_fails_is_not_used(monkeypatch, caplog):
    def broken(*tensors, **options):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("eagle_fsd.models.attention.flash_for", lambda query, value: broken)
    flash_works.cache_clear()
    both(tiny_pair(), PROMPTS, max_new_tokens=8)
    flash_works.cache_clear()
    assert "no kernel image" in caplog.text


@pytest.mark.parametrize("kind", ["EAGLE-2", "causal LM"])
def test_requests_of_an_engine_that_join_and_leave(kind):
    pair = PAIRS[kind]()
    pair.tokenizer = tiny_tokenizer()
    numbers = [*range(0, 90, 15), *range(7, 97, 15), *range(15)]  # first of equal options
    alone = {number: eagle_fsd.generate(request(number)[0], pair, tree=ENGINE_TREE, **request(number)[1])
             for number in numbers}
    with eagle_fsd.Engine(capturing(pair), max_rows=3, tree=ENGINE_TREE) as engine:
        tickets = {number: engine.submit(request(number)[0], **request(number)[1]) for number in numbers}
        for number, ticket in tickets.items():
            assert_as_alone(ticket.result(), alone[number])
    assert len(pair.captured.taken) > sum(pair.captured.taken) > 5


@pytest.mark.parametrize("options, named", [
    ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logits_processor": [lambda ids, scores: scores]}, "function"), ({"speculative": False}, "speculative=False"),
    ({"acceptance": "own"}, "the rule Own"),
], ids=lambda value: value if isinstance(value, str) else next(iter(value)))
@pytest.mark.parametrize("kind", ["EAGLE-2", "causal LM"])
def test_few_requests_that_cannot_be_captured_leave_the_others_captured(kind, options, named, caplog):
    """Wherever they are in the batch; texts are as alone, and the log says once what is not captured."""
    pair, tickets, rows = PAIRS[kind](), [], []
    if options.get("acceptance") == "own":
        options = {"acceptance": type("Own", (FSD,), {})(0.3)}
    asked = [({}, 30), (options, 40), ({}, 44), (options, 12), *[({}, 36 + number) for number in range(5)]]
    prompts = [PROMPTS[number % len(PROMPTS)][: 12 - number] for number in range(len(asked))]
    fixed = {"tree": TREE, "text_drafts": "off", "seed": 0}
    expected = [eagle_fsd.generate(prompt, pair, max_new_tokens=count, **fixed, **own)
                for prompt, (own, count) in zip(prompts, asked, strict=True)]
    pair = capturing(pair)
    spy = pair.captured.step

    def step(batch, *args):
        walked = spy(batch, *args)
        rows.append((walked is not None, [request.seed for request in batch.requests]))
        return walked

    pair.captured.step = step
    log_uncaptured.cache_clear()

    def submit(*numbers):
        return lambda engine: tickets.extend(engine.submit(
            prompts[number], max_new_tokens=asked[number][1], **{**fixed, "seed": number}, **asked[number][0])
            for number in numbers)

    engine = scheduled(pair, [[submit(0, 1, 2)], [], [], [submit(3, 4, 5, 6, 7, 8)]], max_rows=9, tree=TREE)
    assert engine.error is None
    for ticket, alone in zip(tickets, expected, strict=True):
        found = ticket.result(0)
        assert_as_alone(found, replace(alone, seed=found.seed))
        assert found.stats.accepted_lengths == alone.stats.accepted_lengths
        assert [token for piece in ticket for token in piece.token_ids] == alone.token_ids
    apart = [(captured, seeds) for captured, seeds in rows if not {1, 3} & set(seeds)]
    assert len(apart) >= 8 and all(captured for captured, _ in apart)
    assert [1, 3] in [sorted(seeds) for captured, seeds in rows if not captured]
    assert caplog.text.count(f"take up to twice as long, for {named}") == 1


def test_memory_that_runs_out_in_a_captured_cycle_ends_the_longest_request(monkeypatch):
    """In whichever program, also after the buffers were changed: the others go on where they were."""
    options, failures = {"max_new_tokens": 24, "text_drafts": "off", "seed": 0}, set()
    expected = [eagle_fsd.generate(prompt, tiny_pair(), tree=TREE, **options) for prompt in PROMPTS]
    for last in range(5, 17):
        pair, tickets, calls = capturing(tiny_pair()), [], []
        run = Pool.run

        def scarce(pool, key, function, calls=calls, last=last, run=run):
            run(pool, key, function)
            calls.append(key[0])
            if len(calls) == last:
                failures.add(key[0])
                raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "run", scarce)
            engine = scheduled(pair, [[lambda engine, tickets=tickets: tickets.extend(
                engine.submit(prompt, **options) for prompt in PROMPTS)]], tree=TREE)
        assert engine.error is None and engine.stats.finished == {"error": 1, "length": len(PROMPTS) - 1}
        assert isinstance(tickets[3]._output.exception(), torch.OutOfMemoryError) and all(pair.captured.taken)
        for number in (0, 1, 2, 4):
            assert_as_alone(tickets[number].result(0), expected[number])
    assert failures == {"draft", "verify", "walk"}


def test_kept_features_of_a_cancelled_request_are_its_own():
    """Not those of the next request, whose path the programs write to the same place: a prompt that continues a
    cancelled answer is drafted for as if it had been prefilled whole."""
    pair, asked = capturing(tiny_pair()), []
    options = {"text_drafts": "off", "acceptance": "exact"}
    with eagle_fsd.Engine(pair, max_rows=1, max_tokens=4000, prefixes=20, tree=ENGINE_TREE) as engine:
        for count in range(2, 12):
            prompt = [count, *PROMPT]
            ticket = engine.submit(prompt, max_new_tokens=60, **options)
            for _ in zip(range(count), ticket, strict=False):
                pass
            ticket.cancel()
            asked.append([*prompt, *ticket.result().token_ids, 7])
        continued = [engine.submit(prompt, max_new_tokens=20, **options).result() for prompt in asked]
    for found, prompt in zip(continued, asked, strict=True):
        expected = eagle_fsd.generate(prompt, pair, tree=ENGINE_TREE, max_new_tokens=20, seed=found.seed, **options)
        assert_as_alone(found, expected)
        assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        assert found.stats.prefill_tokens <= 3


def test_later_requests_use_the_same_caches_and_programs_unless_weights_changed():
    pair = capturing(tiny_pair())
    pools = []
    for change in (False, False, True):
        if change:
            with torch.no_grad():
                pair.target.lm_head.weight.mul_(2)
        eagle_fsd.generate(PROMPT, pair, max_new_tokens=9, tree=TREE, text_drafts="off")
        (home,) = pair.captured._known
        pools.append(set(home.pool.programs.values()))
    assert pools[0] == pools[1] and not pools[1] & pools[2]
    hook = pair.target.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: -output)
    both(pair, [PROMPT])  # by the stock decoder
    assert not any(pair.captured.taken)
    hook.remove()
    both(pair, [PROMPT])
    assert all(pair.captured.taken)


def test_what_trees_of_clients_leave_behind_is_bounded(monkeypatch):
    """Buffers go with the last of their programs, whose number is bounded; texts are as without."""
    made, new = weakref.WeakSet(), Buffers.__init__
    monkeypatch.setattr(Buffers, "__init__", lambda self, *args: (made.add(self), new(self, *args))[1])
    monkeypatch.setattr("eagle_fsd.captured.cycle.Pool", partial(Pool, most=8))
    plain, pair = tiny_pair(), capturing(tiny_pair())
    trees = [replace(TREE, draft_temperature=1 + number / 100) for number in range(30)]
    for tree in [*trees, *trees[-2:], *trees[:2]]:
        options = {"max_new_tokens": 9, "tree": tree, "text_drafts": "off", "temperature": 0.8, "seed": 1}
        assert_equal([eagle_fsd.generate(PROMPT, pair, **options)], [eagle_fsd.generate(PROMPT, plain, **options)])
        assert len(made) <= 8
    assert all(pair.captured.taken) and len(made) >= 2


@pytest.mark.parametrize("setting", [0, 1])
@torch.inference_mode()
def test_the_recorded_runs(setting):
    target = AutoModelForCausalLM.from_pretrained(ORACLE / "target").eval()
    pair = EagleModel.from_parts(target, eagle_fsd.load_head(ORACLE / "head"))
    captured = capturing(pair).captured
    for prompt in json.loads((ORACLE / "expected.json").read_text())["prompts"]:
        run = prompt["runs"][setting]
        plan = Plan(TreeConfig(run["total_token"], run["depth"] + 1, run["top_k"]))
        asked = Request(prompt["prompt_ids"], GenerateOptions(), max_new_tokens=200)
        batch = Batch(pair.target, pair.draft, [asked], Drafting(lambda _, plan=plan: plan), captured=captured)
        prefill(batch)
        for _ in run["accept_lengths"]:
            cycle.step(batch)
        assert asked.answer[: len(prompt["greedy_ids"])] == prompt["greedy_ids"]
        assert asked.stats.accepted_lengths == run["accept_lengths"]
    assert all(captured.taken)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind, rule", [("EAGLE-2", "exact"), ("reduced", "fsd"), ("EAGLE-3", "relaxed"),
                                        ("EAGLE-3, reduced", "js_top8"), ("causal LM", "fsd"),
                                        ("causal LM, reduced", "fsd")])
def test_programs_replayed_operation_by_operation(kind, rule, draw, monkeypatch):
    """Nothing that the host knows in the first call of a program may be part of it."""
    replayed = []

    def call(program):
        if not hasattr(program, "recorded"):
            program.recorded = Graph()
            with program.recorded:
                program.function()
        else:
            replayed.append(program.recorded.replay())

    monkeypatch.setattr(Program, "__call__", call)
    monkeypatch.setattr(Nodes, "known_empty", lambda self, columns: False)  # the choice of a CPU
    both(PAIRS[kind](), PROMPTS[:2], max_new_tokens=40, text_drafts="auto", **RULES[rule] | DRAWS[draw])
    assert len(replayed) > 10


def test_a_pool_of_programs(monkeypatch, caplog, capsys):
    """With graphs that do nothing: what is captured when, what a graph keeps, and what happens if a capture fails."""
    made = []

    class Recorder:
        def __init__(self):
            made.append(self)
            self.replays = 0

        def replay(self):
            self.replays += 1

        def pool(self):
            return 0, 1

    @contextlib.contextmanager
    def capturing_on(graph, *, pool, stream, capture_error_mode):
        assert pool == (0, 1) and capture_error_mode == "thread_local"
        yield

    for name, stub in {"CUDAGraph": Recorder, "graph": capturing_on, "graph_pool_handle": lambda: (0, 1),
                       "Stream": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("eagle_fsd.captured.capture.SOON", 0.0)
    pool, calls, weight, out = Pool(torch.device("cuda"), most=2), [], torch.ones(3), torch.zeros(3)

    def function(name):
        def run():
            calls.append(name)
            out.copy_((weight * 2)[:2].sum() + weight)
        return run

    for name in "aabab":
        pool.run(name, function(name))
    assert calls == ["a", "a", "b", "b"] and [graph.replays for graph in made] == [2, 1]
    pool.close_bar()
    shown = capsys.readouterr().err
    assert shown.count("capturing cycles: 0 graph") == 1 and pool.bar is None and shown.endswith("\r")
    assert {id(each) for each in pool.programs["a"].inputs} == {id(weight), id(out)}
    pool.run("c", function("c"))
    assert list(pool.programs) == ["b", "c"]
    before = weakref.ref(pool)
    with uncollected():
        pool = Pool(torch.device("cuda"))
        assert before() is None
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: 1 / 0)
    for name in "dde":
        pool.run(name, function(name))
    assert calls[-3:] == ["d", "d", "e"] and isinstance(pool.failed, ZeroDivisionError)
    assert pool.failed.__traceback__ is None
    assert caplog.text.count("because a capture failed") == 1


def test_no_bar_stays_after_a_cycle(monkeypatch):
    closed = []

    def run(pool, key, function):
        pool.bar = pool.bar or SimpleNamespace(close=lambda: closed.append(key))
        function()

    monkeypatch.setattr(Pool, "run", run)
    both(pair := tiny_pair(), PROMPTS[:1])
    assert len(closed) == len(pair.captured.taken) > 1


# On a device ------------------------------------------------------------------------------------------------------


def on_cuda(pair, **options):
    draft = pair.draft.model.cuda() if isinstance(pair.draft, DraftModel) else pair.draft
    return EagleModel.from_parts(pair.target.model.cuda(), draft, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind, rules", CASES.items(), ids=str)
def test_graphs_compute_the_same(kind, rules, draw, monkeypatch):
    monkeypatch.setattr(captured_programs, "BUCKET", 512)
    eager, graphs = on_cuda(PAIRS[kind](), cuda_graphs=False), on_cuda(PAIRS[kind]())
    assert eager.captured is None
    for rule in rules:
        options = {"max_new_tokens": 24, "tree": TREE, "text_drafts": "auto"} | RULES[rule] | DRAWS[draw]
        expected = eagle_fsd.generate(PROMPTS[:2], eager, **options)
        for _ in range(2):  # the second time from the graphs of the first
            assert_equal(eagle_fsd.generate(PROMPTS[:2], graphs, **options), expected)
    (home,) = graphs.captured._known
    assert graphs.captured.failed is None and all(program.graph is not None for program in home.pool.programs.values())


@pytest.mark.cuda
@pytest.mark.parametrize("draw", DRAWS)
@torch.inference_mode()
def test_the_host_waits_for_an_event_alone(draw, monkeypatch):
    monkeypatch.setattr(captured_programs, "BUCKET", 512)
    pair = on_cuda(tiny_pair(max_position_embeddings=512))
    options = {"max_new_tokens": 300, "text_drafts": "off", "ignore_eos": True, "fuzzy_within": (5, 8)}
    options = GenerateOptions(**options | RULES["fsd"] | DRAWS[draw])
    requests = make_requests(pair, PROMPTS[:3], options)
    batch = Batch(pair.target, pair.draft, requests, Drafting(lambda _: Plan(TREE)), captured=pair.captured)
    prefill(batch)
    for number in range(12):
        torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
        try:
            cycle.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(len(request.receipts) > 12 for request in requests)


# On a device without data ---------------------------------------------------------------------------------------


SMALL, SMALL_CHAIN = TreeConfig(5, 2, 2), TreeConfig(4, 3, 1)


def programs_of(pair, rows, draw, rule):
    """The three programs, from a pair and buffers on CUDA."""
    target, drafter = pair.target, pair.draft
    if isinstance(drafter, DraftModel):
        tree, modules, layers = SMALL_CHAIN, [drafter.model], drafter.fused.layers
    else:
        rows_of_output = [] if drafter.output_rows is None else [drafter.output_rows.layer]
        tree, modules, layers = SMALL, [drafter, *rows_of_output], drafter.fused[:1]
    for module in (target.model, *modules):
        move(module)
    storages = [torch.zeros(len(each), 2, rows, each[0].key_heads, 32, each[0].size, device=CUDA)
                for each in (target.fused.layers, layers)]
    buffers = Buffers(target, drafter, storages, tree)
    options = GenerateOptions(**{"max_new_tokens": 9, "text_drafts": "off"} | draw | rule)
    requests = make_requests(pair, PROMPTS[:rows], options)
    batch = SimpleNamespace(requests=requests, target=target, drafter=drafter, has_positions=lambda *_: True,
                            unread_tokens=lambda row: [], drafting=SimpleNamespace(largest=Plan(tree)))
    settings = replace(settings_of(batch, range(rows)), copying=True)
    processors, walk = requests[0].processors, replace(settings, budgeted=True, marked=True)
    return (partial(draft, buffers, target, drafter, settings, processors, 32, buffers.path),
            partial(join_copies, buffers, 64, buffers.path),
            partial(verify, buffers, target, 32, buffers.most),
            partial(walk_and_keep, buffers, target, walk, processors, buffers.most, buffers.path, True))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind, rules", CASES.items(), ids=str)
def test_programs_neither_wait_nor_move_data_nor_change_shapes(kind, rules, draw):
    pair, rows = PAIRS[kind](), 4 if "reduced" in kind else 1
    with fake_cuda():
        for rule in rules:
            programs = programs_of(pair, rows, DRAWS[draw], RULES[rule])[3 if rule != rules[0] else 0 :]
            for program in programs:  # norms and rotary tables are cached in the first cycle
                program()
            cycles = []
            for _ in range(2):
                with Operations() as operations:
                    for program in programs:
                        program()
                cycles.append(operations.seen)
            assert cycles[0] == cycles[1]


def test_the_checks_find_what_cannot_be_captured():
    with fake_cuda(), Operations():
        numbers = torch.zeros(3, device=CUDA)
        for wrong in (lambda: numbers.tolist(), lambda: bool(numbers.any()), lambda: numbers[numbers > 0],
                      lambda: numbers + torch.ones(3), lambda: numbers.cpu(), lambda: torch.tensor([1.0], device=CUDA)):
            with pytest.raises((AssertionError, RuntimeError)):
                wrong()
