"""Gates, windows and memories in whole answers, and composed rules wherever a rule's name is taken."""

import math

import pytest
import torch
from test_batches import TREE, assert_rows_as_alone
from tiny import PROMPT, readable, tiny_chat_pair, tiny_pair

import eagle_fsd
from eagle_fsd import AcceptanceOptions, make_rule
from eagle_fsd.acceptance.budget import Budget
from eagle_fsd.cli import parse
from eagle_fsd.cli.chat import Terminal
from eagle_fsd.engine import decoder
from eagle_fsd.engine.decoder import Session
from eagle_fsd.lm_eval.arguments import sort_arguments
from eagle_fsd.settings import resolve_rule

KINDS = {"greedy": {}, "penalised": {"repetition_penalty": 1.3}, "sampled": {"temperature": 1.0, "seed": 3}}
COMPOSED = [
    ("fsd+fly", {"threshold": 0.6, "gate_threshold": 1.0}), ("fsd+regret", {"threshold": 0.6, "gate_threshold": 4.0}),
    ("fly+relaxed", {"threshold": 1.0, "gate_threshold": 2.0}),
    ("regret+fsd", {"threshold": 9.0, "gate_threshold": 0.6}),
]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


def answer(pair, prompt=PROMPT, **options):
    return eagle_fsd.generate(prompt, pair, **{"max_new_tokens": 36, "tree": TREE} | options)


def regrets(output):
    """Of the answer's tokens; 0 where they are not fuzzy."""
    return [receipt.regret if receipt.source == "fuzzy" else 0.0 for receipt in output.receipts]


# --- what rules see ------------------------------------------------------------------------------


class Reads(eagle_fsd.acceptance.Rule):
    """Decides as `exact`, and notes what it is shown."""

    name = "reads"
    reads_features = True
    looks_ahead = False
    seen = []

    def is_lossless(self, greedy):
        return False

    def decide(self, verification):
        self.seen.append(verification)
        return eagle_fsd.Decision(verification.warped_logits)


class Blind(Reads):
    reads_features = False


@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, [7, 7, 2]]], ids=["one", "batch"])
@pytest.mark.parametrize("stepwise", [False, True])
def test_rules_that_say_so_see_the_features_of_every_node(pair, prompts, stepwise, monkeypatch):
    if stepwise:
        monkeypatch.setattr(decoder, "STEPWISE_FROM", 0)
    monkeypatch.setattr(Reads, "seen", [])
    answer(pair, prompts, acceptance=Reads())
    seen = Reads.seen[:]
    assert len(seen) > 5
    for verification in seen:
        nodes, logits = verification.tree.tokens.shape[1], verification.target_logits
        assert verification.features.shape[:2] == (len(logits), nodes)
        with torch.inference_mode():
            expected = pair.target.logits(verification.features)
        torch.testing.assert_close(expected[:, : logits.shape[1]], logits)
        assert (nodes > 1) <= (not torch.equal(verification.features[:, 0], verification.features[:, -1]))
        assert (logits.shape[1] == 1) >= stepwise
    answer(pair, prompts, acceptance=Blind())
    assert len(Reads.seen) > len(seen)
    assert all(verification.features is None for verification in Reads.seen[len(seen) :])


class Remembers(Blind):
    remembers = True


