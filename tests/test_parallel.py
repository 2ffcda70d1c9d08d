"""Tensor parallelism: two processes on the CPU say what one process says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_worker import CASES, SUM, answer, answers, chat
from test_eagle3 import deep_target, good_head
from tiny import PROMPT, save_pair, tiny_chat_pair, tiny_pair, tiny_target, tiny_tokenizer
from transformers import TorchAoConfig

import eagle_fsd
from eagle_fsd import EagleModel
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli import main
from eagle_fsd.data.bundled import small_pair
from eagle_fsd.drafting.logs import store_log
from eagle_fsd.measure.cycles import log_cycles
from eagle_fsd.models.parallel import of_first, tensor_of_first

ROOT = Path(__file__).parents[1]
FAMILIES = ("qwen3", "gemma2", "mixtral")


def torchrun(*command: object, cache: Path, text: str = "") -> subprocess.CompletedProcess:
    """Two processes of a command."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "EAGLE_FSD_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        env=environment, input=text, capture_output=True, text=True, timeout=600)


def save(folder: Path, model: EagleModel) -> EagleModel:
    folder.mkdir()
    model.tokenizer = model.tokenizer or tiny_tokenizer()
    save_pair(folder, model)
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder of saved pairs, and the same pairs in this process."""
    folder = tmp_path_factory.mktemp("parallel")
    target = deep_target(attention="sdpa")
    pairs = {
        "llama": tiny_chat_pair(attention="sdpa"),
        "eagle3": EagleModel.from_parts(target, good_head(target, [*range(0, 32, 2)])),
        **{family: tiny_pair(family, attention="eager" if family == "gemma2" else "sdpa") for family in FAMILIES},
    }
    for name, pair in pairs.items():
        save(folder / name, pair)
    tiny_target(num_key_value_heads=1).save_pretrained(folder / "one head" / "target")
    damaged = tiny_target()
    with torch.no_grad():
        damaged.lm_head.weight[-1, -1] = torch.nan  # in the second one's half
    damaged.save_pretrained(folder / "damaged" / "target")
    tiny_target("gpt2").save_pretrained(folder / "gpt2" / "target")
    log = log_cycles(pairs["llama"], [[3, 4, 5], [6, 7]], make_rule("exact"), max_new_tokens=40)
    store_log(folder / "llama" / "head", log)
    (folder / "small.json").write_text(json.dumps(small_pair()))
    return folder, pairs


@pytest.fixture(scope="module")
def found(pairs):
    """What each of two processes found."""
    folder, _ = pairs
    done = torchrun(ROOT / "tests" / "parallel_worker.py", folder, cache=folder / "cache")
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_processes_find_the_same(found):
    first, second = (dict(each) for each in found)
    assert first.pop("criterion calls") == 7 and second.pop("criterion calls") == 0
    assert first == second


def test_batches(pairs, found):
    assert found[0]["answers"]["batch"] == answers(pairs[1]["llama"])["batch"]


def test_each_holds_half_of_the_weights(found):
    assert found[0]["shapes"] == [[32, 16], [16, 16], 32]


@pytest.mark.parametrize("case", CASES)
def test_they_say_what_one_process_says(pairs, found, case):
    expected = answer(pairs[1]["llama"], **CASES[case]).token_ids
    assert found[0]["answers"][case] == expected


@pytest.mark.parametrize("name", ["eagle3", *FAMILIES])
def test_so_do_other_heads_and_families(pairs, found, name):
    assert found[0][name] == answers(pairs[1][name])


def test_chat_seeds_and_digest(pairs, found):
    pair = pairs[1]["llama"]
    assert found[0]["chat"] == chat(pair)
    seed, tokens = found[0]["unseeded"]
    assert tokens == answer(pair, acceptance="exact", temperature=1.0, seed=seed).token_ids
    assert found[0]["digest"] == pair.target.digest()


def test_a_criterion_counts_where_the_first_process_calls_it(found):
    assert found[0]["criterion"] == found[0]["answers"]["greedy"][:7]


def test_inside_generate(found):
    assert found[0]["custom greedy"] == PROMPT + found[0]["answers"]["greedy"][:12]
    assert len(found[0]["custom sampled"]) == len(PROMPT) + 12


def test_all_go_by_the_first_one_where_their_logits_differ(found):
    assert found[1]["disagreeing"] == found[0]["answers"]


def test_the_chosen_tree(pairs, found):
    folder, _ = pairs
    assert found[0]["auto"][:2] == [found[0]["answers"][name] for name in ("greedy", "sampled")]
    stored = json.loads((folder / "cache" / "latency.json").read_text())
    ours = next(value for key, value in stored.items() if pairs[1]["llama"].target.digest() in key)
    assert "2 processes" in next(iter(stored)) and ours == found[0]["auto latency"]


def test_the_small_pair(found):
    assert found[0]["small"] == eagle_fsd.generate(model=eagle_fsd.load(*small_pair(), tree=None), **SUM).token_ids


def test_quantised_shards(pairs, found):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig

    places = [pairs[0] / "qwen3" / name for name in ("target", "head")]
    config = TorchAoConfig(Int8WeightOnlyConfig())
    assert found[0]["torchao"] == answers(eagle_fsd.load(*places, tree=None, quantization_config=config))


def test_targets_that_cannot_be_shared(found):
    assert "LlamaForCausalLM cannot be shared by 2 processes" in found[0]["one head"]
    assert "lm_head.weight holds values that are not finite" in found[0]["damaged"]
    assert "GPT2LMHeadModel" in found[0]["gpt2"] and "plan" in found[0]["gpt2"]


def test_the_command_writes_once(pairs):
    folder, models = pairs
    done = torchrun("-m", "eagle_fsd", "generate", "-", "--target", folder / "llama" / "target", "--draft",
                    folder / "llama" / "head", "--tp-plan", "auto", "--tree", "16,5,4", "--max-new-tokens", "20",
                    "--stats", cache=folder / "cache", text="abc")
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout == eagle_fsd.generate("abc", models["llama"], max_new_tokens=20).text + "\n"
    assert done.stderr.count("tokens per step") == 1


def test_one_process_is_no_group(pairs, monkeypatch, capsys):
    folder, models = pairs
    places = (folder / "llama" / "target", folder / "llama" / "head")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["generate", "a", "--target", str(places[0]), "--draft", str(places[1]), "--tp-plan", "auto"]) == 2
    assert "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = eagle_fsd.load(*places, tp_plan="auto", tree=None)
    assert alone.target.group is None
    assert answer(alone).token_ids == answer(models["llama"]).token_ids
    value = torch.zeros(3)
    assert tensor_of_first(None, value) is value and of_first(None, lambda: 5) == 5
