"""Requests that join: each gets what it would get alone, whoever comes and goes beside it."""

import asyncio
import functools
import gc
import logging
import random
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from tiny import PROMPT, VOCAB, random_head, readable, tiny_pair, tiny_target, tiny_tokenizer

import eagle_fsd
from eagle_fsd.acceptance.fsd import FSD
from eagle_fsd.batching.loop import Loop, Prefixes
from eagle_fsd.decoding.batch import Batch, shared_prefix
from eagle_fsd.drafting.config import MOST_NODES
from eagle_fsd.drafting.copies import TextSource, forced_copies
from eagle_fsd.drafting.sizing import Pause, Plan, Prices
from eagle_fsd.models.cache import TreeCache

TREE = eagle_fsd.TreeConfig(12, 4, 3)


def no_three_after_one(input_ids, scores):
    """A user's processor."""
    scores = scores.clone()
    scores[input_ids[:, -1] == 1, 3] = -torch.inf
    return scores


OPTIONS = [
    {},
    {"acceptance": "exact", "temperature": 0.8, "top_k": 5},
    {"acceptance": "exact", "temperature": 1.0, "top_p": 0.9},
    {"acceptance": "exact", "repetition_penalty": 1.3, "min_new_tokens": 5},
    {"acceptance": "exact", "stop_token_ids": [4, 9, 17]},
    {"acceptance": "exact", "stop": ["w", "mm"]},
    {"threshold": 0.3},
    {"threshold": 0.5},
    {"threshold": 0.3, "temperature": 0.8, "stop": "q"},
    {"threshold": 0.3, "budget": 0.4},
    {"threshold": 0.3, "budget": 0.4, "temperature": 1.0},
    {"acceptance": "lenience", "threshold": 0.7, "temperature": 1.0},
    {"acceptance": "exact", "temperature": 0.9, "logits_processor": [no_three_after_one]},
    {"threshold": 0.2, "logits_processor": [no_three_after_one]},
    {"acceptance": "lenience", "threshold": 0.5, "temperature": 0.6},
]


class Trees:
    """Such as `tree="auto"` has: another tree for each number of rows, for some of them none; drafting pauses."""

    largest_tree, pauses = eagle_fsd.TreeConfig(MOST_NODES, 5, 4), defaultdict(Pause)

    def of(self, rows=1, temperature=0.0, lossless=True):
        tree = {1: TREE, 3: eagle_fsd.TreeConfig(30, 5, 4), 5: eagle_fsd.TreeConfig(4, 2, 2)}.get(rows)
        return Plan(tree or self.largest_tree, tree is not None, Prices(lambda nodes, levels: 2.5))


@functools.cache
def model(trees: bool = False, **sizes):
    pair = tiny_pair(tokenizer=tiny_tokenizer(), **sizes)
    pair.tree, pair.sizing = TREE, Trees() if trees else None
    return pair


def eagle3_pair(named=None, tokenizer=None):
    """A deep target and a head of random weights; `named`: the tokens of its vocabulary, None for all."""
    return eagle_fsd.EagleModel.from_parts(tiny_target(num_hidden_layers=8), random_head(named), tokenizer)


@functools.cache
def request(number):
    """One of some requests with many beginnings in common: prompt and options."""
    draw = random.Random(number)
    common = [(7 * i + 2) % VOCAB for i in range(30)]
    prompt = [*common[: draw.choice([0, 4, 12, 30])], *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 8)))]
    options = {"max_new_tokens": draw.choice([1, 2, 7, 14, 20]), "seed": number, **OPTIONS[number % len(OPTIONS)]}
    options["max_new_tokens"] = max(options["max_new_tokens"], options.get("min_new_tokens", 0))
    return prompt, options


@functools.cache
def alone(number):
    prompt, options = request(number)
    return eagle_fsd.generate(prompt, model(), tree=TREE, **options)


def assert_as_alone(found, expected):
    assert found.token_ids == expected.token_ids
    assert (found.text, found.finish_reason, found.seed) == (expected.text, expected.finish_reason, expected.seed)
    assert len(found.receipts) == len(found.token_ids)
    for name in ("logprob", "regret"):
        ours, theirs = ([getattr(each, name) for each in output.receipts] for output in (found, expected))
        assert ours == pytest.approx(theirs, abs=1e-4)


def pieces_of(ticket):
    pieces = list(ticket)
    tokens = [token for piece in pieces for token in piece.token_ids]
    receipts = [receipt for piece in pieces for receipt in piece.receipts]
    return tokens, receipts, "".join(piece.text for piece in pieces)