def test_a_rule_with_a_memory_sees_it_where_walks_are_stepwise(pair, monkeypatch):
    monkeypatch.setattr(decoder, "STEPWISE_FROM", 0)
    monkeypatch.setattr(Reads, "seen", [])
    answer(pair, acceptance=Remembers(), max_new_tokens=8)
    assert Reads.seen and all(verification.said is not None for verification in Reads.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_shown_what_the_request_has_given_up(pair, kind):
    """A function sees all there is; here it decides as `regret` and notes its memory."""
    rule, seen = make_rule("regret", 6.0), []

    def noting(verification):
        seen.append((verification.said.item(), verification.regret.item()))
        return rule(verification)

    output = answer(pair, acceptance=noting, **KINDS[kind])
    assert output.token_ids == answer(pair, acceptance=rule, **KINDS[kind]).token_ids
    starts = [1]
    for length in output.stats.accepted_lengths[:-1]:
        starts.append(starts[-1] + length + 1)
    assert seen == [(at, pytest.approx(math.fsum(regrets(output)[:at]))) for at in starts]
    assert seen[-1][1] > 0
    answer(pair, acceptance=Blind(), max_new_tokens=4)
    assert Reads.seen[-1].regret is None and Reads.seen[-1].said is None


# --- regret --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [make_rule("regret", 2.0), make_rule("regret", 5.0, most=1),
                                  make_rule("fsd", 0.6, gates=[make_rule("regret", 3.0, most=3)])], ids=readable)
def test_regret_stays_within_its_budget_and_uses_it(pair, rule, kind):
    """Also past the hundredth token, where the budget grows."""
    output = answer(pair, acceptance=rule, max_new_tokens=180, **KINDS[kind])
    part = rule.parts[-1]
    total = 0.0
    for count, regret in enumerate(regrets(output), 1):
        total += regret
        assert regret == 0 or total <= part.threshold * math.ceil(count / 100) + 1e-9
    assert total > part.threshold / 2 and sum(regrets(output)[100:]) > 0
    at = 1
    for length in output.stats.accepted_lengths:
        taken = [receipt.source for receipt in output.receipts[at : at + length]].count("fuzzy")
        assert taken <= part.most
        at += length + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["regret", "fly", "fsd+fly", "fsd+regret"])
def test_dials_at_zero_are_exact(pair, acceptance, kind):
    exact = answer(pair, acceptance="exact", **KINDS[kind]).token_ids
    gate = {"gate_threshold": 0.5} if "+" in acceptance else {}
    assert answer(pair, acceptance=acceptance, threshold=0.0, **gate, **KINDS[kind]).token_ids == exact
    if gate:
        closed = answer(pair, acceptance=acceptance, threshold=9.0, gate_threshold=0.0, **KINDS[kind])
        assert closed.token_ids == exact


def test_a_ledger_keeps_only_the_tokens_of_the_answer():
    budget = Budget(None)
    assert budget.allows([1] * 50) and budget.pay([9.0]) and budget.ended is None
    budget.keep(3, [0.5, 0.0, 0.25, 2.0])
    budget.keep(1, [0.0, 1.0])
    assert (budget.regret, budget.spent) == (0.75, 0.0)


