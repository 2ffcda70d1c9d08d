"""The study at toy size on a CPU, its interruptions and its plan."""

import functools
import json
import signal

import pytest
import torch

from eagle_fsd.tuning.latency import Latency
from eval import gpu_study, time_limits
from eval.study import STUDY_SIZES, Study
from eval.time_limits import TimeIsUp, interrupted_after, steps_within
from train.demo import corpus
from train.demo.demo import target_config
from train.demo.target import build_target


@pytest.fixture(autouse=True)
def little_source(tmp_path, monkeypatch):
    files = functools.cache(corpus.python_files)
    monkeypatch.setattr(corpus, "python_files", lambda split: files(split)[:60])
    monkeypatch.setattr(corpus, "installed_files", lambda: [])
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    latency = Latency({1: 1e-3, 64: 2e-3}, {1: 1e-4, 4: 2e-4}, 1e-3)
    monkeypatch.setattr("eagle_fsd.tuning.machine.measure", lambda *_: latency)


def test_toy_study_from_nothing_to_its_tables(tmp_path, monkeypatch, capsys):
    arguments = ["--size", "toy", "--device", "cpu", "--work", str(tmp_path / "work"), "--out",
                 str(tmp_path / "study"), "--minutes", "5"]
    monkeypatch.setattr(gpu_study, "keep_freed_memory", lambda: None)
    assert gpu_study.main(arguments) == 0
    record = json.loads((tmp_path / "study.json").read_text())
    found = record["results"]
    assert list(found) == list(Study.STAGES) == list(record["seconds"])
    assert set(record["steps"]) == {"target 0", "target 1", "head"}
    assert [row["method"] for row in found["tasks"]["rows"]] == [
        "model.generate", "prompt lookup", "plain", "exact", "fsd 0.3"]
    exact = next(row for row in found["python"]["rows"] if row["method"] == "exact")
    assert exact["same_as_greedy"] == 1
    assert [row["method"] for row in found["accuracy"]["rows"]] == ["exact", "fsd 0.3"]
    assert found["accuracy"]["rows"][0]["prompts"] >= 2 and found["accuracy"]["rows"][0]["time"] == 1
    assert [row["batch_size"] for row in found["batches"]["rows"]] == [1] * 4 + [2] * 4
    assert "## Held-out tasks" in (tmp_path / "study.md").read_text()

    for stage in Study.STAGES:  # a second call has nothing left to do
        monkeypatch.setattr(Study, stage, lambda self: pytest.fail("done again"))
    assert gpu_study.main(arguments) == 0


def test_calls_go_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    calls = []

    def stage(name):
        def work(self):
            calls.append(name)
            if name == "head" and calls.count("head") == 1:
                raise TimeIsUp
            return {"name": name}
        return work

    for name in Study.STAGES:
        monkeypatch.setattr(Study, name, stage(name))

    def call(seconds):
        return Study(STUDY_SIZES["toy"], tmp_path, "cpu", {}).run(seconds)

    assert not call(1000) and calls == ["text", "target", "answers", "head"]
    assert not call(5) and calls[4:] == ["head"]  # the next one may take longer than that, and cannot be interrupted
    assert call(1000) and calls[5:] == list(Study.STAGES[4:])
    assert call(1000) and len(calls) == 1 + len(Study.STAGES)


def test_an_unfinished_study_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_study, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(Study, "run", lambda self, seconds: False)
    assert gpu_study.main(["--device", "cpu", "--work", str(tmp_path / "work")]) == gpu_study.UNFINISHED_STATUS


def test_work_is_interrupted_when_its_time_is_up():
    with pytest.raises(TimeIsUp), interrupted_after(0):
        while True:
            pass
    with interrupted_after(60):
        pass
    with pytest.raises(KeyboardInterrupt), interrupted_after(60):  # a real one stays what it is
        raise KeyboardInterrupt


def test_work_in_the_background_is_interrupted_too():
    """A shell starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(TimeIsUp), interrupted_after(0):
            while True:
                pass
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_steps_that_fit(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time_limits.time, "perf_counter", lambda: clock[0])

    def trial(steps):
        clock[0] += 5 + 0.5 * steps  # 5 seconds to begin and to end

    assert steps_within(100, trial) == 200 and steps_within(1, trial) == time_limits.TRIAL[-1]


def test_the_target_has_about_150_million_parameters(tokenizer):
    preset = STUDY_SIZES["gpu"].preset
    with torch.device("meta"):
        target = build_target(target_config(preset, preset.stages[-1].layers, tokenizer), seed=0)
    assert sum(p.numel() for p in target.parameters()) / 1e6 == pytest.approx(150, abs=5)
    assert preset.stages[-1].layers % preset.stages[0].layers == 0


def test_it_trains_its_own_pair(monkeypatch, capsys):
    monkeypatch.setattr(gpu_study, "keep_freed_memory", lambda: None)
    for options, message in ((["--target", "x"], "leave --target"), (["--minutes", "0"], "above 0")):
        assert gpu_study.main(["--device", "cpu", *options]) == 2 and message in capsys.readouterr().err
