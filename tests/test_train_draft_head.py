"""The training script: runs to the end, resumes bit by bit, is the same on two processes, refuses what is wrong."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import PROMPT, tiny_target

import eagle_fsd
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import only_writer
from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from train import train_draft_head
from train.core import evaluation
from train.core.config import make_config, read_config
from train.core.estimate import TextWalk
from train.core.objectives import OBJECTIVES, Objective
from train.core.run import Run
from train.core.schedule import Schedule, feature_noise, learning_rate, shares
from train.features import write_features
from train.train_draft_head import main, train

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "train" / "train_draft_head.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target and a dataset of 60 documents."""
    folder = tmp_path_factory.mktemp("training")
    tiny_target("llama", attention="sdpa").save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 20, 60)
    Documents.of([(rng.integers(3, 32, n).tolist(), [i > n // 3 for i in range(n)]) for n in lengths]).save(
        folder / "data"
    )
    return folder


def settings(place, output, **changes) -> dict:
    return {
        "target": place / "target", "data": place / "data", "output": place / output, "eval_documents": 4,
        "target_dtype": "float32", "mixed_precision": "no", "steps": 12, "batch_tokens": 128, "lr": 3e-3, "warmup": 3,
        "save_every": 4, "eval_every": 6, "log_every": 1, "tree": [6, 3, 2], "tracker": "none",
        "decode_prompts": 2, "decode_tokens": 16, "objective": {"name": "eagle", "aligned_steps": 2}, **changes,
    }


def run(place, output, **changes) -> Path:
    return train(make_config(settings(place, output, **changes)), cpu=True)


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "train.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(place):
    """An uninterrupted run."""
    return run(place, "whole")


def command(place, output, tmp_path, **changes) -> list[str]:
    """The script's arguments for the same run."""
    path = tmp_path / "config.json"
    values = settings(place, output, **changes)
    path.write_text(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in values.items()}))
    return [SCRIPT, "--config", str(path), "--cpu"]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "TOKENIZERS_PARALLELISM": "false"}


def test_training_lowers_the_loss_and_leaves_a_head_that_decodes(place, finished):
    curve = losses(place / "whole")
    assert len(curve) == 12 and np.mean(curve[-3:]) < np.mean(curve[:3])
    model = eagle_fsd.load(place / "target", finished)
    prompt = [3, 1, 4, 1, 5, 9]
    plain = model.target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 6:].tolist()
    assert eagle_fsd.generate(prompt, model, max_new_tokens=12, acceptance="exact").token_ids == plain


def test_the_run_says_what_it_measured(place, finished):
    evaluations = [json.loads(line) for line in (place / "whole" / "eval.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evaluations] == [6, 12]
    assert all(1 <= e["tau"]["exact"] <= e["tau"]["fsd 0.1"] <= e["tau"]["fsd 0.3"] for e in evaluations)
    card = (finished / "README.md").read_text()
    assert all(word in card for word in ("| plain |", "| exact |", "| fsd 0.3 |", "tokens/s", "12 steps"))
    assert (place / "whole" / "best" / "model.safetensors").exists()
    assert len(list((place / "whole" / "states").iterdir())) == 2  # keep=2


def test_later_steps_begin_on_the_way(place):
    run(place, "late", steps=4, objective={"name": "late", "aligned_from": 0.5}, evaluate=False)
    records = [json.loads(line) for line in (place / "late" / "train.jsonl").read_text().splitlines()]
    assert [len(record["top1"]) for record in records] == [1, 1, 2, 2]


def test_a_head_that_names_some_tokens_learns_them_and_is_saved_so(place):
    trained = run(place, "limited", head={"draft_vocab_size": 12})
    documents = Documents.load(place / "data")
    counts = np.bincount(documents.tokens[documents.learned], minlength=32)
    pair = eagle_fsd.load(place / "target", trained, device="cpu")
    named = pair.draft.token_map.tolist()
    assert len(named) == 12 and counts[named].min() >= np.delete(counts, named).max()
    expected = pair.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=8, acceptance="exact")
    assert output.token_ids == expected[0, len(PROMPT) :].tolist()
    continued = run(place, "continued", init_from=str(trained))
    assert load_head(continued).token_map.tolist() == named


def test_a_finished_run_trains_no_further(place, finished):
    before = (place / "whole" / "train.jsonl").read_text()
    run(place, "whole")
    assert (place / "whole" / "train.jsonl").read_text() == before


def test_killed_by_force_it_resumes_to_the_same_curve_and_weights(place, finished, tmp_path):
    output = place / "killed"
    process = subprocess.Popen(
        [sys.executable, *command(place, "killed", tmp_path, steps=12)], env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path,
    )
    log = output / "train.jsonl"
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 6):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = len(log.read_text().splitlines())
    assert 6 <= killed_at <= 12 and (output / "states" / "step-4").exists()
    with log.open("a") as file:
        file.write('{"step": 7, "lo')  # as a kill in the middle of a line leaves it
    run(place, "killed")
    assert losses(output) == losses(place / "whole")
    for name, value in load_file(finished / "model.safetensors").items():
        assert torch.equal(value, load_file(output / "head" / "model.safetensors")[name]), name