@pytest.mark.parametrize("cut", range(2, 24, 3))
def test_what_lies_behind_an_end_is_not_remembered(pair, cut, monkeypatch):
    budgets = []
    monkeypatch.setattr("eagle_fsd.engine.request.Budget", lambda limit: budgets.append(Budget(limit)) or budgets[-1])
    whole = answer(pair, acceptance="regret", threshold=8.0)
    output = answer(pair, acceptance="regret", threshold=8.0, stop_token_ids=[whole.token_ids[cut]])
    assert len(output.token_ids) <= cut + 1
    for budget, found in zip(budgets, (whole, output), strict=True):
        assert budget.regret == pytest.approx(sum(regrets(found)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_begins_each_answer_with_a_full_budget(pair, kind):
    options = {"acceptance": "regret", "threshold": 3.0, **KINDS[kind]}
    session = Session()
    first = answer(pair, session=session, **options)
    prompt = PROMPT + first.token_ids + [3, 4]
    assert sum(regrets(first)) > 0
    assert answer(pair, prompt, session=session, **options).token_ids == answer(pair, prompt, **options).token_ids


def test_a_limit_on_the_answer_holds_beside_the_rules_own(pair):
    free = answer(pair, acceptance="fsd+regret", threshold=0.6, gate_threshold=20.0)
    total = sum(regrets(free))
    limited = answer(pair, acceptance="fsd+regret", threshold=0.6, gate_threshold=20.0, budget=total / 2)
    assert 0 < sum(regrets(limited)) <= limited.stats.budget_spent + 1e-4 <= total / 2 + 1e-4
    assert limited.stats.exact_because == "budget"
    for rule in ("regret", "fly", "fsd+fly"):
        with pytest.raises(ValueError, match="a budget needs a rule whose KL is known when sampling"):
            answer(pair, acceptance=rule, budget=1.0, temperature=1.0)
    within = make_rule("fsd", 0.6, gates=[make_rule("fly", 1.0, window=1)])
    assert answer(pair, acceptance=within, budget=1.0, temperature=1.0, seed=1).stats.budget_spent <= 1


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_is_walked_to_its_end(pair, window, kind):
    """Behind every fuzzy token come W - 1 of the target's own in the same cycle, and it was unsure there."""
    output = answer(pair, acceptance=make_rule("fly", 1.0, window=window), max_new_tokens=120, **KINDS[kind])
    fuzzy, at = 0, 1
    for length in output.stats.accepted_lengths[:-1]:  # the answer may end within the last cycle
        cycle = [receipt.source for receipt in output.receipts[at : at + length]]
        for place, source in enumerate(cycle):
            if source == "fuzzy":
                fuzzy += 1
                assert cycle[place + 1 : place + window] == ["exact"] * (window - 1)
        at += length + 1
    assert fuzzy > 0


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize(("acceptance", "dials"), [
    ("regret", {"threshold": 4.0}), ("fly", {"threshold": 1.0}), *COMPOSED], ids=str)
def test_rows_are_what_they_are_alone(pair, acceptance, dials, kind):
    options = {"temperature": 1.0} if kind == "sampled" else {"stop_token_ids": [4, 9]}
    outputs = assert_rows_as_alone(pair, acceptance=acceptance, max_new_tokens=40, **dials, **options)
    assert sum(receipt.source == "fuzzy" for output in outputs for receipt in output.receipts) > 1
    if "regret" in acceptance:
        assert len({round(sum(regrets(output)), 3) for output in outputs}) > 2, "rows of one memory"


@pytest.mark.parametrize("acceptance", ["fsd+fly", "fsd+regret"])
def test_rows_with_limits_of_their_own(pair, acceptance):
    """Each row is decided alone, with its own part of what rules see."""
    assert_rows_as_alone(pair, acceptance=acceptance, threshold=0.6, gate_threshold=1.0, budget=1.5, max_new_tokens=40)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("acceptance", "dials"), COMPOSED, ids=str)
def test_requests_custom_generate_chat_and_harness_take_composed_names(pair, acceptance, dials):
    given = {"acceptance": acceptance, **dials}
    rule = make_rule(acceptance, **dials)
    expected = answer(pair, acceptance=rule)
    assert "fuzzy" in [receipt.source for receipt in expected.receipts]
    assert answer(pair, **given).token_ids == expected.token_ids
    new = pair.target.model.generate(
        torch.tensor([PROMPT]), custom_generate=eagle_fsd.custom_generate, draft=pair.draft, do_sample=False,
        max_new_tokens=36, tree=TREE, **given)
    assert new[0, len(PROMPT) :].tolist() == expected.token_ids
    assert resolve_rule(sort_arguments(given).decoding, pair, 0.0) == rule


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=str)
def test_the_command_line_takes_composed_names(command, capsys):
    options = parse([*command, "--acceptance", "fsd+fly", "--threshold", "0.3", "--gate-threshold", "0.5"]).acceptance
    assert make_rule(**options.rule) == make_rule("fsd+fly", 0.3, gate_threshold=0.5)
    options = parse([*command, "--acceptance", "fsd+fly+regret", "--gate-threshold", "0.5", "2"]).acceptance
    assert make_rule(**options.rule) == make_rule("fsd+fly+regret", gate_threshold=[0.5, 2.0])
    with pytest.raises(SystemExit):
        parse([*command, "--acceptance", "fsd+best"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "unknown rule 'fsd+best'; accepted: exact, fsd" in said


def test_the_harness_takes_dials_as_text():
    given = {"target": "t", "acceptance": "fsd+fly+regret", "threshold": 0.3}
    for dials in ("[0.5, 2]", [0.5, 2]):
        assert list(sort_arguments({**given, "gate_threshold": dials}).decoding.gate_threshold) == [0.5, 2]
    one = {"target": "t", "acceptance": "fsd+fly", "gate_threshold": "0.5"}
    assert sort_arguments(one).decoding.gate_threshold == 0.5
    for bad in ("much", "[0.5", '{"fly": 1}'):
        with pytest.raises(ValueError, match="gate_threshold must be a number or a list of them such as"):
            sort_arguments({**one, "gate_threshold": bad})


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=str)
def test_the_command_line_refuses_a_rule_before_it_loads(command):
    with pytest.raises(ValueError, match="'tilt' has no gate"):
        parse([*command, "--target", "nowhere", "--acceptance", "fsd+tilt"]).run()


def test_commands_that_measure_take_composed_names():
    tune = parse(["tune", "--prompts", "P", "--acceptance", "fsd+regret", "--gate-threshold", "2"])
    assert (tune.acceptance, tune.measuring.gate_threshold) == ("fsd+regret", (2.0,))
    calibrate = parse(["calibrate", "--prompts", "P", "--budget", "kl<=0.02", "--acceptance", "fsd+fly"])
    assert calibrate.acceptance == ("fsd+fly",)


def test_chat_takes_composed_names(capsys):
    model = tiny_chat_pair()
    chat = eagle_fsd.Chat(model, max_new_tokens=12, tree=TREE, temperature=0.0, acceptance="fsd+relaxed",
                          threshold=0.4, gate_threshold=1.0)
    terminal = Terminal(chat)
    terminal.obey("/rule fsd+fly")
    terminal.obey("/threshold 0.3")
    terminal.obey("/rule fsd+tilt")
    terminal.obey("/rule fsd+fly+regret 0.5 2")
    assert chat.options["gate_threshold"] == [0.5, 2.0]
    terminal.obey("/rule fsd+fly")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("fsd+fly, threshold 0, fly 0.799 (the text stays the model's own)")
    assert said[1].startswith("fsd+fly, threshold 0.3, fly 0.799")
    assert "'tilt' has no gate" in said[2]
    assert chat.options["acceptance"] == "fsd+fly" and chat.options["gate_threshold"] is None


@pytest.mark.parametrize(("given", "message"), [
    ({"acceptance": "fsd+best"}, "unknown rule 'best' in 'fsd.best'"),
    ({"acceptance": "fsd+regret"}, "the gate 'regret' of 'fsd.regret' has no default: give gate_threshold"),
    ({"acceptance": "fsd", "gate_threshold": 0.1}, "gate_threshold is the dial of a gate behind a +"),
    ({"acceptance": "fsd+fly", "gate_threshold": -1}, r"threshold of rule 'fly' must lie in \[0, 1.09861\], got -1"),
    ({"quality": "accuracy_drop<=1%", "gate_threshold": 0.1}, "gate_threshold= out"),
], ids=str)
def test_bad_names_and_dials_are_refused(pair, given, message):
    with pytest.raises(ValueError, match=message):
        answer(pair, **given)
    with pytest.raises(ValueError, match=message):
        sort_arguments(given)


def test_options_hold_what_makes_the_rule():
    options = AcceptanceOptions("fsd+fly", 0.3, gate_threshold=[0.5])
    assert make_rule(**options.rule) == make_rule("fsd+fly", 0.3, gate_threshold=0.5)