def scheduled(pair, events, **options):
    """An engine after its events: lists of functions of the engine, one for each turn. Its own thread calls them before
    the turn, and closes it once nothing is left to do."""
    ready = threading.Event()

    class Scheduled(Loop):
        def _wait(self):
            ready.wait()
            while not (self.closed or self.queue or self.rows) or events:
                for event in events.pop(0) if events else ():
                    event(engine)
                if self.queue or self.rows:
                    return True
                self.closed = not events
            return bool(self.queue or self.rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_fsd.batching.engine.Loop", Scheduled)
        engine = eagle_fsd.Engine(pair, **options)
    ready.set()
    engine._loop.thread.join()
    return engine


def run_schedule(seed):
    """Requests join at random moments and some are cancelled; every one gets its own text, or the beginning of it, but
    fuzzy ones whose tree is chosen for their company."""
    draw = random.Random(seed)
    numbers = [draw.randrange(4 * len(OPTIONS)) for _ in range(draw.randint(3, 7))]
    tickets, cancelled = {}, set()

    def submit(at):
        def event(engine):
            prompt, options = request(numbers[at])
            tickets[at] = engine.submit(prompt, **options)
        return event

    def cancel(at):
        def event(engine):
            tickets[at].cancel()
            cancelled.add(at)
        return event

    def ended(at):
        def event(engine):
            assert tickets[at].done
        return event

    events = [[] for _ in range(40)]
    for at in range(len(numbers)):
        turn = draw.randrange(25)
        events[turn].append(submit(at))
        if draw.random() < 0.25:
            later = turn + draw.randrange(1, 12)
            events[later].append(cancel(at))
            events[later + 1].append(ended(at))
    rows = draw.randint(1, 5)
    options = {"max_tokens": draw.choice([120, 300, 2000]), "prefill_chunk": draw.choice([1, 3, 8, 64]),
               "prefixes": draw.choice([0, 1, 3])}
    chosen = draw.random() < 0.6
    engine = scheduled(model(chosen), events, max_rows=rows, **options)
    assert engine.error is None and len(tickets) == len(numbers)
    assert engine.rows == engine.waiting == 0
    for at, ticket in tickets.items():
        output, expected = ticket.result(0), alone(numbers[at])
        if chosen and "threshold" in request(numbers[at])[1]:
            assert len(output.receipts) == len(output.token_ids) <= request(numbers[at])[1]["max_new_tokens"]
            assert at in cancelled if output.finish_reason == "cancelled" else output.token_ids
        elif output.finish_reason == "cancelled":
            assert at in cancelled
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
        else:
            assert_as_alone(output, expected)
        assert pieces_of(ticket) == (output.token_ids, output.receipts, output.text)
    stats = engine.stats
    outputs = [ticket.result(0) for ticket in tickets.values()]
    assert stats.requests == len(numbers) == stats.finished.total()
    assert stats.finished == {reason: sum(output.finish_reason == reason for output in outputs)
                              for reason in {output.finish_reason for output in outputs}}
    assert stats.tokens == sum(len(output.token_ids) for output in outputs)
    assert stats.fuzzy == sum(receipt.source == "fuzzy" for output in outputs for receipt in output.receipts)
    return stats, {output.finish_reason for output in outputs}


def test_random_schedules(monkeypatch):
    reused, undrafted, reasons = 0, 0, set()
    for seed in range(45):
        monkeypatch.setattr("eagle_fsd.decoding.batch.STEP", (256, 8)[seed % 2])  # caches grow seldom, or often
        stats, ended = run_schedule(seed)
        reused += stats.reused_tokens
        undrafted += stats.undrafted
        reasons |= ended
    assert reused > 100 and undrafted > 100 and reasons >= {"length", "stop", "cancelled"}


def run_gaps(seed):
    """Long prompts join while nothing is drafted, and a tree is chosen again while they are there; room is tight."""
    draw = random.Random(seed)
    pair = model(True, max_position_embeddings=512)

    def prompt():
        first, step = draw.randrange(VOCAB), draw.randrange(1, VOCAB)
        return [(step * i + first) % VOCAB for i in range(draw.choice([2, 9, 40, 150, 200]))]

    asked = [(prompt(), {"max_new_tokens": draw.choice([4, 12, 20]), "acceptance": "exact", "seed": at})
             for at in range(draw.randint(3, 6))]
    tickets, events = {}, [[] for _ in range(20)]

    def submit(at, engine):
        tickets[at] = engine.submit(asked[at][0], **asked[at][1])

    for at in range(len(asked)):
        events[draw.randrange(12)].append(functools.partial(submit, at))
    engine = scheduled(pair, events, max_rows=4, max_tokens=draw.choice([289, 600, 860, 1160]))
    assert engine.error is None, engine.error
    for at, (prompt, options) in enumerate(asked):
        assert_as_alone(tickets[at].result(0), eagle_fsd.generate(prompt, pair, tree=TREE, **options))
    return engine.stats.undrafted


@pytest.mark.parametrize("step", [256, 8])
def test_rows_that_joined_while_nothing_was_drafted(step, monkeypatch):
    monkeypatch.setattr("eagle_fsd.decoding.batch.STEP", step)
    assert sum(run_gaps(seed) for seed in range(15)) > 30


# Prompts in parts, and what is kept of them -----------------------------------------------------------------------


@pytest.mark.parametrize("trees", [False, True], ids=["drafting", "auto"])
def test_what_was_read_before_is_copied(trees):
    """A conversation's next turn, a prompt with the same beginning, and the very same prompt."""
    prompt, options = [(3 * i + 1) % VOCAB for i in range(25)], {"max_new_tokens": 12, "acceptance": "exact"}
    first = eagle_fsd.generate(prompt, model(), tree=TREE, **options)
    others = [[*prompt, *first.token_ids, 5, 6], [*prompt[:20], 9, 9], prompt, [31, 30]]
    held = [len(prompt) + len(first.token_ids) - 2, 19, len(prompt) - 2, 0]  # at least
    with eagle_fsd.Engine(model(trees)) as engine:
        assert_as_alone(engine.submit(prompt, seed=first.seed, **options).result(), first)
        for other, least in zip(others, held, strict=True):
            before = engine.stats.reused_tokens
            expected = eagle_fsd.generate(other, model(), tree=TREE, **options)
            output = engine.submit(other, seed=expected.seed, **options).result()
            assert_as_alone(output, expected)
            assert engine.stats.reused_tokens - before == len(other) - output.stats.prefill_tokens >= least


@pytest.mark.parametrize(("most", "room", "found"), [(3, 2000, [3, 4, 5]), (6, 200, [4, 5]), (0, 2000, [])], ids=str)
def test_prefixes_are_bounded(most, room, found):
    """By their number, and by half of the engine's room: 13, 21, 29, 37, 45 and 53 positions are known."""
    def prompt(number):
        return [number] * (10 + 8 * number)

    for again in range(6):
        with eagle_fsd.Engine(model(), max_tokens=room, prefixes=most) as engine:
            for number in (*range(6), again):
                before = engine.stats.reused_tokens
                engine.submit(prompt(number), max_new_tokens=4, text_drafts="off").result()
            assert (engine.stats.reused_tokens - before > 0) == (again in found)


def test_the_common_prefix_of_two_texts():
    """Also longer than the parts that are compared at once."""
    text = list(range(1000, 1700))
    for at in (0, 1, 255, 256, 257, 511, 512, 513, 699):
        other = [*text[:at], 7, *text[at + 1 :]]
        assert shared_prefix(text, other) == shared_prefix(other, text) == at
        assert shared_prefix(text[:at], text) == shared_prefix(text, text[:at]) == at
        assert shared_prefix(text[:at], other[: at + 1]) == at
    assert shared_prefix(text, list(text)) == len(text) and shared_prefix([], []) == 0


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
@pytest.mark.parametrize("part", ["target", "head"])
def test_nothing_is_copied_that_other_weights_have_computed(part, ended):
    """Weights change in place, beside a row that runs or after it. Its own caches are those of both, as in a loop."""
    pair, prompt, tickets = tiny_pair(), [(3 * i + 1) % VOCAB for i in range(25)], []
    options = {"max_new_tokens": 12, "acceptance": "exact", "text_drafts": "off", "seed": 0}
    values = (pair.target.model.model if part == "target" else pair.draft).layers[0].self_attn.v_proj.weight

    def submit(engine):
        tickets.append(engine.submit(prompt, **options))

    def change(engine):
        with torch.no_grad():
            values.mul_(-2)

    def reset(engine):
        with torch.no_grad():
            values.div_(-2)

    pause = [[]] * (20 if ended else 1)
    engine = scheduled(pair, [[submit], *pause, [change, submit], *[[]] * 20, [submit], *[[]] * 20, [reset, submit]],
                       tree=TREE)
    outputs = [ticket.result(0) for ticket in tickets]
    assert [len(prompt) - output.stats.prefill_tokens > 0 for output in outputs] == [False, False, True, False]
    expected = eagle_fsd.generate(prompt, pair, tree=TREE, **options)
    assert_as_alone(outputs[3], expected)
    change(engine)
    changed = eagle_fsd.generate(prompt, pair, tree=TREE, **options)
    for output in outputs[1:3]:
        assert_as_alone(output, changed)
        assert output.stats.accepted_lengths == changed.stats.accepted_lengths  # of a head, only drafts are others
    assert (changed.token_ids != expected.token_ids) == (part == "target")


# Room, queue and closing ------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused_and_what_does_not_fit_yet_waits():
    with eagle_fsd.Engine(model(), max_tokens=130, max_rows=4) as engine:
        with pytest.raises(ValueError, match=r"12 tokens and max_new_tokens=107 need 119 positions, .* room for 118"):
            engine.submit(PROMPT, max_new_tokens=107)
        with pytest.raises(ValueError, match="min_new_tokens must be at most 106, a row's share .*, got 150"):
            engine.submit(PROMPT, max_new_tokens=200, min_new_tokens=150, fit=True)
        most, counts = [], (40, 40, 20, 90, 8)
        tickets = [engine.submit(PROMPT, max_new_tokens=count, seed=count, acceptance="exact",
                                 stopping_criteria=[lambda ids, scores: most.append(engine.rows) or False])
                   for count in counts]
        for count, ticket in zip(counts, tickets, strict=True):
            assert_as_alone(ticket.result(), eagle_fsd.generate(PROMPT, model(), max_new_tokens=count, seed=count,
                                                                acceptance="exact", tree=TREE))
        assert max(most) == 2  # 2 * (12 + 40 + 12) <= 130 < 3 * (12 + 20 + 12)
    with eagle_fsd.Engine(model(), max_rows=2) as engine:  # as free memory says, here all positions for both
        whole = [engine.submit(PROMPT, max_new_tokens=1000, fit=True) for _ in range(2)]
        assert [len(ticket.result().token_ids) for ticket in whole] == [128 - len(PROMPT)] * 2


def test_a_chosen_tree_is_that_for_the_rows_of_the_moment():
    """Of a fuzzy request too; alone it gets the tree that it wishes for, but where all have one."""
    pair, own = model(True), eagle_fsd.TreeConfig(5, 2, 2)
    options = {"max_new_tokens": 14, "threshold": 0.5, "head_guard": None, "text_drafts": "off", "seed": 0}
    expected = [eagle_fsd.generate(PROMPT, pair, tree=tree, **options) for tree in (TREE, own)]
    assert expected[0].token_ids != expected[1].token_ids
    with eagle_fsd.Engine(pair, max_rows=3) as engine:
        assert_as_alone(engine.submit(PROMPT, **options).result(), expected[0])
        assert_as_alone(engine.submit(PROMPT, tree=own, **options).result(), expected[1])
    with eagle_fsd.Engine(pair, tree=TREE) as engine:
        with pytest.raises(ValueError, match="tree of a fuzzy request must be the engine's, TreeConfig"):
            engine.submit(PROMPT, tree=own, **options)
        assert engine.submit(PROMPT, tree=own, speculative=False, **options).result().stats.drafts == 0


def blocked(engine):
    """A request whose second token waits for an event."""
    go, begun = threading.Event(), threading.Event()

    def wait(ids, scores):
        begun.set()
        return not go.wait(30)

    ticket = engine.submit(PROMPT, max_new_tokens=6, stopping_criteria=[wait])
    assert begun.wait(30)
    return ticket, go


def test_the_queue_has_an_end():
    with eagle_fsd.Engine(model(), max_rows=1, max_waiting=2) as engine:
        first, go = blocked(engine)
        waiting = [engine.submit(PROMPT, max_new_tokens=3) for _ in range(2)]
        assert (engine.rows, engine.waiting) == (1, 2) and waiting[0].queued_seconds is None
        with pytest.raises(eagle_fsd.QueueFull, match="2 requests wait already"):
            engine.submit(PROMPT)
        waiting[0].cancel()
        go.set()
        assert waiting[1].result().finish_reason == "length" == first.result().finish_reason
        assert waiting[0].result().finish_reason == "cancelled" and waiting[0].result().text == ""
        assert waiting[0].first_token_seconds is None
        assert 0 < waiting[1].queued_seconds < waiting[1].first_token_seconds <= waiting[1].total_seconds
        engine.submit(PROMPT, max_new_tokens=3).result()
    assert engine.stats.finished == {"length": 3, "cancelled": 1}


def test_closing_finishes_what_was_submitted():
    before = threading.active_count()
    engine = eagle_fsd.Engine(model(), max_rows=2)
    tickets = [engine.submit(PROMPT, max_new_tokens=10) for _ in range(5)]
    engine.close()
    assert all(ticket.done and ticket.result().finish_reason == "length" for ticket in tickets)
    assert engine.closed and threading.active_count() == before
    with pytest.raises(eagle_fsd.EngineClosed, match="it was closed"):
        engine.submit(PROMPT)
    engine.close()


def test_closing_at_once():
    before = threading.active_count()
    engine = eagle_fsd.Engine(model(), max_rows=1)
    first, go = blocked(engine)
    second = engine.submit(PROMPT)
    closing = threading.Thread(target=engine.close, kwargs={"drain": False})
    closing.start()
    with pytest.raises(eagle_fsd.EngineClosed, match="before the request started"):
        second.result(30)
    go.set()
    closing.join(30)
    assert threading.active_count() == before
    assert first.result().finish_reason == "cancelled" and 1 <= len(first.result().token_ids) < 6
    assert engine.stats.finished == {"cancelled": 1, "error": 1}


# Errors -----------------------------------------------------------------------------------------------------------


class Raises:
    """A processor that fails once the text is so long."""

    def __init__(self, length, found):
        self.length, self.found = length, found

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.length:
            return scores
        if isinstance(self.found, Exception):
            raise self.found
        if callable(self.found):
            return self.found(scores)
        return scores + self.found


@pytest.mark.parametrize(("at", "found", "options"), [
    (0, ValueError("no such luck"), {"threshold": 0.3}),  # in the prompt's first token
    (5, ValueError("no such luck"), {"acceptance": "exact"}),
    (5, float("nan"), {"threshold": 0.3}),
    (5, -float("inf"), {"acceptance": "exact"}),
    (5, lambda scores: scores[:, 1:], {"acceptance": "lenience", "threshold": 0.5}),
    (5, "rule", {"acceptance": "exact"}),
    (5, "criterion", {"acceptance": "exact"}),
], ids=readable)
def test_an_error_ends_its_own_request(found, at, options):
    """Also beside rows that are decided together with it."""
    options, tickets = {"max_new_tokens": 20, **options}, []
    bad, good, calls = {"logits_processor": [Raises(len(PROMPT) + at, found)]}, [Raises(1000, found)], []
    if found == "rule":
        bad = {"acceptance": lambda nodes: calls.append(nodes) or (nodes.warped if len(calls) < at else None)}
    if found == "criterion":
        bad = {"stopping_criteria": [lambda ids, scores: None if ids.shape[1] > len(PROMPT) + at else False]}
    said = r"no such luck|no token can be drawn|\[1, 32\], got \[1, 31\]|Weights or a tensor|a bool or a tensor of one"

    def submit(engine):
        tickets.append(engine.submit(PROMPT, seed=1, **options | bad))
        tickets.append(engine.submit(PROMPT[:7], logits_processor=good, seed=2, **options))
        tickets.append(engine.submit(PROMPT[:9], seed=3, **options))

    engine = scheduled(model(), [[submit]], prefixes=3)
    with pytest.raises((TypeError, ValueError), match=said):
        tickets[0].result()
    tokens = []
    with pytest.raises((TypeError, ValueError), match=said):
        for piece in tickets[0]:
            tokens += piece.token_ids
    expected = eagle_fsd.generate(PROMPT, model(), seed=1, tree=TREE, **options).token_ids
    assert tokens == expected[: len(tokens)] and len(tokens) <= at + 4
    for count, ticket in zip((7, 9), tickets[1:], strict=True):
        assert_as_alone(ticket.result(), eagle_fsd.generate(PROMPT[:count], model(), seed=ticket.seed, tree=TREE,
                                                            **options))
    assert engine.stats.finished == {"error": 1, "length": 2} and engine.error is None


def test_a_row_gone_wrong_leaves_nothing_behind(monkeypatch):
    """Keys that are not finite would reach the next row in their place, whose mask only adds to them."""
    pair, calls, tickets = tiny_pair(), [], []
    forward = pair.target.verify

    def verify(tokens, positions, ancestors, cache):
        features = forward(tokens, positions, ancestors, cache)
        calls.append(None)
        if len(calls) == 3:
            features[0] = torch.nan
            cache.layers[0].keys[0] = torch.nan
            cache.layers[1].values[0] = torch.nan
        return features

    monkeypatch.setattr(pair.target, "verify", verify)
    scheduled(pair, [[lambda engine: tickets.extend(
        engine.submit(PROMPT[:count], max_new_tokens=count + 4, acceptance="exact", seed=0)
        for count in (12, 5, 3, 8, 10))]], max_rows=2, tree=TREE)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no token can be drawn"):
        tickets[0].result()
    for count, ticket in zip((5, 3, 8, 10), tickets[1:], strict=True):
        assert_as_alone(ticket.result(), eagle_fsd.generate(PROMPT[:count], pair, max_new_tokens=count + 4,
                                                            acceptance="exact", seed=0))


@dataclass(frozen=True)
class Failing(FSD):
    """A user's rule that fails where a row's target draws one of these tokens."""

    tokens: frozenset = frozenset()
    met: list = field(default_factory=list, compare=False)

    def gate(self, nodes):
        self.met.extend(nodes.exact[nodes.going].tolist())
        if not self.tokens.isdisjoint(self.met[-int(nodes.going.sum()) :]):
            raise ZeroDivisionError("no such luck")
        return super().gate(nodes)


@dataclass(frozen=True)
class Weighted(FSD):
    """A user's rule that cannot be compared with others."""

    weights: torch.Tensor = field(kw_only=True)


def test_an_error_of_a_rule_ends_its_own_request():
    """Also where requests with an equal rule are decided together."""
    options, met = {"max_new_tokens": 20, "text_drafts": "off", "tree": TREE, "seed": 0}, []
    prompts = [PROMPT, PROMPT[:7], PROMPT[:9]]
    for prompt in prompts:
        rule = Failing(0.3, head_guard=None)
        expected = eagle_fsd.generate(prompt, model(), acceptance=rule, **options)
        met.append((set(rule.met), expected))
    bad = next(at for at in range(3) if met[at][0] - set().union(*(met[other][0] for other in range(3) if other != at)))
    own = met[bad][0] - set().union(*(met[other][0] for other in range(3) if other != bad))
    rule, tickets = Failing(0.3, head_guard=None, tokens=frozenset(own)), []
    engine = scheduled(model(), [[lambda engine: tickets.extend(
        engine.submit(prompt, acceptance=rule, **options) for prompt in prompts)]])
    assert engine.error is None and engine.stats.finished == {"error": 1, "length": 2}
    for at, ticket in enumerate(tickets):
        if at == bad:
            with pytest.raises(ZeroDivisionError, match="no such luck"):
                ticket.result()
        else:
            assert_as_alone(ticket.result(), met[at][1])
    with pytest.raises(ZeroDivisionError):
        eagle_fsd.generate(prompts, model(), acceptance=rule, **options)


def test_rules_that_cannot_be_compared():
    rules = [Weighted(0.3, weights=torch.ones(2)), Weighted(0.3, weights=torch.zeros(2))]
    options, tickets = {"max_new_tokens": 12, "seed": 0}, []
    engine = scheduled(model(), [[lambda engine: tickets.extend(
        engine.submit(PROMPT, acceptance=rule, **options) for rule in rules)]])
    assert engine.error is None
    for ticket, rule in zip(tickets, rules, strict=True):
        assert_as_alone(ticket.result(), eagle_fsd.generate(PROMPT, model(), acceptance=rule, tree=TREE, **options))


@pytest.mark.parametrize("least", [1, 7], ids=["a piece", "the whole answer"])
def test_an_error_of_the_tokenizer_ends_its_own_request(least, monkeypatch):
    pair, failing, tickets = tiny_pair(tokenizer=tiny_tokenizer()), [], []
    expected = eagle_fsd.generate(PROMPT[:5], pair, max_new_tokens=7, tree=TREE, seed=0)
    decode = pair.tokenizer.decode

    def broken(ids, **options):
        if failing and len(ids) >= least:
            failing.clear()
            raise RuntimeError("already borrowed")
        return decode(ids, **options)

    monkeypatch.setattr(pair.tokenizer, "decode", broken)
    engine = scheduled(pair, [[lambda engine: tickets.extend(engine.submit(
        prompt, max_new_tokens=7, seed=0) for prompt in (PROMPT, PROMPT[:5])),
        lambda engine: failing.append(True)]], tree=TREE)
    assert engine.error is None
    with pytest.raises(RuntimeError, match="already borrowed"):
        tickets[0].result()
    assert_as_alone(tickets[1].result(), expected)


def test_memory_that_runs_out_ends_one_request(monkeypatch):
    """In whichever allocation of a cache: the others get their text, those that come later too."""
    pair, allocate, prompts = tiny_pair(), TreeCache._storage, [PROMPT, PROMPT[:7], PROMPT[:9]]
    expected = [eagle_fsd.generate(prompt, pair, max_new_tokens=9, acceptance="exact", tree=TREE, seed=0)
                for prompt in prompts]
    failures = 0
    for last in range(12):
        calls, tickets = [], []

        def scarce(*args, calls=calls, last=last):
            calls.append(None)
            if len(calls) == last + 1:
                raise torch.OutOfMemoryError("out of memory")
            return allocate(*args)

        def submit(engine, tickets=tickets):
            tickets.extend(engine.submit(prompt, max_new_tokens=9, acceptance="exact", seed=0) for prompt in prompts)

        with monkeypatch.context() as patch:
            patch.setattr(TreeCache, "_storage", scarce)
            engine = scheduled(pair, [[submit]], max_rows=4, max_tokens=400, tree=TREE)
        assert engine.error is None and engine.stats.finished.total() == 3
        failed = engine.stats.finished["error"]
        assert failed == (last < len(calls))
        failures += failed
        for ticket, alone in zip(tickets, expected, strict=True):
            if failed and isinstance(ticket._output.exception(), torch.OutOfMemoryError):
                failed -= 1
            else:
                assert_as_alone(ticket.result(), alone)
    assert failures >= 8


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError], ids=readable)
@pytest.mark.parametrize("place", ["draft", "layer", "verify", "logits", "commit"])
def test_memory_that_runs_out_in_a_cycle_ends_the_longest_request(place, error, monkeypatch):
    """The others go on where they were, as do requests that come later."""
    pair, prompts, tickets, calls = tiny_pair(), [PROMPT, PROMPT[:7], PROMPT[:9], PROMPT[2:]], [], []
    options = {"max_new_tokens": 12, "acceptance": "exact", "seed": 0}
    expected = [eagle_fsd.generate(prompt, pair, tree=TREE, **options) for prompt in prompts]
    layer = type(pair.target.fused.layers[1])
    owner, name = {"draft": (type(pair.draft), "predict"), "layer": (layer, "__call__"),
                   "verify": (type(pair.target), "verify"), "logits": (type(pair.target), "logits"),
                   "commit": (TreeCache, "commit")}[place]
    working = getattr(owner, name)

    def scarce(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == failing[0]:
            raise error("out of memory")
        return working(self, *args, **kwargs)

    def submit(*numbers):
        return lambda engine: tickets.extend(engine.submit(prompts[number], **options) for number in numbers)

    failed = 0
    for at in range(1, 16):
        failing = [None]
        tickets.clear()

        def arm(engine, at=at, failing=failing):
            failing[0] = len(calls) + at

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, scarce)
            engine = scheduled(pair, [[submit(0, 1, 2)], [arm], *[[]] * 30, [submit(3)]], max_rows=4, tree=TREE)
        ended = {"error": 1, "length": 3} if failing[0] <= len(calls) else {"length": 4}
        assert engine.error is None and engine.stats.finished == ended
        failed += isinstance(tickets[0]._output.exception(), error)  # the longest, while it has not ended
        for number, ticket in enumerate(tickets):
            if ticket._output.exception() is None:
                assert_as_alone(ticket.result(), expected[number])
                assert pieces_of(ticket)[0] == expected[number].token_ids
    assert failed


