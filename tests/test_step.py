"""The benchmark of one cycle: its floors by hand, and a run at a tiny size."""

import json
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle_fsd import TreeConfig
from eagle_fsd.engine.graphs import GraphCycles
from eval import benchmark, floors, step
from eval.floors import Rates, Work
from eval.profile import CYCLE, Clock
from eval.shapes import SHAPES, build_pair
from eval.step import bushy


def test_floor_by_hand():
    # 2 layers of 2 key heads of size 4; a matrix of 3 x 5 numbers of 4 bytes.
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    work = Work.of([nn.Linear(3, 5, bias=False)], config, layers=2, width=2)
    assert work == Work(weight_bytes=60, weights=15, key_bytes=2 * 2 * 2 * 4 * 2, attention=4 * 2 * 4 * 4)
    memory, matrix = work.floor(Rates(copy=1000.0, matrix=1e6), nodes=3, context=10)
    assert memory == pytest.approx(60 + 10 * 64)
    assert matrix == pytest.approx(3 * (2 * 15 + 13 * 128) / 1e3)


def test_shapes_have_the_published_number_of_parameters():
    for name, billions in (("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("qwen2.5-7b", 7.62)):
        with torch.device("meta"):
            pair_target = AutoModelForCausalLM.from_config(AutoConfig.for_model(
                SHAPES[name].model_type, **SHAPES[name].sizes, tie_word_embeddings=False))
        assert sum(p.numel() for p in pair_target.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_pair_is_built_as_asked():
    pair = build_pair(SHAPES["tiny"], torch.bfloat16, torch.device("cpu"), layers=1)
    assert len(pair.target.decoder_layers) == 1 and pair.target.dtype == pair.draft.dtype == torch.bfloat16
    assert pair.draft.embed_tokens is pair.target.embed_tokens


@pytest.mark.parametrize("nodes", [2, 3, 8, 60, 128])
def test_bushy_trees_have_the_asked_size(nodes):
    assert bushy(nodes).nodes == nodes and bushy(nodes).depth == 2


def test_rates_by_hand(monkeypatch):
    monkeypatch.setitem(floors.RATE_SIZES, "cpu", (100, 8))
    monkeypatch.setattr(floors, "fastest_run", lambda work, device: 0.5 if work() is not None else None)
    rates = floors.measure_rates(torch.float32, torch.device("cpu"))
    assert (rates.copy, rates.matrix) == (2 * 100 / 0.5, 2 * 8**3 / 0.5)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "measure_rates", lambda dtype, device: Rates(1e9, 1e9))
    monkeypatch.setattr("sys.argv", [
        "eval/benchmark.py", "--step", "--shape", "tiny", "--layers", "1", "--nodes", "4", "8", "--tree", "8,4,2",
        "--context", "12", "--rounds", "2", "--device", "cpu", "--kernels", "5", "--out", str(tmp_path / "step.json")])
    assert benchmark.main() == 0
    record = json.loads((tmp_path / "step.json").read_text())
    rows = {(row["part"], row["nodes"]): row for row in record["rows"]}
    assert list(rows) == [("draft level", 2), ("draft phase", 8), ("verify", 1), ("verify", 4), ("verify", 8),
                          ("accept", 8), ("commit", 8), ("other", 8), ("cycle", 8), ("accept, fsd", 8),
                          ("cycle, fsd", 8), ("plain cycle", 1)]
    draft, verify, accept = (rows[key] for key in (("draft phase", 8), ("verify", 8), ("accept", 8)))
    assert rows["cycle", 8]["memory_ms"] == pytest.approx(
        sum(row["memory_ms"] for row in (draft, verify, accept)))
    assert draft["memory_ms"] == pytest.approx(4 * rows["draft level", 2]["memory_ms"])
    assert verify["over_floor"] == pytest.approx(verify["ms"] / max(verify["memory_ms"], verify["matrix_ms"]))
    assert rows["commit", 8]["over_floor"] is None and rows["cycle", 8]["ms"] > 0
    found = record["phases"]["cycle"]
    assert set(found) == set(step.PHASES) and all(found[phase] > 0 for phase in ("draft", "verify", "accept"))
    assert record["phases"]["plain"]["draft"] == 0
    kernels = record["kernels"]
    assert len(kernels) == 5 and kernels[0]["microseconds"] >= kernels[-1]["microseconds"] > 0
    assert f"| {kernels[0]['operation']}" in (tmp_path / "step.md").read_text()
    assert re.search(r"\| verify +\| 8 +\|", (tmp_path / "step.md").read_text()) and record["layers"] == 1


@pytest.mark.parametrize("options, message", [
    (["--tree", "8,2,4"], "depth 3 or more"), (["--nodes", "1"], "--nodes must be at least 2"),
    (["--rounds", "0"], "--rounds must be at least 1"), (["--tree", "300,3,257"], "300,3,257"),
    (["--dtype", "int8"], "dtype must be"),
])
def test_what_cannot_be_measured_is_said_before_the_work(options, message, capsys, monkeypatch):
    monkeypatch.setattr(step, "build_pair", lambda *args, **kwargs: pytest.fail("built"))
    try:
        status = step.main(["--shape", "tiny", "--device", "cpu", *options])
    except SystemExit as stopped:  # what the parser refuses
        status = stopped.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.cuda
def test_on_cuda(tmp_path):
    assert step.main(["--shape", "tiny", "--nodes", "8", "--tree", "8,4,2", "--context", "16", "--rounds", "2",
                      "--out", str(tmp_path / "step.json")]) == 0


def test_a_phase_holds_what_is_within_it(monkeypatch):
    ticks = iter([0.0, 1.0, 6.0, 10.0])  # the cycle, the phase within it; a forward within the phase is not timed
    monkeypatch.setattr("eval.profile.now", lambda device: next(ticks))
    clock = Clock(torch.device("cpu"), nested=False)
    forward = clock.wrap("draft_forward", lambda: None)
    clock.wrap(CYCLE, clock.wrap("tree_building", forward))()
    assert clock.seconds == {"tree_building": 5.0, CYCLE: 5.0}


@pytest.mark.parametrize("static", [False, True])
def test_every_phase_of_a_cycle_is_timed(static):
    pair = build_pair(SHAPES["tiny"], torch.float32, torch.device("cpu"), layers=1)
    if static:
        pair.graphs = GraphCycles(pair.target, pair.draft, 40, capture=False)
    phases, whole = step.measure_cycles(pair, TreeConfig(8, 4, 2), [4], context=12, rounds=3)
    assert bool(pair.graphs and pair.graphs.cycles) == static
    for name in ("cycle", "shallow", "verify 4"):
        parts = phases[name]
        assert min(parts.values()) > 0 and parts["verify"] > parts["other"]
        assert sum(parts.values()) == pytest.approx(whole[name], rel=0.8)
    assert phases["cycle"]["draft"] > phases["shallow"]["draft"]
