"""Compiled forwards: the same tokens, and no graph but those of the warm-up. V = 32 vocabulary.

Graphs are traced and counted, and run as they were traced: code generation takes too long for most tests.
"""

import logging
import shutil

import pytest
import torch
from tiny import PROMPT, tiny_chat_pair, tiny_head, tiny_pair, tiny_target
from torch import nn

import eagle_fsd
from eagle_fsd import EagleModel, TreeConfig
from eagle_fsd.drafting.machine import circumstances
from eagle_fsd.engine.compiled import CompiledDecoder, compile_forwards, is_compiled, lay_out_weights
from eagle_fsd.models.placement import weights_digest

TREES = [TreeConfig(16, 5, 4), TreeConfig(6, 5, 1), TreeConfig(4, 1, 3), TreeConfig(2, 1, 1), None]
PROMPTS = [PROMPT, PROMPT[:1], PROMPT * 3]
FAMILIES = ["llama", "ministral"]  # the latter takes one mask for each type of layer


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without what torch traces for itself, which pytest would gather as logs, slowly."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


class Counting:
    """A backend that runs what was traced, and counts the graphs and their runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, module, inputs):
        self.graphs += 1

        def run(*arguments):
            self.runs += 1
            return module.forward(*arguments)

        return run


def answers(pair, prompts=PROMPTS, **options):
    return [
        eagle_fsd.generate(prompt, pair if tree else plain(pair), tree=tree, max_new_tokens=20, **options)
        for tree in TREES for prompt in prompts
    ]


def plain(pair):
    return EagleModel(pair.target, None, pair.tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_and_trees_of_all_sizes_share_the_graphs(family):
    pair, backend = tiny_pair(family, attention="sdpa"), Counting()
    expected = answers(pair, acceptance="exact") + answers(pair, acceptance="tilt", threshold=1.0)
    assert compile_forwards(pair.target, pair.draft, backend=backend)
    assert backend.graphs == 4  # one node and several, of the target and of the head
    before = backend.runs
    found = answers(pair, acceptance="exact") + answers(pair, acceptance="tilt", threshold=1.0)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert backend.graphs == 4
    forwards = sum(each.stats.target_forwards for each in found)
    assert backend.runs - before > forwards  # every verify forward, and those of the head


@pytest.mark.parametrize("batches", [False, True])
def test_batches_have_graphs_of_their_own_or_run_uncompiled(batches):
    pair, backend = tiny_pair(attention="sdpa"), Counting()
    options = {"max_new_tokens": 12, "tree": TREES[0], "acceptance": "exact"}
    prompts = [PROMPT, PROMPT]  # rows that end together: one left alone would have a graph
    expected = eagle_fsd.generate(prompts, pair, **options)
    compile_forwards(pair.target, pair.draft, batches=batches, backend=backend)
    graphs, before = 8 if batches else 4, backend.runs
    assert backend.graphs == graphs
    found = eagle_fsd.generate(prompts, pair, **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert backend.graphs == graphs
    assert (backend.runs > before) == batches


def test_two_models_do_not_share_graphs():
    first, second = tiny_pair(attention="sdpa"), tiny_pair(seed=1, attention="sdpa")
    expected = [answers(pair, acceptance="exact") for pair in (first, second)]
    for pair in (first, second):
        compile_forwards(pair.target, pair.draft, backend=Counting())
    for pair, before in zip((first, second), expected, strict=True):
        assert [a.token_ids for a in answers(pair, acceptance="exact")] == [a.token_ids for a in before]


def test_new_values_of_weights_are_seen():
    pair = tiny_pair(attention="sdpa")
    compile_forwards(pair.target, pair.draft, backend=Counting())
    with torch.no_grad():
        for source, weight in zip(tiny_target(seed=1).parameters(), pair.target.model.parameters(), strict=True):
            weight.copy_(source)
    found = eagle_fsd.generate(PROMPT, pair, max_new_tokens=20, tree=TREES[0], acceptance="exact").token_ids
    assert found == eagle_fsd.generate(PROMPT, tiny_pair(seed=1), max_new_tokens=20, acceptance="exact").token_ids


def test_sessions_go_on_with_compiled_forwards():
    first, second = tiny_chat_pair(attention="sdpa"), tiny_chat_pair(attention="sdpa")
    compile_forwards(second.target, second.draft, backend=Counting())
    turns = []
    for pair in (first, second):
        chat = eagle_fsd.Chat(pair, tree=TREES[0], max_new_tokens=8)
        turns.append([chat.send(text).token_ids for text in ("abc", "and that", "no")])
    assert turns[0] == turns[1]


def test_without_a_warm_up_graphs_are_made_on_the_way():
    pair, backend = tiny_pair(attention="sdpa"), Counting()
    assert compile_forwards(pair.target, pair.draft, warm_up=False, backend=backend)
    assert backend.graphs == 0
    assert answers(pair, acceptance="exact")[0].token_ids == answers(tiny_pair(), acceptance="exact")[0].token_ids
    assert backend.graphs == 4


def broken(module, inputs):
    raise RuntimeError("no compiler here\nwith details")


def wrong(module, inputs):
    return lambda *arguments: [each * 1.01 for each in module.forward(*arguments)]


@pytest.mark.parametrize(("backend", "reason"), [(broken, "no compiler here"), (wrong, "differ by 0.01")])
def test_what_fails_stays_as_it_is_with_the_reason_in_the_log(backend, reason, caplog):
    pair = tiny_pair(attention="sdpa")
    expected, stock = answers(pair, acceptance="exact")[0].token_ids, pair.target.decoder
    assert not compile_forwards(pair.target, pair.draft, backend=backend)
    assert "LlamaForCausalLM runs uncompiled" in caplog.text and reason in caplog.text
    assert pair.target.decoder is stock and "forward" not in vars(pair.draft)
    assert answers(pair, acceptance="exact")[0].token_ids == expected


@pytest.mark.parametrize(("family", "compiled"), [("llama4_text", False), ("mixtral", True)])
def test_other_families_answer_as_before(family, compiled):
    pair = tiny_pair(family)
    expected = answers(pair, [PROMPT], acceptance="exact")
    assert compile_forwards(pair.target, pair.draft, backend=Counting()) == compiled
    assert [a.token_ids for a in answers(pair, [PROMPT], acceptance="exact")] == [a.token_ids for a in expected]


@pytest.mark.parametrize(("name", "value", "reason"), [
    ("layers", (1,), "reads hidden states of several layers"),
    ("group", object(), "shared by several processes"),
    ("counts_positions", True, "counts positions itself"),
])
def test_what_is_not_tried(name, value, reason, caplog):
    pair = tiny_pair()
    setattr(pair.target, name, value)
    assert not compile_forwards(pair.target, None, backend=Counting())
    assert reason in caplog.text


def test_laying_out_weights_keeps_shapes_values_and_files(tmp_path):
    model = tiny_target()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    digest = weights_digest(model)
    lay_out_weights(model.model)
    assert weights_digest(model) == digest
    assert model.model.layers[0].mlp.up_proj.weight.stride() == (1, 24)
    assert not any(torch.equal(weight, before[name]) is False for name, weight in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in again.state_dict().items())
    half = nn.Linear(4, 6).bfloat16()
    lay_out_weights(half)
    assert half.weight.is_contiguous()  # only where it was measured to help


def test_latencies_of_compiled_models_are_known_apart():
    pair = tiny_pair(attention="sdpa")
    before = circumstances(pair.target, pair.draft)
    compile_forwards(pair.target, pair.draft, backend=Counting())
    assert is_compiled(pair.target) and isinstance(pair.target.decoder, CompiledDecoder)
    assert circumstances(pair.target, pair.draft) == f"compiled; {before}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_generated_code():
    pair = EagleModel.from_parts(tiny_target(attention="sdpa", num_hidden_layers=1), None)
    pair.draft = tiny_head(pair.target.model)
    expected = answers(pair, acceptance="exact")
    assert pair.compile()
    assert [a.token_ids for a in answers(pair, acceptance="exact")] == [a.token_ids for a in expected]


@pytest.mark.cuda
def test_generated_code_on_cuda():
    pair = tiny_pair(attention="sdpa")
    pair = EagleModel.from_parts(pair.target.model.cuda(), pair.draft.cuda())
    expected = answers(pair, acceptance="exact")
    assert pair.compile()
    assert [a.token_ids for a in answers(pair, acceptance="exact")] == [a.token_ids for a in expected]