# What is kept -----------------------------------------------------------------------------------------------------


def test_an_engine_that_nobody_holds_ends_with_its_requests():
    pair, before = tiny_pair(), threading.active_count()
    expected = eagle_fsd.generate(PROMPT, pair, max_new_tokens=9, tree=TREE, seed=0)
    ticket = eagle_fsd.Engine(pair, tree=TREE).submit(PROMPT, max_new_tokens=9, seed=0)
    assert_as_alone(ticket.result(30), expected)
    for thread in threading.enumerate():
        if thread.name == "eagle_fsd.Engine":
            thread.join(30)
    assert threading.active_count() == before
    kept = weakref.ref(pair)
    del pair
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("place", [("target", "verify"), ("target", "prefill"), ("draft", "predict")], ids=str)
def test_errors_keep_neither_caches_nor_the_model(place, monkeypatch, caplog):
    """Of the loop, and of a request; the user keeps both errors, which still say where they came from."""
    caplog.set_level(logging.CRITICAL, "eagle_fsd")  # a record has the traceback too
    made, new = weakref.WeakSet(), TreeCache.__init__
    monkeypatch.setattr(TreeCache, "__init__", lambda self, *args: (made.add(self), new(self, *args))[1])
    pair, part = tiny_pair(), place[0]

    def broken(*args):
        try:
            raise KeyError("first")
        except KeyError:
            return 1 / 0

    setattr(getattr(pair, part), place[1], broken)
    engine = eagle_fsd.Engine(pair, max_tokens=400)
    with pytest.raises(ZeroDivisionError) as failed:
        engine.submit(PROMPT).result(30)
    engine.close()
    loop, request, kept = engine.error, failed.value, weakref.ref(pair)
    assert (loop is None) == (place != ("target", "verify"))
    assert "return 1 / 0" in "".join(traceback.format_exception(request)) or sys.version_info < (3, 11)
    del engine, pair, failed
    gc.collect()
    assert not made and kept() is None and request is (loop or request)