def test_interrupted_it_saves_and_resumes(place, finished, monkeypatch):
    step = Run.train_step

    def interrupt(self):
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with monkeypatch.context() as context:
        context.setattr(Run, "train_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(place, "interrupted")
    assert (place / "interrupted" / "states" / "step-7" / "run.json").exists()
    run(place, "interrupted")
    assert losses(place / "interrupted") == losses(place / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_evaluation_is_abandoned_when_the_run_is_to_stop(place, finished, monkeypatch, number):
    cycle, cycles, output = TextWalk.cycle, [], place / f"evaluating-{number.name}"

    def interrupt(self):
        cycles.append(self)
        os.kill(os.getpid(), number)
        return cycle(self)

    with monkeypatch.context() as context:
        context.setattr(TextWalk, "cycle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(place, output.name)
    assert len(cycles) == 1 and not (output / "eval.jsonl").exists()
    assert (output / "states" / "step-6" / "run.json").exists()  # where it was evaluating, and would not have saved
    run(place, output.name)
    assert losses(output) == losses(place / "whole")
    evaluations = [(place / name / "eval.jsonl").read_text() for name in (output.name, "whole")]
    assert evaluations[0] == evaluations[1]  # the abandoned one is made up for


@pytest.mark.parametrize(("file", "left"), [("optimizer.bin", b""), ("model.safetensors", b"{}"), ("run.json", b"{")])
def test_a_damaged_state_gives_way_to_an_older_one(place, finished, caplog, file, left):
    output = place / f"damaged-{file}"
    shutil.copytree(place / "whole", output)
    newest = output / "states" / "step-12"
    (newest / file).write_bytes(left)
    run(place, output.name)
    said = [record.getMessage() for record in caplog.records
            if record.levelname == "WARNING" and record.name == "train.train_draft_head"]
    assert len(said) == 1 and str(newest) in said[0] and "older" in said[0]
    assert losses(output) == losses(place / "whole")
    assert {path.name for path in newest.parent.iterdir()} == {"step-8", "step-12", "step-12.damaged"}
    for name, value in load_file(finished / "model.safetensors").items():
        assert torch.equal(value, load_file(output / "head" / "model.safetensors")[name]), name


def test_one_folder_takes_one_run_at_a_time(place, monkeypatch):
    (place / "taken").mkdir()
    monkeypatch.setattr(train_draft_head, "Run", lambda *given: pytest.fail("loaded something"))
    with only_writer(place / "taken"), pytest.raises(ValueError, match="taken is being written by process .* since"):
        run(place, "taken")


def test_where_all_states_are_damaged_nothing_is_trained_over_them(place, finished):
    output = place / "ruined"
    shutil.copytree(place / "whole", output)
    for state in (output / "states").iterdir():
        (state / "optimizer.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="no state of .*ruined can be read.*step-12.*EOFError"):
        run(place, "ruined")
    assert len(list((output / "states").iterdir())) == 2


def test_a_worse_head_does_not_replace_the_best_after_a_resume(place, monkeypatch):
    taus, step = iter([3.0, 2.0]), Run.train_step

    def die(self):
        if self.step == 5:
            raise RuntimeError("killed")
        return step(self)

    monkeypatch.setattr(evaluation, "estimate_tau", lambda *args, **options: dict.fromkeys(args[4], next(taus)))
    changes = {"steps": 8, "eval_every": 4}  # saved and evaluated at the same step
    with monkeypatch.context() as context:
        context.setattr(Run, "train_step", die)
        with pytest.raises(RuntimeError):
            run(place, "best", **changes)
    run(place, "best", **changes)
    estimate = json.loads((place / "best" / "best" / "estimate.json").read_text())
    assert estimate["step"] == 4 and estimate["tau"]["exact"] == 3
    assert [json.loads(line)["step"] for line in (place / "best" / "eval.jsonl").read_text().splitlines()] == [4, 8]


def test_offline_features_give_the_online_curve(place, finished):
    model, _ = load_target(place / "target", dtype="float32")
    write_features(TargetModel(model), Documents.load(place / "data"), place / "features")
    run(place, "offline", features=str(place / "features"))
    np.testing.assert_allclose(losses(place / "offline"), losses(place / "whole"), atol=1e-3)


def test_accumulated_parts_are_the_whole_batch(place, finished):
    run(place, "parts", gradient_accumulation=3)
    np.testing.assert_allclose(losses(place / "parts"), losses(place / "whole"), atol=1e-4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_processes_are_one(place, finished, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
         *command(place, "two", tmp_path)],
        env=ENVIRONMENT, capture_output=True, text=True, cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 process(es) on cpu" in result.stderr
    np.testing.assert_allclose(losses(place / "two"), losses(place / "whole"), atol=1e-4)
    one, two = (load_file(place / name / "head" / "model.safetensors") for name in ("whole", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


SHARDED = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
sys.path[:0] = [{root!r}, {tests!r}]
from tiny import tiny_pair
from train.core.estimate import TextWalk
from train.core.objectives import OBJECTIVES, AlignedLoss
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = tiny_pair()
target, head = model.target, model.draft
head.share_embeddings(target.embed_tokens)
mesh = torch.distributed.init_device_mesh("cpu", (2,))
loss = AlignedLoss(head.train(), OBJECTIVES["aligned"], target.logits)
fully_shard(head.layers[0], mesh=mesh)
fully_shard(loss, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in loss.parameters() if p.requires_grad], lr=1e-2)
tokens = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(0))
features = target.decoder(tokens).last_hidden_state.detach()
mine = slice(dist.get_rank(), dist.get_rank() + 1)
first = None
for _ in range(10):
    value, _ = loss(features[mine], tokens[mine], torch.ones(1, 12, dtype=torch.bool))
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    first = first or value.item()
assert value.item() < first
assert all(p.to_local().numel() < p.numel() for p in head.fc.parameters())
state = get_model_state_dict(loss, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save({{name.removeprefix("head."): value for name, value in state.items()}}, {output!r})
dist.barrier()
dist.destroy_process_group()
"""


def test_sharded_training_saves_a_head_that_loads(tmp_path):
    from tiny import tiny_pair

    from eagle_fsd.heads.checkpoint import save_head

    output = tmp_path / "state.pt"
    program = tmp_path / "sharded.py"
    program.write_text(SHARDED.format(root=str(ROOT), tests=str(ROOT / "tests"), output=str(output)))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
         str(program)], env=ENVIRONMENT, capture_output=True, text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    head = tiny_pair().draft
    head.share_embeddings(None)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    head.load_state_dict(torch.load(output, weights_only=True))
    assert not torch.equal(head.fc.weight, before["fc.weight"])
    save_head(head, tmp_path / "head")
    assert torch.equal(load_head(tmp_path / "head").fc.weight, head.fc.weight)


def test_states_of_older_versions_are_continued(place):
    """They hold whole numbers where the settings are floats now."""
    run(place, "older", steps=4)
    path = place / "older" / "states" / "step-4" / "run.json"
    record = json.loads(path.read_text())
    assert record["config"]["tree"] == [6, 3, 2] and record["config"]["objective"]["aligned_steps"] == 2
    record["config"] |= {"tree": [6, 3, 2], "epochs": 20}
    path.write_text(json.dumps(record))
    before = (place / "older" / "train.jsonl").read_text()
    run(place, "older", steps=4)
    assert (place / "older" / "train.jsonl").read_text() == before


def test_the_card_shows_the_tree_as_it_was_given(finished):
    assert "tree\n[6, 3, 2], float32" in (finished / "README.md").read_text()


def test_another_configuration_does_not_continue_a_run(place, finished):
    with pytest.raises(ValueError, match="another lr, seed"):
        run(place, "whole", lr=1e-3, seed=3)


def test_every_document_is_seen_once_per_epoch_and_held_out_ones_never(place):
    documents = Documents.load(place / "data")
    schedule = Schedule(documents, np.arange(50), make_config(settings(place, "x")))
    for epoch in (0, 1):
        seen = np.concatenate([schedule.batch(epoch * schedule.per_epoch + i) for i in range(schedule.per_epoch)])
        assert set(seen.tolist()) <= set(range(50)) and len(set(seen.tolist())) >= 45
    assert schedule.batch(3).tolist() == Schedule(
        documents, np.arange(50), make_config(settings(place, "x"))
    ).batch(3).tolist()


def test_shares_cover_the_batch():
    parts = shares(np.arange(7), 3)
    assert [part.tolist() for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]


def test_learning_rate_rises_then_falls_to_zero(place):
    config = make_config(settings(place, "x", lr=1.0, warmup=4))
    rates = [learning_rate(config, step, 12) for step in range(13)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(rates[4:], np.linspace(1, 0, 9))


def test_noise_belongs_to_the_document_and_fades_with_length():
    features = torch.zeros(2, 6, 5)
    both = feature_noise(np.array([4, 9]), np.array([6, 3]), features, 0.1, seed=1)
    alone = feature_noise(np.array([9]), np.array([3]), features[:1, :3], 0.1, seed=1)
    assert torch.equal(both[1, :3], alone[0]) and not both[1, 3:].any()
    assert 0.5 * 0.1 * 512 / 6 < both[0].abs().max() <= 0.1 * 512 / 6
    assert not torch.equal(both, feature_noise(np.array([4, 9]), np.array([6, 3]), features, 0.1, seed=2))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
        ({"target": None}, "target must be str, got None"),
        ({"evaluate": "maybe"}, "evaluate must be bool, got 'maybe'"),
        ({"device_map": ["auto"]}, r"device_map must be str | None, got \['auto'\]"),
        ({"steps": 2.5}, r"steps must be int \| None, got 2.5"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"keep": True}, "keep must be int, got True"),
        ({"lr": 0}, "lr must be a number above 0, got 0"),
        ({"lr": "fast"}, "lr must be float, got 'fast'"),
        ({"batch_tokens": 1.5}, "batch_tokens must be int, got 1.5"),
        ({"clip": "both"}, "clip must be one of norm, value, got 'both'"),
        ({"objective": "best"}, "unknown objective 'best'"),
        ({"tree": [60]}, "tree must be .*total_tokens, depth, top_k"),
        ({"tree": [60, "deep", 10]}, r"tree must be tuple\[float, ...\], got \[60, 'deep', 10\]"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of no, bf16"),
        ({"betas": [0.9]}, r"betas must be tuple\[float, float\], got \[0.9\]"),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers of at least 0 and below 1"),
        ({"head": "eagle3"}, r"head must be dict\[str, Any\], got 'eagle3'"),
        ({"head": {"intermediate_size": -1}}, "head: intermediate_size must be a whole number of at least 1, got -1"),
        ({"head": {"num_key_value_heads": "two"}}, "head: num_key_value_heads must be a whole number .* got 'two'"),
        ({"objective": {"name": "hass", "aligned_steps": 1000}}, "aligned_steps must be at most 32, got 1000"),
        ({"eval_tokens": 0}, "eval_tokens must be a whole number of at least 1, got 0"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(place, changes, match):
    with pytest.raises(ValueError, match=match):
        make_config(settings(place, "x", **changes))


def test_a_missing_setting_is_named(place):
    with pytest.raises(ValueError, match="setting 'target' is missing"):
        make_config({"data": "d", "output": "o"})


def test_without_omegaconf_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    monkeypatch.delitem(sys.modules, "train.core.config")
    with pytest.raises(ImportError, match=r"training needs OmegaConf: pip install eagle_fsd\[train\]"):
        importlib.import_module("train.core.config")


@pytest.mark.parametrize("words", [["--nonsense"], ["lr=1"], ["--config", "nowhere.yaml", "lr=1", "--cpu"],
                                   ["--config", "nowhere.yaml", "steps"]], ids=" ".join)
def test_bad_command_lines_end_with_status_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_draft_head", *words])
    monkeypatch.chdir(tmp_path)
    try:
        status = main()
    except SystemExit as stopped:
        status = stopped.code
    shown = capsys.readouterr().err
    assert status == 2 and "Traceback" not in shown
    if "nowhere.yaml" in words:
        assert shown.count("\n") == 1 and shown.startswith("train_draft_head: nowhere.yaml")


def test_the_command_reads_overrides_and_flags(monkeypatch):
    asked = []
    monkeypatch.setattr(train_draft_head, "read_config", lambda path, overrides: (path, overrides))
    monkeypatch.setattr(train_draft_head, "train", lambda config, cpu: asked.append((*config, cpu)))
    monkeypatch.setattr(sys, "argv", ["x", "--config", "c.yaml", "head={kind: eagle3}", "lr=3e-4", "--cpu", "--wandb"])
    assert main() == 0
    assert asked == [(Path("c.yaml"), ["head={kind: eagle3}", "lr=3e-4", "tracker=wandb"], True)]


def test_a_head_setting_that_does_not_exist_is_refused(place):
    with pytest.raises(ValueError, match="head has no setting 'layers'"):
        run(place, "bad-head", head={"layers": 2})


def test_overrides_replace_what_the_file_says(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("target: t\ndata: d\noutput: o\nlr: 3e-5\nobjective: {name: hass, aligned_steps: 2}\n")
    config = read_config(path, ["steps=7", "lr=1e-3", "tree=[8,3,2]"])
    assert (config.steps, config.lr, config.tree, config.objective.aligned_steps) == (7, 1e-3, (8, 3, 2), 2)
    assert [read_config(path, [f"mixed_precision={given}"]).mixed_precision for given in ("no", "'no'", "bf16")] == [
        "no", "no", "bf16"]
    for override in ("steps", "=7"):
        with pytest.raises(ValueError, match="name=value"):
            read_config(path, [override])


def test_an_override_replaces_a_mapping_or_one_entry_of_it(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("target: t\ndata: d\noutput: o\nobjective: hass\nhead: {kind: eagle3, draft_vocab_size: 32000}\n")
    assert read_config(path, ["head={kind: eagle3}"]).head == {"kind": "eagle3"}
    assert read_config(path, ["head.bias=true"]).head == {"kind": "eagle3", "draft_vocab_size": 32000, "bias": True}
    assert read_config(path, ["objective.aligned_steps=2"]).objective == replace(OBJECTIVES["hass"], aligned_steps=2)
    assert read_config(path, ["objective=plain"]).objective == OBJECTIVES["plain"]
    assert read_config(path, ["objective={tv: 1}"]).objective == Objective(tv=1.0)
    assert read_config(path, ["steps=null", "evaluate=no"]).evaluate is False


@pytest.mark.parametrize(
    ("text", "overrides", "match"),
    [
        ("- target", [], "must hold settings by name"),
        ("target: [", [], "cannot be read as settings"),
        ("3", [], "cannot be read as settings"),
        ("target: t", ["head={"], r"head=\{ cannot be read as settings"),
        ("target: t", ["learning_rate=1"], "unknown setting 'learning_rate'; accepted: target, data"),
        ("target: t", ["data.x=1", "output=o"], r"data must be str, got \{'x': 1\}"),
        ("target: t", ["data=d"], "setting 'output' is missing"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, text, overrides, match):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_config(path, overrides)
    with pytest.raises(ValueError, match="nowhere.yaml"):
        read_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "train" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_ready_configurations_are_read(path):
    if path.name in ("head.yaml", "eagle2.yaml", "eagle3.yaml"):
        assert read_config(path, ["target=t", "data=d", "output=o"]).tree == (60, 8, 10)
    elif path.name == "small.yaml":
        assert read_config(path, ["target=t", "data=d", "output=o"]).tree == (16, 5, 4)
    else:
        from accelerate.commands.config.config_args import load_config_from_file

        assert load_config_from_file(str(path)).num_processes in (1, 8, 16)
