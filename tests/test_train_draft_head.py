"""The training script: runs to the end, resumes bit by bit, is the same on two processes, refuses what is wrong.

V = 32 vocabulary, D = 16 hidden size.
"""

import copy
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, PROMPT, save_pair, tiny_pair, tiny_target, tiny_tokenizer
from transformers import LlamaConfig

import eagle_fsd
from eagle_fsd.data.documents import Documents
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.export.servers import export_head
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.models.linear import is_int8
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils import installation
from eagle_fsd.utils.files import only_writer
from eval import study
from train import evaluation, train_draft_head
from train.config import RECIPES, TrainingConfig
from train.features import write_features
from train.heads import new_head
from train.objectives import OBJECTIVES, make_objective
from train.schedule import DocumentSplit, Schedule, feature_noise, split_batch
from train.train_draft_head import main, train
from train.trainer import Trainer

TOKENS = np.arange(3, 23)  # those that the data speaks in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target of eight layers and a dataset of 60 documents."""
    folder = tmp_path_factory.mktemp("training")
    tiny_target(num_hidden_layers=8, attention="sdpa").save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 20, 60)
    Documents.of([(rng.choice(TOKENS, n).tolist(), [i > n // 3 for i in range(n)]) for n in lengths]).save(
        folder / "data")
    return folder


def settings(place, output, **changes) -> TrainingConfig:
    return TrainingConfig(**{
        "target": str(place / "target"), "data": place / "data", "output": place / output, "eval_documents": 4,
        "target_dtype": "float32", "mixed_precision": "no", "steps": 12, "batch_tokens": 128, "lr": 3e-3, "warmup": 3,
        "gradient_accumulation": 1, "save_every": 4, "eval_every": 6, "log_every": 1, "tree": TreeConfig(6, 3, 2),
        "eval_tokens": 8, "decode_prompts": 2, "decode_tokens": 16,
        "objective": make_objective("eagle,aligned_steps=2"), "cpu": True, **changes})


def run(place, output, **changes) -> Path:
    return train(settings(place, output, **changes))


def records(output: Path, name: str = "train") -> list[dict]:
    return [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output)]


def weights(output: Path) -> dict:
    return load_file(output / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """An uninterrupted run."""
    return run(place, "whole").parent


def assert_same_run(output: Path, whole: Path) -> None:
    """Losses and weights, bit by bit."""
    assert losses(output) == losses(whole)
    ours, theirs = weights(output), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_decodes_losslessly(place, head: Path):
    pair = eagle_fsd.load(place / "target", head, device="cpu", dtype="float32", tree=None)
    expected = pair.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=12, acceptance="exact")
    assert output.token_ids == expected[0, len(PROMPT) :].tolist()
    return pair.draft


def test_training_lowers_the_loss_and_leaves_a_head_that_decodes(place, whole):
    curve = losses(whole)
    assert len(curve) == 12 and np.mean(curve[-3:]) < np.mean(curve[:3])
    assert_decodes_losslessly(place, whole / "head")


def test_the_run_says_what_it_measured(place, whole):
    evaluations = records(whole, "eval")
    assert [e["step"] for e in evaluations] == [6, 12] and all(1 <= e["tau"] <= 4 for e in evaluations)
    best = json.loads((whole / "best" / "evaluation.json").read_text())
    assert best["tau"] == max(e["tau"] for e in evaluations)
    card = (whole / "best" / "README.md").read_text()
    assert f": {best['step']} steps of up to" in card and f"| {best['tau']:.2f} |" in card
    card = (whole / "head" / "README.md").read_text()
    assert "| with this head |" in card and str(place) not in card and "base_model" not in card
    assert "# EAGLE draft head for target\n" in card
    for found in evaluations:  # the sum over levels is tau - 1
        assert len(found["accepted"]) == 3 and 1 + sum(found["accepted"]) == pytest.approx(found["tau"], abs=1e-3)
    assert len(list((whole / "states").iterdir())) == 2  # keep=2
    # tau is that of decoding the held-out answers from where they are cut, one by one
    config = settings(place, "whole")
    pair = eagle_fsd.load(place / "target", whole / "head", device="cpu", dtype="float32", tree=None)
    lengths = [length + 1 for prompt in DocumentSplit.of(config).prompts(8) for length in eagle_fsd.generate(
        prompt, pair, max_new_tokens=8, acceptance="exact", tree=config.tree, text_drafts="off").stats.accepted_lengths]
    assert evaluations[-1]["tau"] == pytest.approx(np.mean(lengths))


def test_plain_decoding_is_compared_with_where_it_is_asked_for(place, monkeypatch):
    monkeypatch.setattr(evaluation, "measure_speed", lambda *given: pytest.fail("nobody asked for it"))
    assert TrainingConfig(output=place).decode_prompts == 0
    head = run(place, "not compared", steps=2, decode_prompts=0)
    card, found = (head / "README.md").read_text(), json.loads((head / "evaluation.json").read_text())
    assert "| decoding |" not in card and f"| {found['tau']:.2f} |" in card and "tokens_per_second" not in found
    assert re.search(r"2 steps of up to\n128 tokens in 0\.\d minutes on 56 documents", card)
    documents = Documents.load(place / "data")
    assert (found["data"], found["learned"]) == (documents.digest(), 56)  # for eagle-fsd heads check


def test_prompts_are_cut_within_the_last_answers(place):
    marks = [False, False, True, True, False, False, *[True] * 20, False]
    documents = Documents.of([(list(range(27)), marks)] * 2 + [([1] * 12, [True] * 12), ([1] * 6, [False] * 6)])
    found = DocumentSplit(documents, np.arange(0), documents, np.arange(4)).prompts(8)
    assert found == [list(range(6)), list(range(13)), [1] * 6]  # plain text: from its middle
    with pytest.raises(ValueError, match="no held-out document has an answer"):
        DocumentSplit(documents, np.arange(0), documents, np.array([3])).prompts(8)


def test_killed_by_force_it_resumes_to_the_same_curve_and_weights(place, whole):
    output = place / "killed"
    process = torch.multiprocessing.get_context("fork").Process(target=run, args=(place, "killed"))
    process.start()
    log = output / "train.jsonl"
    while process.is_alive() and not (log.exists() and len(log.read_text().splitlines()) >= 6):
        time.sleep(0.002)
    process.kill()
    process.join()
    assert 6 <= len(log.read_text().splitlines()) <= 12 and (output / "states" / "step-4").exists()
    with log.open("a") as file:
        file.write('{"step": 7, "lo')  # as a kill in the middle of a line leaves it
    run(place, "killed")
    assert_same_run(output, whole)
    run(place, "killed")  # a finished run trains no further
    assert_same_run(output, whole)
    with pytest.raises(ValueError, match=r"another lr \(was 0.003, now 0.001\), seed \(was 0, now 3\): .* --init-from"):
        run(place, "killed", lr=1e-3, seed=3)


@pytest.fixture(scope="module")
def others(place) -> dict[str, Path]:
    """Copies of a dataset, a target and a head of the same sizes and names, and such with other content."""
    for name in ("data", "target"):
        shutil.copytree(place / name, place / "copy" / name)
    documents = Documents.load(place / "data")
    tokens = documents.tokens.copy()
    tokens[-1] = 4 if tokens[-1] == 3 else 3
    Documents(tokens, documents.learned, documents.ends).save(place / "other" / "data")
    tiny_target(num_hidden_layers=8, attention="sdpa", seed=7).save_pretrained(place / "other" / "target")
    for seed, name in ((0, "one head"), (1, "other head")):
        save_head(tiny_pair(seed=seed).draft, place / name)
    return {name: place / name for name in ("copy", "other", "one head", "other head")}


@pytest.mark.parametrize(("first", "then", "part"), [
    ({}, {"data": "other/data"}, "data"), ({}, {"target": "other/target"}, "target"),
    ({}, {"eval_data": "copy/data"}, "eval_data"), ({"eval_data": "data"}, {"eval_data": "other/data"}, "eval_data"),
    ({"init_from": "one head"}, {"init_from": "other head"}, "init_from"), ({}, {"features": "stored"}, "features"),
    ({"evaluate": False}, {"evaluate": True}, "split"), ({}, {"eval_documents": 2}, "split"),
    ({}, {"eval_tokens": 9}, "eval_tokens"), ({}, {"tree": TreeConfig(8, 3, 2)}, "tree"),
    ({}, {"objective": OBJECTIVES["hass"]}, "objective"), ({}, {"target_dtype": "bfloat16"}, "target_dtype"),
    ({}, {"steps": 3}, "steps"), ({}, {"batch_tokens": 64}, "batch_tokens"), ({}, {"warmup": 1}, "warmup"),
])
def test_a_run_resumes_only_with_what_it_depends_on(place, others, tmp_path, monkeypatch, first, then, part):
    """What a setting names is compared by its content; the message says which part changed."""
    write_features(TargetModel(load_target(place / "target", dtype="float32")[0]), Documents.load(place / "data"),
                   place / "stored")

    def changed(changes: dict) -> dict:
        paths = {"data", "target", "eval_data", "init_from", "features"}
        return {name: (str if name in ("target", "init_from") else Path)(place / value) if name in paths else value
                for name, value in changes.items()}

    small = {"steps": 2, "decode_prompts": 0}
    run(place, tmp_path / "run", **small | changed(first))
    monkeypatch.setattr(Trainer, "train_step", lambda self: pytest.fail("computed something"))
    with pytest.raises(ValueError, match=rf"run was made with another (.*\), )?{part} \(was "):
        run(place, tmp_path / "run", **small | changed(first | then))


def test_what_is_equal_or_measures_only_may_change(place, others, tmp_path, monkeypatch):
    small = {"steps": 2, "decode_prompts": 0, "eval_data": place / "data", "evaluate": False}
    run(place, tmp_path / "run", **small)
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.setattr(Trainer, "train_step", lambda self: pytest.fail("trains again"))
    run(place, tmp_path / "moved", **small | {
        "data": place / "copy" / "data", "target": str(place / "copy" / "target"),
        "eval_data": place / "copy" / "data", "evaluate": True, "save_every": 5, "save_minutes": 1.0, "keep": 1,
        "log_every": 3, "eval_every": 1, "decode_prompts": 1, "decode_tokens": 4})
    assert json.loads((tmp_path / "moved" / "head" / "evaluation.json").read_text())["tau"] >= 1


def test_a_state_resumes_with_settings_that_are_newer_than_it_at_their_defaults(place, tmp_path):
    run(place, tmp_path / "run", steps=2, evaluate=False)
    path = tmp_path / "run" / "states" / "step-2" / "run.json"
    record = json.loads(path.read_text())
    for name in ("shard", "betas"):
        del record["config"][name]
    path.write_text(json.dumps(record))
    run(place, tmp_path / "run", steps=2, evaluate=False)
    with pytest.raises(ValueError, match="another betas .was .0.9, 0.95., now .0.5, 0.5."):
        run(place, tmp_path / "run", steps=2, evaluate=False, betas=(0.5, 0.5))


def test_features_in_another_dtype_or_quantisation_are_refused(place, tmp_path):
    write_features(TargetModel(load_target(place / "target", dtype="bfloat16")[0]), Documents.load(place / "data"),
                   tmp_path / "features")
    given = {"features": tmp_path / "features", "steps": 2, "evaluate": False}
    with pytest.raises(ValueError, match="another dtype .was torch.bfloat16, now torch.float32.: pass --target-dtype"):
        run(place, tmp_path / "run", **given)
    with pytest.raises(ValueError, match="another dtype .*quantization .was None, now int8"):
        run(place, tmp_path / "run", quantization="int8", **given)
    run(place, tmp_path / "run", **given | {"target_dtype": "auto"})  # theirs


def test_answers_that_end_before_any_draft_leave_a_head(place, tmp_path):
    """The target ends all answers at once: there is no cycle to measure."""
    model = tiny_target(num_hidden_layers=8, attention="sdpa")
    model.generation_config.eos_token_id = list(range(32))
    model.config.eos_token_id = list(range(32))
    model.save_pretrained(tmp_path / "target")
    head = run(place, tmp_path / "run", target=str(tmp_path / "target"), steps=2, decode_prompts=0)
    assert json.loads((head / "evaluation.json").read_text())["tau"] == 1.0


def test_interrupted_it_saves_and_resumes(place, whole, monkeypatch):
    step = Trainer.train_step

    def interrupt(self):
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with monkeypatch.context() as context:
        context.setattr(Trainer, "train_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(place, "interrupted")
    assert (place / "interrupted" / "states" / "step-7" / "run.json").exists()
    found = json.loads((place / "interrupted" / "head" / "evaluation.json").read_text())
    assert (found["step"], found["tau"]) == (7, None)
    assert_decodes_losslessly(place, place / "interrupted" / "head")
    run(place, "interrupted")
    assert_same_run(place / "interrupted", whole)


def test_an_evaluation_is_abandoned_when_the_run_is_to_stop(place, whole, monkeypatch):
    output = place / "evaluating"
    with monkeypatch.context() as context:
        context.setattr(evaluation, "decode", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            run(place, output.name)
    assert not (output / "eval.jsonl").exists() and (output / "states" / "step-6").exists()
    assert (output / "head" / "model.safetensors").exists()
    run(place, output.name)
    assert_same_run(output, whole)
    assert records(output, "eval") == records(whole, "eval")  # the abandoned one is made up for


@pytest.mark.parametrize("names", [
    ["run.json"], ["model.safetensors"], ["optimizer.bin", "run.json"]], ids=["settings", "weights", "both states"])
def test_a_state_that_cannot_be_read_is_set_aside(place, whole, names, caplog):
    """The one before is taken; where there is none the run begins again, with nothing of the unreadable one."""
    output = place / f"damaged {names[0]}"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "head")
    damaged = ["step-12", "step-8"][: len(names)]
    for state, name in zip(damaged, names, strict=True):
        (output / "states" / state / name).write_bytes(b"")
    run(place, output.name)
    assert_same_run(output, whole)
    found = {path.name for path in (output / "states").glob("unreadable-*")}
    assert found == {f"unreadable-{name}" for name in damaged}
    assert f"continuing from {'step-8' if len(names) == 1 else 'the beginning'}" in caplog.text
    run(place, output.name)  # and is not looked at again
    assert caplog.text.count("is unreadable") == len(names)


def test_states_are_saved_by_time_as_well(place, monkeypatch):
    monkeypatch.setattr(evaluation.Evaluation, "finish", interrupted)
    for minutes, steps in ((1e-9, ["step-2", "step-3"]), (60, ["step-3"])):
        with pytest.raises(KeyboardInterrupt):
            run(place, f"{minutes} minutes", steps=3, save_every=100, save_minutes=minutes, evaluate=False)
        assert sorted(path.name for path in (place / f"{minutes} minutes" / "states").iterdir()) == steps


def test_memory_that_is_full_does_not_make_a_state_unreadable(place, monkeypatch):
    output = run(place, "full", steps=2, evaluate=False).parent
    monkeypatch.setattr(Accelerator, "load_state", out_of_memory)
    with pytest.raises(MemoryError):
        run(place, "full", steps=2, evaluate=False)
    assert (output / "states" / "step-2").is_dir()


def out_of_memory(*_):
    raise MemoryError


def test_folders_in_use_are_said(place, monkeypatch):
    (place / "in use").mkdir()
    monkeypatch.setattr(train_draft_head, "Trainer", lambda *given: pytest.fail("loaded something"))
    with only_writer(place / "in use"), pytest.raises(ValueError, match="in use is being written by process"):
        run(place, "in use", steps=2)


def test_a_worse_head_does_not_replace_the_best(place, monkeypatch):
    taus = iter([3.0, 2.0])
    monkeypatch.setattr(evaluation, "decode", lambda *given: [])
    monkeypatch.setattr(evaluation, "accepted_at", lambda *given: [])
    monkeypatch.setattr(evaluation, "tau_of", lambda outputs: next(taus) if not outputs else 1.0)
    run(place, "best", steps=8, eval_every=4)
    found = json.loads((place / "best" / "best" / "evaluation.json").read_text())
    assert (found["step"], found["tau"]) == (4, 3.0)


def test_stored_features_and_accumulated_parts_give_the_same_curve(place, whole):
    model, _ = load_target(place / "target", dtype="float32")
    write_features(TargetModel(model), Documents.load(place / "data"), place / "features")
    run(place, "stored", features=place / "features", gradient_accumulation=3)
    np.testing.assert_allclose(losses(place / "stored"), losses(whole), atol=1e-3)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
def test_a_head_for_a_target_in_int8_learns_and_is_measured_with_it(place, monkeypatch):
    from train import teacher

    loaded, load = [], teacher.load_quantized
    monkeypatch.setattr(teacher, "load_quantized", lambda *names, **options: loaded.append(load(*names, **options)) or
                        loaded[-1])
    target = load(place / "target", "int8", dtype="float32", trust_remote_code=False)
    write_features(target, Documents.load(place / "data"), place / "features-int8")
    run(place, "int8", features=place / "features-int8", quantization="int8", steps=4, eval_every=2, decode_prompts=0)
    assert is_int8(loaded[0].model)
    assert [each["step"] for each in records(place / "int8", "eval")] == [2, 4]


def two_processes(work: Callable, *given: object) -> None:
    """`work` in both, with what torchrun tells them; forked, which takes no imports."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1]),
                "OMP_NUM_THREADS": "1"}
    torch.multiprocessing.start_processes(as_told, (told, work, given), nprocs=2, start_method="fork")


def as_told(rank: int, told: dict[str, str], work: Callable, given: tuple) -> None:
    os.environ |= told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    AcceleratorState._reset_state(reset_partial_state=True)
    work(*given)


def test_two_processes_are_one(place, whole):
    two_processes(run, place, "two")
    np.testing.assert_allclose(losses(place / "two"), losses(whole), atol=1e-4)
    taus = [[line["tau"] for line in records(output, "eval")] for output in (place / "two", whole)]
    assert taus[0] == pytest.approx(taus[1])  # each process has measured a share of the prompts
    assert all(torch.allclose(one, weights(place / "two")[name], atol=1e-3) for name, one in weights(whole).items())


def test_two_processes_with_a_sharded_head_are_one_and_resume_after_a_kill(place, whole, monkeypatch):
    step, sharded = Trainer.train_step, partial(run, shard=True)

    def killed(self):
        if self.step == 7 and self.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    with monkeypatch.context() as context:
        context.setattr(Trainer, "train_step", killed)
        with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
            two_processes(sharded, place, "sharded")
    output = place / "sharded"
    assert [path.name for path in (output / "states").iterdir()] == ["step-4"]
    two_processes(sharded, place, "sharded")
    np.testing.assert_allclose(losses(output), losses(whole), atol=1e-4)
    assert all(torch.allclose(one, weights(output)[name], atol=1e-3) for name, one in weights(whole).items())
    assert [e["tau"] for e in records(output, "eval")] == pytest.approx([e["tau"] for e in records(whole, "eval")])


def test_a_head_that_names_some_tokens_learns_them_and_is_continued_so(place):
    head = run(place, "limited", steps=2, draft_vocab_size=12)
    documents = Documents.load(place / "data")
    counts = np.bincount(documents.tokens[documents.learned], minlength=32)
    named = assert_decodes_losslessly(place, head).token_map.tolist()
    assert len(named) == 12 and counts[named].min() >= np.delete(counts, named).max()
    continued = run(place, "continued", steps=2, init_from=str(head), evaluate=False)
    assert load_head(continued).token_map.tolist() == named


def test_an_eagle3_head_reads_several_layers_and_has_its_own_output(place):
    changes = {"steps": 8, "head": "eagle3", "draft_vocab_size": len(TOKENS), "lr": 1e-2,
               "objective": make_objective("eagle3,aligned_steps=3")}
    trained = run(place, "eagle3", **changes)
    curve = losses(place / "eagle3")
    assert np.mean(curve[-3:]) < np.mean(curve[:3])
    head = assert_decodes_losslessly(place, trained)
    assert isinstance(head, Eagle3Head) and head.draft_tokens.tolist() == TOKENS.tolist()
    whole = Eagle3Head(LlamaConfig(**head.config.to_dict() | {"draft_vocab_size": 32}))
    whole.lm_head = None  # the target's serves, and is not learned
    save_head(whole, place / "no output layer")
    continued = run(place, "continued eagle3", **changes | {"steps": 2, "init_from": str(place / "no output layer")})
    assert assert_decodes_losslessly(place, continued).lm_head is None
    target = TargetModel(load_target(place / "target", dtype="float32")[0])
    target.feature_layers = (1, 6)
    write_features(target, Documents.load(place / "data"), place / "of layers")
    changes |= {"features": place / "of layers", "evaluate": False}
    with pytest.raises(ValueError, match=r"reads the inputs of layers \[2, 4, 5\], .* of \[1, 6\]"):
        run(place, "other layers", **changes)
    run(place, "other layers", layers=(1, 6), **changes)


def test_the_norms_of_eagle_3_1_are_trained_saved_and_exported(place, tmp_path, caplog):
    head = run(place, tmp_path / "run", steps=4, head="eagle3", draft_vocab_size=len(TOKENS), fc_norm=True,
               norm_output=True, lr=1e-2, objective=make_objective("eagle3,aligned_steps=3"))
    trained = assert_decodes_losslessly(place, head)
    norms = [*(norm.weight for norm in trained.fc_norm), trained.norm.weight]
    assert len(norms) == 4 and all((weight != 1).any() for weight in norms)
    path = export_head(head, "vllm", tmp_path / "vllm", dtype=torch.float32)
    fields = [json.loads((folder / "config.json").read_text()) for folder in (head, path.parent)]
    assert all(each["fc_norm"] is each["norm_output"] is True for each in fields)  # SpecForge's and speculators' names
    assert {f"fc_norm.{number}.weight" for number in range(3)} < load_file(path).keys()
    features, states = torch.randn(1, 5, 3 * 16, generator=torch.Generator().manual_seed(0)), []
    for each in (load_head(head), load_head(path.parent)):
        each.share_embeddings(trained.embed_tokens)
        states.append(each(each.to_states(features), torch.tensor([PROMPT[:5]]), torch.arange(5)[None]))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert "SpecForge before September 2026" not in caplog.text  # our files say which meaning norm_output has


def test_a_tracker_is_told_the_runs_name_and_where_it_continues(tmp_path):
    """Called by accelerate, which is not run here; wandb and tensorboard are not installed."""
    config = settings(tmp_path, "smol")
    config.output.mkdir()
    first, again = (train_draft_head.tracker_run(SimpleNamespace(config=config, step=step)) for step in (0, 7))
    assert first["wandb"]["name"] == "smol" and first["wandb"]["resume"] == "allow"
    assert first["wandb"]["id"] == again["wandb"]["id"] and again["tensorboard"] == {"purge_step": 8}
    config.output.rename(tmp_path / "moved")
    moved = replace(config, output=tmp_path / "moved", run_name="named")
    found = train_draft_head.tracker_run(SimpleNamespace(config=moved, step=7))["wandb"]
    assert found == {"name": "named", "id": first["wandb"]["id"], "resume": "allow"}


def test_states_of_a_version_without_a_setting_have_its_default(place, tmp_path):
    given = {"steps": 2, "evaluate": False}
    record = run(place, tmp_path / "run", **given).parent / "states" / "step-2" / "run.json"
    stored = json.loads(record.read_text())
    del stored["config"]["fc_norm"]
    record.write_text(json.dumps(stored))
    run(place, tmp_path / "run", **given)
    with pytest.raises(ValueError, match=r"another .*fc_norm \(was False, now True\)"):
        run(place, tmp_path / "run", **given, head="eagle3", fc_norm=True, objective=OBJECTIVES["eagle3"])


def test_every_document_is_seen_once_per_epoch_and_held_out_ones_never(place):
    documents, config = Documents.load(place / "data"), settings(place, "x")
    schedule = Schedule(documents, np.arange(50), config)
    for epoch in (0, 1):
        seen = np.concatenate([schedule.batch(epoch * schedule.per_epoch + i) for i in range(schedule.per_epoch)])
        assert set(seen.tolist()) <= set(range(50)) and len(set(seen.tolist())) >= 45
    assert schedule.batch(3).tolist() == Schedule(documents, np.arange(50), config).batch(3).tolist()
    assert [part.tolist() for part in split_batch(np.arange(7), 3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_learning_rate_rises_then_falls_to_zero(place):
    run(place, "rates", lr=1e-2, warmup=4, evaluate=False)
    rates = [record["lr"] for record in records(place / "rates")]
    np.testing.assert_allclose(rates, [0, 0.0025, 0.005, 0.0075, *np.linspace(1e-2, 0, 9)[:-1]])


def test_a_run_that_diverges_stops_before_it_saves(place):
    changes = {"lr": 2.0, "warmup": 59, "steps": 200, "save_every": 50, "evaluate": False, "batch_tokens": 512}
    with pytest.raises(FloatingPointError, match=r"the run diverged: .* and was .* a lower lr than 2 in a new output"):
        run(place, "diverges", **changes)
    stopped = records(place / "diverges")[-1]["step"]
    states = sorted((place / "diverges" / "states").glob("step-*"))
    assert 50 < stopped < 200 and states and int(states[-1].name.removeprefix("step-")) < stopped


def test_a_warm_up_longer_than_the_run_is_shortened_and_said(place, caplog):
    run(place, "warm", lr=1e-2, warmup=2000, steps=20, evaluate=False)
    rates = [record["lr"] for record in records(place / "warm")]
    assert max(rates) == rates[2] == 1e-2
    assert "the warm-up of 2000 steps would take the whole run of 20" in caplog.text
    assert "60 documents with" in caplog.text and "tokens to learn are few" in caplog.text
    caplog.clear()
    run(place, "warm", lr=1e-2, warmup=2000, steps=20, evaluate=False)  # again, with nothing left to do
    assert "warm-up" not in caplog.text and "are few" not in caplog.text


def test_noise_belongs_to_the_document_and_fades_with_length():
    features = torch.zeros(9, 5)
    both = feature_noise(np.array([4, 9]), [6, 3], features, 0.1, seed=1)
    assert torch.equal(both[6:], feature_noise(np.array([9]), [3], features[:3], 0.1, seed=1))
    assert 0.5 * 0.1 * 512 / 6 < both[:6].abs().max() <= 0.1 * 512 / 6 < both[6:].abs().max()
    assert not torch.equal(both, feature_noise(np.array([4, 9]), [6, 3], features, 0.1, seed=2))


@pytest.mark.parametrize(("changes", "match"), [
    ({"steps": 0}, "steps must be at least 1, got 0"), ({"eval_tokens": 1}, "eval_tokens must be at least 2, got 1"),
    ({"lr": 0}, "lr must be a number above 0, got 0"),
    ({"clip": "both"}, "clip must be one of norm, value"), ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ({"head": "eagle3"}, "an EAGLE-3 head predicts no features, regression must be 0, got 1.0"),
    ({"draft_vocab_size": 33}, "draft_vocab_size 33 exceeds vocab_size 32"),
    ({"layers": (0, 8)}, "layers is not a setting of an eagle2 head"),
    ({"fc_norm": True}, "fc_norm is not a setting of an eagle2 head"),
    ({"head": "eagle3", "objective": OBJECTIVES["eagle3"], "layers": (0, 9)}, r"must be distinct .*got \(0, 9\)"),
    ({"quantization": "int8"}, "needs stored features"),
    ({"eval_documents": 4, "data": Path("nowhere")}, "nowhere is not a dataset"),
])
def test_bad_settings_are_refused(place, changes, match):
    with pytest.raises(ValueError, match=match):
        run(place, "refused", **changes)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
def test_from_conversations_to_a_head_for_int8(place, tmp_path):
    """Answers, features and evaluations load the target in three ways, and know it as the same."""
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    pair.tokenizer.chat_template = CHAT_TEMPLATE
    save_pair(tmp_path, pair)
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"prompt": a + b}) for a in "abcdef" for b in "mno"))
    given = {"target": str(tmp_path / "target"), "data": None, "conversations": (str(tmp_path / "asked.jsonl"),),
             "quantization": "int8", "steps": 2, "decode_prompts": 0, "target_dtype": "bfloat16"}
    for _ in range(2):
        head = run(place, tmp_path / "run", **given)
    assert json.loads((head / "evaluation.json").read_text())["tau"] >= 1


def test_from_conversations_to_a_head(place, tmp_path, monkeypatch):
    """The target answers, its features are stored, and what is there is kept when the run goes on."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    pair = tiny_pair(tokenizer=tokenizer)
    pair.target.model.save_pretrained(tmp_path / "target")
    asked = tmp_path / "asked.jsonl"
    chats = ([{"role": "user", "content": a + b}, {"role": "assistant", "content": "?"}]
             for a in "abcdef" for b in "mno")
    asked.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    given = {"target": str(tmp_path / "target"), "data": None, "conversations": (str(asked),),
             "target_dtype": "auto", "mixed_precision": "auto"}
    monkeypatch.setattr(train_draft_head, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(train_draft_head, "Trainer", interrupted)
    AcceleratorState._reset_state()  # "auto" may be another precision than of the runs before
    with pytest.raises(KeyboardInterrupt):
        train(settings(place, tmp_path / "run", **given))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*") if path.is_file()}
    assert {"tokens.npy", "features-00000.safetensors"} <= {path.name for path in made}
    monkeypatch.undo()
    head = train(settings(place, tmp_path / "run", **given))
    assert all(path.stat().st_mtime_ns == made[path] for path in made if path.suffix == ".npy" or "0000" in path.name)
    out = eagle_fsd.generate("ab", eagle_fsd.load(str(tmp_path / "target"), str(head)), max_new_tokens=8,
                             tree=eagle_fsd.TreeConfig(8, 3, 2))
    assert len(out.token_ids) == 8 and out.stats.proposed["head"] > 0
    for changes in ({"data": place / "data"}, {"conversations": ()}):
        with pytest.raises(ValueError, match="pass either --conversations or --data"):
            train(settings(place, tmp_path / "run", **given | changes))
    with monkeypatch.context() as context:  # what is stored is of other weights, template or quantisation
        context.setattr(Trainer, "train_step", lambda self: pytest.fail("computed something"))
        with pytest.raises(ValueError, match="data was made with another quantization .was None, now int8, rotated"):
            train(settings(place, tmp_path / "run", **given, quantization="int8"))
        tokenizer.chat_template = CHAT_TEMPLATE.replace("<user>", "<user> ")
        tokenizer.save_pretrained(tmp_path / "target")
        with pytest.raises(ValueError, match="data was made with another chat_template .was "):
            train(settings(place, tmp_path / "run", **given))
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(tmp_path / "target")
        tiny_target(seed=5).save_pretrained(tmp_path / "target")
        for missing in ("states", "features"):
            shutil.rmtree(tmp_path / "run" / missing, ignore_errors=True)
            with pytest.raises(ValueError, match="run/data was made with another target .was Llama"):
                train(settings(place, tmp_path / "run", **given))
        with pytest.raises(ValueError, match="run/data was made with another target .was Llama"):  # an EAGLE-3 head
            train(settings(place, tmp_path / "run", **given | {
                "head": "eagle3", "layers": (0, 1), "objective": make_objective("eagle3,aligned_steps=2")}))
        tiny_target().save_pretrained(tmp_path / "target")
    lines = asked.read_text().splitlines()
    asked.write_text("\n".join(lines[:9]))
    with pytest.raises(ValueError, match="data was made with another conversations .was"):
        train(settings(place, tmp_path / "run", **given))
    with pytest.raises(ValueError, match="asked.jsonl has 9 usable conversations, and 10 are needed"):
        train(settings(place, tmp_path / "few", **given))


def interrupted(*_):
    raise KeyboardInterrupt


def test_flags_change_the_recipe(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(train_draft_head, "train", asked.append)
    required = ["--target", "t", "--data", "d", "--output", "o"]
    monkeypatch.setattr(sys, "argv", ["x", "small", *required, "--steps", "7", "--no-evaluate", "--tree", "8,3,2",
                                      "--objective", "hass,aligned_steps=2"])
    assert main() == 0
    wanted = TrainingConfig(target="t", output=Path("o"), data=Path("d"), **RECIPES["small"][1] | {
        "steps": 7, "evaluate": False, "tree": TreeConfig(8, 3, 2),
        "objective": replace(OBJECTIVES["hass"], aligned_steps=2)})
    assert asdict(asked[0]) == asdict(wanted)


def test_a_new_head_leaves_the_targets_config(place):
    text = tiny_target(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}).config
    for rope in (dict(text.rope_parameters), {"rope_type": "default", "rope_theta": 1e4}, {"type": "default"}):
        text.rope_parameters, before = rope, copy.deepcopy(rope)
        head = new_head(TrainingConfig(data=place / "data", output=place / "new"), text)
        head.config.rope_parameters["rope_theta"] = 7.0
        assert text.rope_parameters == before


def test_a_study_makes_each_run_once(place, tmp_path, monkeypatch, capsys):
    AcceleratorState._reset_state()  # as above
    started = []

    def here(command, check):
        started.append(command)
        monkeypatch.setattr(sys, "argv", ["x", *command[3:]])
        return SimpleNamespace(returncode=main())

    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=here))
    small = "--cpu --batch-tokens 64 --tree 6,3,2 --decode-prompts 2 --decode-tokens 8 --draft-vocab-size 20"
    words = ["--target", str(place / "target"), "--data", str(place / "data"), "--out", str(tmp_path / "study"),
             "--minutes", "0.01", "--documents", "4", "--run", f"plain={small}"]
    assert study.main(words) == 0 and len(started) == 2  # its speed, then itself
    assert study.main([*words, "--run", f"narrow={small} --intermediate-size 8", "--seeds", "0", "1"]) == 0
    assert len(started) == 2 + 1 + 3  # the second seed, and the new run
    rows = json.loads((tmp_path / "study" / "study.json").read_text())["rows"]
    assert [(row["run"], row["seed"]) for row in rows] == [(n, s) for n in ("plain", "narrow") for s in (0, 1)]
    assert all(row["tau"] >= 1 and row["steps"] >= 1 and row["tokens_per_second"]["exact"] > 0 for row in rows)
    capsys.readouterr()
    folder, data = tmp_path / "study", tmp_path / "data"
    Documents.of([([3, 4, 5, 6], [True] * 4)] * 8).save(data)
    shutil.copytree(place / "target", tmp_path / "target")
    tiny_target(num_hidden_layers=8, seed=5).save_pretrained(tmp_path / "target")
    others = [word for word in words if word != f"plain={small}"]
    for more, name in (([*words, "--minutes", "0.02"], "minutes (was 0.01, now 0.02)"),
                       ([*words, "--documents", "5"], "documents (was 4, now 5)"),
                       ([*words, "--recipe", "eagle3"], "recipe ("),
                       ([*others, f"plain={small} --lr 2"], "flags ("), ([*words, "--data", str(data)], "data ("),
                       ([*words, "--target", str(tmp_path / "target")], "target (")):
        assert study.main(more) == 2 and f"plain.plan.json was made with another {name}" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(installation, "commit", lambda: "abc1234")
        assert study.main(words) == 2 and "another eagle_fsd (was" in capsys.readouterr().err
    (folder / "plain.plan.json").unlink()
    assert study.main([*words, "--minutes", "0.02"]) == 2 and "result.json was made" in capsys.readouterr().err
    assert len(started) == 6
    for wrong, said in ((["--run", "plain=--lr 2"], "name is taken"), (["--run", "x y"], 'is not "NAME=FLAGS"'),
                        (["--minutes", "0"], "--minutes must be"), (["--recipe", "huge"], "--recipe must be")):
        assert study.main([*words, *wrong]) == 2 and said in capsys.readouterr().err