def test_an_error_of_the_loop_ends_all(monkeypatch):
    pair = tiny_pair()
    engine = eagle_fsd.Engine(pair, max_rows=2)
    first, go = blocked(engine)
    others = [engine.submit(PROMPT) for _ in range(3)]
    monkeypatch.setattr(pair.target, "verify", lambda *args: 1 / 0)
    go.set()
    for ticket in (first, *others):
        with pytest.raises(ZeroDivisionError):
            ticket.result(30)
    engine.close()
    with pytest.raises(eagle_fsd.EngineClosed, match="it has failed: ZeroDivisionError"):
        engine.submit(PROMPT)
    assert (engine.rows, engine.waiting) == (0, 0) and engine.stats.finished == {"error": 4}


def raises(error):
    def broken(*args):
        raise error
    return broken


@pytest.mark.parametrize("place", [(Prefixes, "add"), (Batch, "add"), (Batch, "drop_finished")], ids=readable)
def test_every_request_ends_whatever_fails(place, monkeypatch):
    """In the middle of what ends one of them."""
    monkeypatch.setattr(*place, raises(KeyError("a bug")))
    tickets = []
    engine = scheduled(model(), [[lambda engine: tickets.extend(
        engine.submit(PROMPT[:length], max_new_tokens=6 + length) for length in (3, 5, 7))]], max_rows=2)
    assert all(ticket.done for ticket in tickets) and (engine.rows, engine.waiting) == (0, 0)
    assert engine.stats.finished.total() == 3 and isinstance(engine.error, KeyError)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"temperature": -1}, ValueError, "temperature must be"),
    ({"seed": [1, 2]}, ValueError, "one for each prompt: 1, got 2"),
    ({"tree": eagle_fsd.TreeConfig(4, 2, 2), "threshold": 0.5}, ValueError, "tree of a fuzzy request must be"),
    ({"tree": eagle_fsd.TreeConfig(400, 20, 20)}, ValueError, "tree is too large here"),
    ({"logits_processor": 5}, TypeError, "logits_processor must be a list"),
    ({"pool": "mine"}, TypeError, "unknown option 'pool'; use reference="),
], ids=readable)
def test_bad_requests(options, error, message):
    with eagle_fsd.Engine(model()) as engine:
        with pytest.raises(error, match=message):
            engine.submit(PROMPT, **options)
        for prompt in ([], [VOCAB], 5, [PROMPT, PROMPT], [3] * 128):
            with pytest.raises((TypeError, ValueError)):
                engine.submit(prompt)
        assert engine.stats.requests == engine.rows == engine.waiting == 0


def test_bad_engines():
    for options, message in (({"max_rows": 0}, "max_rows must be at least 1"),
                             ({"max_tokens": 5}, "max_tokens must be at least 14"),
                             ({"max_tokens": "1000"}, "max_tokens must be an int, got '1000'"),):
        with pytest.raises(ValueError, match=message):
            eagle_fsd.Engine(model(), **options)
    for options, message in (({"remember": 1000}, "unknown option 'remember'; use reference="),
                             ({"rows": 1}, "unknown option 'rows'; did you mean 'max_rows'?|accepted: max_rows, ")):
        with pytest.raises(TypeError, match=message):
            eagle_fsd.Engine(model(), **options)


# Threads, asyncio, and nobody -------------------------------------------------------------------------------------


def test_asyncio():
    async def ask(engine, number):
        prompt, options = request(number)
        ticket = engine.submit(prompt, **options)
        tokens = [token async for piece in ticket for token in piece.token_ids]
        output = await ticket
        assert tokens == output.token_ids
        return output

    async def main(engine):
        outputs = await asyncio.gather(*(ask(engine, number) for number in range(12)))
        for number, output in enumerate(outputs):
            assert_as_alone(output, alone(number))
        ticket = engine.submit(PROMPT, max_new_tokens=100, stopping_criteria=[lambda *_: time.sleep(0.005) or False])
        async for _ in ticket:
            break  # a client that goes away
        ticket.cancel()
        assert (await ticket).finish_reason == "cancelled"
        with pytest.raises(ValueError, match="no such luck"):
            await engine.submit(PROMPT, logits_processor=[Raises(0, ValueError("no such luck"))])

    with eagle_fsd.Engine(model(), max_rows=3) as engine:
        asyncio.run(main(engine))
        assert engine.submit(PROMPT, max_new_tokens=2).result().finish_reason == "length"


def test_a_reader_who_has_gone_holds_nobody_up():
    """Its loop is closed; or its time is over."""
    with eagle_fsd.Engine(model(), max_rows=1) as engine:
        ticket, go = blocked(engine)

        async def wait_a_little():
            async def read():
                return [piece async for piece in ticket]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(), 0.05)

        asyncio.run(wait_a_little())
        with pytest.raises(TimeoutError, match=r"longer than 0\.01 s"):
            ticket.result(0.01)
        go.set()
        assert ticket.result(30).finish_reason == "length"


def test_a_ticket_that_nobody_holds_is_cancelled():
    with eagle_fsd.Engine(model(), max_rows=1) as engine:
        ticket, go = blocked(engine)
        del ticket
        gc.collect()
        go.set()
        assert engine.submit(PROMPT, max_new_tokens=3).result().finish_reason == "length"
    assert engine.stats.finished == {"cancelled": 1, "length": 1}


def test_an_engine_without_a_drafter_has_room_for_its_tree_of_copies(monkeypatch):
    chain = forced_copies([(7 * number) % VOCAB for number in range(99)])
    monkeypatch.setattr(TextSource, "propose", lambda self, forced=None, left=0: chain)
    model = eagle_fsd.EagleModel.from_parts(tiny_target(max_position_embeddings=512), None, tiny_tokenizer())
    expected = eagle_fsd.generate(PROMPT, model, max_new_tokens=200, speculative=False).token_ids
    with eagle_fsd.Engine(model, tree=eagle_fsd.TreeConfig(100, 99, 1), max_rows=1) as engine:
        output = engine.submit(PROMPT, max_new_tokens=200).result(60)
    assert output.token_ids == expected and output.stats.proposed["grammar"] > 64
