"""Targets in GGUF files, written here by the `gguf` package: a tiny Llama in float32, with a tokenizer. EAGLE-3 heads
exported to llama.cpp."""

import json
import logging
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from subprocess import DEVNULL, PIPE, Popen
from urllib.request import Request, urlopen

import pytest
import torch
import transformers
from tiny import HIDDEN, NAMED, PROMPT, SIZES, VOCAB, random_head, small_model, tiny_head, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.data.gguf import dequantised, fingerprint, target_source
from eagle_fsd.export.servers import export_head
from eagle_fsd.heads.checkpoint import is_causal_lm, save_head
from eagle_fsd.utils.files import bytes_in
from eval.llama_server import draft_type

gguf = pytest.importorskip("gguf")
from gguf_files import permuted, write  # noqa: E402  (they need gguf)

LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def target():
    return tiny_target()


def test_a_file_is_dequantised_once(target, tmp_path, cache, caplog):
    file = write(tmp_path / "tiny.gguf", target)
    part = cache / f"tiny-{fingerprint(file)}.part"
    part.mkdir(parents=True)  # of a process that was killed
    (part / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(dequantised, [file] * 4))  # threads wait for the first
    assert caplog.text.count(f"dequantising {file} to {folder}") == 1
    assert [path.name for path in cache.iterdir()] == [folder.name]  # no half of it is left
    assert sorted(path.name for path in cache.parent.iterdir()) == ["digests", "gguf"]  # and no lock
    (tmp_path / "copy").mkdir()
    assert dequantised(Path(shutil.copy(file, tmp_path / "copy"))) == folder  # a copy elsewhere, of another time
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert target_source(file) == str(folder) and (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    for name in ("tiny.GGUF", "sha256-0f"):  # as on Windows, and in Ollama's store
        assert is_causal_lm(shutil.copy(file, tmp_path / name))
        assert Path(target_source(tmp_path / name)).name == f"{Path(name).stem}-{folder.name.removeprefix('tiny-')}"
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    assert dequantised(write(tmp_path / "tiny.gguf", target)) != folder  # another content is another model


def test_one_drafts_for_another(target, tmp_path):
    files = [write(tmp_path / f"{name}.gguf", model) for name, model in (
        ("large", target), ("small", small_model(target, num_hidden_layers=1)))]
    pair = eagle_fsd.load(*files, device="cpu", tree=eagle_fsd.TreeConfig(12, 4, 3))
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=20, acceptance="exact")
    plain = eagle_fsd.generate(PROMPT, eagle_fsd.EagleModel.from_parts(pair.target.model, None), max_new_tokens=20,
                               speculative=False)
    assert output.token_ids == plain.token_ids and output.stats.accepted["head"] > 5
    assert pair.described()[1].startswith("small.gguf (causal LM, ")


def test_damaged_and_unknown_files_are_refused(target, tmp_path, cache):
    good = write(tmp_path / "tiny.gguf", target).read_bytes()
    for name, content, message in (
        ("empty", b"", "is no GGUF file"), ("head", b"GGUF", "cannot be loaded: head.gguf is damaged"),
        ("short", good[:-2000], "cannot be loaded: short.gguf is damaged"),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.gguf {message}"):
            target_source(tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match="its architecture is 'gptj'; accepted: llama, qwen2, "):
        target_source(write(tmp_path / "odd.gguf", target, architecture="gptj"))
    with pytest.raises(ValueError, match="has no tokenizer that transformers can read"):
        target_source(write(tmp_path / "mute.gguf", target, tokens=False))
    assert not list(cache.glob("*"))


END, TURN, MESSAGE, THOUGHT = VOCAB - 4, VOCAB - 3, VOCAB - 2, VOCAB - 1


@pytest.mark.parametrize(("names", "fields", "ends"), [
    ((), {}, [VOCAB - 1]),
    ((), {"eos_token_id": END, "eot_token_id": TURN, "eom_token_id": MESSAGE}, [END, TURN, MESSAGE]),
    (("<|endoftext|>", "<|im_end|>", "<x>", "<y>"), {"eos_token_id": END}, [END, TURN]),  # by what they are called
    (("<|return|>", "<|call|>", "<|end|>", "<y>"), {"eos_token_id": END}, [END, TURN]),  # gpt-oss: no end of a thought
])
def test_all_ends_of_a_file_end_an_answer(target, tmp_path, names, fields, ends):
    file = write(tmp_path / "tiny.gguf", target, names=names, **fields)
    with torch.no_grad():
        pair = eagle_fsd.load(file, None, device="cpu", tree=None)
    assert pair.target.model.generation_config.eos_token_id == (ends if len(ends) > 1 else ends[0])
    for end in ends:
        bias = {end: 100.0}
        found = eagle_fsd.generate(PROMPT, pair, max_new_tokens=4, logit_bias=bias, acceptance="exact")
        assert found.token_ids == [end] and found.finish_reason == "eos"


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, [26, 2]),
    ({"add_bos_token": True}, [30, 26, 2]),
    ({"tokenizer_pre": "llama-bpe"}, [30, 26, 2]),  # as llama.cpp, where the file does not say
    ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, [26, 2]),
    pytest.param({"add_eos_token": True}, [26, 2, 31], marks=pytest.mark.skipif(
        transformers.__version__.startswith("5.17"), reason="its tokenizers add no end")),
])
def test_what_a_text_begins_and_ends_with_is_what_the_file_says(target, tmp_path, fields, expected):
    file = write(tmp_path / "tiny.gguf", target, pad_token_id=3, chat_template="{{ bos_token }}hi", **fields)
    tokenizer = AutoTokenizer.from_pretrained(dequantised(file))
    pad = None if transformers.__version__.startswith("5.17") else 3  # which reads none
    assert tokenizer("abc")["input_ids"] == expected and tokenizer.pad_token_id == pad
    assert tokenizer.chat_template == "{{ bos_token }}hi"


def test_the_cache_has_a_limit_and_can_be_seen_and_cleared(target, tmp_path, cache, monkeypatch, capsys, caplog):
    first, second = (dequantised(write(tmp_path / f"{name}.gguf", target)) for name in ("first", "second"))
    os.utime(first, (1, 1))  # not used for long
    assert main(["cache"]) == 0 and first.is_dir()
    listed = capsys.readouterr().out
    assert first.name in listed and second.name in listed
    file, held = tmp_path / "second.gguf", bytes_in(second)
    monkeypatch.setenv("EAGLE_FSD_CACHE_GB", str((held + 4.5 * file.stat().st_size) / 1e9))
    third = dequantised(write(tmp_path / "third.gguf", target))
    assert not first.is_dir() and third.is_dir() and f"removing {first} (0.0 GB)" in caplog.text
    monkeypatch.setenv("EAGLE_FSD_CACHE_GB", "much")
    assert main(["cache"]) == 2
    monkeypatch.delenv("EAGLE_FSD_CACHE_GB")
    capsys.readouterr()
    assert main(["cache", "--clear", "gguf"]) == 0
    assert f"{third.name}  removed" in capsys.readouterr().out and not list(cache.iterdir())
    assert list((cache.parent / "digests").iterdir()) and main(["cache", "--clear", "digests"]) == 0
    assert not list((cache.parent / "digests").iterdir())

# What a file says about the model --------------------------------------------------------------------------


PLAIN = {"rope_type": "default", "rope_theta": 300.0}
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
LONG = PLAIN | {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
                "original_max_position_embeddings": 64, "attention_factor": 1.25, "partial_rotary_factor": 1.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "tie_word_embeddings": True}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5}
WINDOW = {"attention.sliding_window": 6}
# architecture, model_type, the model's numbers; those of the file that the config of another model does not have
FILES = {
    "llama": ("llama", "llama", {"head_dim": 8, "rms_norm_eps": 1e-2, "rope_parameters": PLAIN}, {}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True, "rope_parameters": PLAIN}, {}),
    "llama biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN}, {}),
    "llama linear": ("llama", "llama", {"rope_parameters": LINEAR}, {}),
    "llama yarn": ("llama", "llama", {"rope_parameters": YARN | {"beta_fast": 16.0}},
                   {"rope.scaling.yarn_beta_fast": 16.0}),
    "llama 3": ("llama", "llama", {"head_dim": 16, "rope_parameters": LLAMA3}, {}),
    "mistral": ("llama", "mistral", {"sliding_window": None, "rope_parameters": PLAIN}, {}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": YARN}, {}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", MOE | {"shared_expert_intermediate_size": 20, "rope_parameters": PLAIN},
                 {"expert_shared_feed_forward_length": 20}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 8, "rope_parameters": PLAIN}, {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", MOE | {"head_dim": 8, "norm_topk_prob": True, "rope_parameters": PLAIN}, {}),
    "gemma2": ("gemma2", "gemma2", GEMMA | CAPS | {"rope_parameters": PLAIN}, CAPS | WINDOW),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {
        "num_hidden_layers": 7, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
        WINDOW | {"rope.freq_base_swa": 50.0}),
    "phi3": ("phi3", "phi3", {"sliding_window": 6, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, WINDOW),
    "phi3 long": ("phi3", "phi3", {
        "sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 64},
                  {"rope.scaling.attn_factor": 1.25}),
    "starcoder2": ("starcoder2", "starcoder2", {"norm_epsilon": 1e-2, "rope_parameters": PLAIN}, {}),
    "stablelm": ("stablelm", "stablelm", {
        "layer_norm_eps": 1e-2, "use_qkv_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, {}),
    "stablelm parallel": ("stablelm", "stablelm", {
        "use_parallel_residual": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}}, {}),
    "nemotron": ("nemotron", "nemotron", {
        "norm_eps": 1e-2, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, {}),
    "falcon": ("falcon", "falcon", {"ffn_hidden_size": 24, "layer_norm_epsilon": 1e-2, "rope_parameters": PLAIN}, {}),
    "gpt2": ("gpt2", "gpt2", {"n_inner": 24, "layer_norm_epsilon": 1e-2}, {}),
    "minimax-m2": ("minimax-m2", "minimax_m2", {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, {"expert_gating_func": 2}),
}


def noisy(family, **options):
    """A random model whose norms and biases count."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


@pytest.mark.parametrize("name", FILES)
@torch.no_grad()
def test_the_model_of_a_file_computes_what_the_one_it_was_written_from_does(tmp_path, monkeypatch, name):
    monkeypatch.setattr("eagle_fsd.data.gguf.DTYPE", torch.float32)
    architecture, family, options, numbers = FILES[name]
    model = noisy(family, **options)
    file = write(tmp_path / "tiny.gguf", model, architecture=architecture, numbers=numbers)
    loaded = AutoModelForCausalLM.from_pretrained(dequantised(file), attn_implementation="eager")
    text = torch.tensor([[(7 * number + 3) % VOCAB for number in range(80)]])
    torch.testing.assert_close(loaded(text).logits, model(text).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the package xllamacpp is not installed")
@pytest.mark.parametrize("name", [name for name in FILES if name != "phi3"])  # llama.cpp computes no window for Phi-3
@torch.no_grad()
def test_llama_cpp_computes_the_same_from_a_file(tmp_path, name):
    architecture, family, options, numbers = FILES[name]
    model, text = noisy(family, **options), [(7 * number + 3) % VOCAB for number in range(80)]
    file = write(tmp_path / "tiny.gguf", model, architecture=architecture, numbers=numbers)
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = {"prompt": text, "n_predict": 1, "n_probs": VOCAB, "temperature": 0}
    request = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
    command = [sys.executable, "-m", "eval.llama_server", file, "--port", str(port), "--threads", "1"]
    with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True, cwd=Path(__file__).parent.parent) as server:
        try:
            assert any("llama.cpp serves" in line for line in server.stdout), "it does not load the file"
            (answer,) = json.load(urlopen(request, timeout=60))["completion_probabilities"]
        finally:
            server.kill()
    found = torch.tensor([logprob for _, logprob in sorted((x["id"], x["logprob"]) for x in answer["top_logprobs"])])
    torch.testing.assert_close(found, model(torch.tensor([text])).logits[0, -1].log_softmax(-1), rtol=0, atol=0.03)


def written(path, family="llama", architecture="llama", numbers=None, without=(), **options):
    """A file of a random model, without some tensors."""
    model = noisy(family, **options)
    for name in without:
        part, _, kind = name.rpartition(".")
        delattr(model.get_submodule(part), kind)
    return write(path, model, architecture=architecture, numbers=numbers)


@pytest.mark.parametrize(("options", "message"), [
    ({"without": ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]},
     r"tiny.gguf cannot be loaded: it lacks weights: model.layers.1.mlp.up_proj.weight, model.norm.weight$"),
    ({"without": ["model.embed_tokens.weight"]}, "it lacks weights: token_embd.weight"),
    ({"family": "qwen3", "architecture": "qwen3", "attention_bias": True},  # transformers leaves them out
     r"it has [\d,]+ weights, and Qwen3ForCausalLM [\d,]+$"),
    ({"numbers": {"attention.scale": 2.0, "logit_scale": 0.5}},
     "what these change cannot be expressed: llama.attention.scale = 2.0, llama.logit_scale = 0.5"),
    ({"numbers": {"attention.causal": False}}, "its llama.attention.causal is False; accepted: True"),
    ({"numbers": {"expert_count": 8}}, "its llama.expert_count is 8; accepted: 0"),
    ({"numbers": {"rope.scaling.type": "longrope"}}, "a scaling of type 'longrope'; accepted: none, linear, yarn"),
    ({"numbers": {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}}, "yarn_ext_factor = 0.5"),
    ({"family": "qwen2", "architecture": "qwen2", "rope_parameters": LLAMA3},  # which llama.cpp reads for Llama only
     "what these change cannot be expressed: rope_freqs.weight"),
    ({"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}, "head_dim": 16}, "no scaling of Llama 3's kind"),
])
def test_a_file_that_would_compute_something_else_is_refused(tmp_path, cache, options, message):
    file = written(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ValueError, match=message):
        dequantised(file)
    assert not list(cache.iterdir())


def test_the_shards_of_a_file_load_together(target, tmp_path, cache):
    whole = dequantised(write(tmp_path / "tiny.gguf", target))
    first, last = (write(tmp_path / f"tiny-0000{number + 1}-of-00002.gguf", target, split=(number, 2))
                   for number in (0, 1))
    folder = dequantised(first)
    assert dequantised(last) == folder != whole
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    last.unlink()
    with pytest.raises(ValueError, match="one of 2 shards, and beside it are not: tiny-00002-of-00002.gguf"):
        dequantised(first)
    with pytest.raises(ValueError, match="alone.gguf cannot be loaded: it is shard 1 of 2, but its name does not end"):
        dequantised(first.rename(tmp_path / "alone.gguf"))
    assert {path.name for path in cache.iterdir()} == {whole.name, folder.name}


# EAGLE-3 heads for llama.cpp --------------------------------------------------------------------------------


HEAD = {f"blk.0.{ours}": f"layers.0.{theirs}" for ours, theirs in LAYER.items()} | {
    "fc": "fc", "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens",
    "blk.0.attn_norm_2": "layers.0.hidden_norm", "enc.output_norm": "input_norm"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A target of 8 layers, as a file."""
    return write(tmp_path_factory.mktemp("deep") / "deep.gguf", tiny_target(num_hidden_layers=8))


@pytest.mark.parametrize(("named", "layers", "options"), [
    (None, [2, 4, 5], {}),
    (NAMED, [1, 3, 7], {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
                        "rope_parameters": LLAMA3, "norm_before_fc": True}),
])
@torch.no_grad()
def test_llama_cpp_gets_the_keys_and_tensors_of_its_loader(deep, tmp_path, named, layers, options):
    head = random_head(named, **options)
    if named is None:
        head.share_embeddings(None)
    save_head(head, tmp_path / "head")
    reader = gguf.GGUFReader(export_head(tmp_path / "head", "llama.cpp", tmp_path / "new" / "head.gguf", target=deep,
                                         dtype=torch.float32))
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    expected = {name: field.contents() for name, field in gguf.GGUFReader(deep).fields.items()
                if name.startswith("tokenizer.")}
    assert len(expected) > 4
    assert fields == expected | {
        "general.architecture": "eagle3", "general.name": "head", "general.file_type": 0, "eagle3.block_count": 1,
        "eagle3.context_length": head.config.max_position_embeddings, "eagle3.embedding_length": HIDDEN,
        "eagle3.feed_forward_length": 24, "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 4, "eagle3.attention.value_length": 4, "eagle3.vocab_size": VOCAB,
        "eagle3.attention.layer_norm_rms_epsilon": pytest.approx(head.config.rms_norm_eps),
        "eagle3.rope.dimension_count": 4, "eagle3.rope.freq_base": 1e4, "eagle3.target_layers": layers,
        "eagle3.target_hidden_size": HIDDEN, "eagle3.norm_before_residual": named is not None,
        "eagle3.norm_before_fc": named is not None}
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    state = head.state_dict()
    if named is not None:
        assert found.pop("d2t").tolist() == named
        # By hand: of the wave lengths 6.28 and 628, one is between 4 and 16, the other above.
        torch.testing.assert_close(found.pop("rope_freqs.weight"), torch.tensor([1.7360, 8.0]), rtol=1e-4, atol=0)
    names = HEAD.keys() - ({"enc.output_norm", "token_embd"} if named is None else set())
    assert found.keys() == {f"{name}.weight" for name in names}
    for name in names:
        weight = state[f"{HEAD[name]}.weight"]
        if name.endswith(("attn_q", "attn_k")):
            weight = permuted(weight, 4 if name.endswith("q") else 2)
        assert torch.equal(found[f"{name}.weight"], weight), name


def test_the_command_writes_bfloat16(deep, tmp_path, capsys):
    save_head(random_head(NAMED), tmp_path / "head")
    file = tmp_path / "head.gguf"
    command = ["export", str(tmp_path / "head"), "--to", "llama.cpp", "--target", str(deep), "--out", str(file)]
    assert main(command) == 0
    assert f"llama-server -m {deep} -md {file} --spec-type draft-eagle3" in capsys.readouterr().out
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert draft_type(file) == "DRAFT_EAGLE3"
    assert {"fc.weight": "BF16", "output_norm.weight": "F32", "d2t": "I64"}.items() <= types.items()
    assert main(command) == 2 and f"{file} exists" in capsys.readouterr().err


@pytest.mark.parametrize(("make", "message"), [
    (lambda: tiny_head(tiny_target()), "it is an EAGLE-1/2 head, and llama.cpp drafts with EAGLE-3 heads only"),
    (lambda: random_head(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]), "it reads 4 layers of the target"),
    (lambda: random_head(fc_norm=True, norm_output=True), "it has fc_norm, norm_output; llama.cpp supports norm_"),
    (lambda: random_head(hidden_act="gelu"), "it has the activation 'gelu'; llama.cpp supports silu only"),
    (lambda: random_head(mlp_bias=True), "llama.cpp has no layers.0.mlp.gate_proj.bias, .*heads without biases"),
    (lambda: random_head(rope_parameters=LLAMA3 | {"rope_type": "yarn"}), "is of type 'yarn'; accepted: default"),
    (lambda: random_head(vocab_size=40), "vocabulary: head 40, target 32"),
    (lambda: random_head(target_hidden_size=32), "hidden size: head 32, target 16"),
    (lambda: random_head(eagle_aux_hidden_state_layer_ids=[0, 1, 8]), "the output of the target's last layer"),
])
def test_what_llama_cpp_cannot_compute_is_refused(deep, tmp_path, make, message):
    save_head(make(), tmp_path / "head")
    with pytest.raises(ValueError, match=message):
        export_head(tmp_path / "head", "llama.cpp", tmp_path / "new" / "head.gguf", target=deep)
    assert not (tmp_path / "new").exists()


def test_llama_cpp_needs_a_file_of_the_target(deep, tmp_path, monkeypatch):
    for target, file, message in ((None, "a.gguf", "pass target, the GGUF file"),  # all before the head is loaded
                                  (deep.parent, "a.gguf", "pass target"), (deep, "a", "reads a file NAME.gguf, got"),
                                  (deep, deep, "exists")):
        with pytest.raises(ValueError, match=message):
            export_head(tmp_path / "absent", "llama.cpp", tmp_path / file, target=target)
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="needs the package gguf"):
        patch.setattr("eagle_fsd.export.llama_cpp.find_spec", lambda name: None)
        export_head(tmp_path / "absent", "llama.cpp", tmp_path / "a.gguf", target=deep)
    save_head(random_head(NAMED), tmp_path / "head")
    mute = write(tmp_path / "mute.gguf", tiny_target(num_hidden_layers=8), tokens=False)
    with pytest.raises(ValueError, match="it has no tokenizer.ggml.tokens"):
        export_head(tmp_path / "head", "llama.cpp", tmp_path / "a.gguf", target=mute)


def test_without_a_home_a_file_names_the_variable(target, tmp_path, homeless):
    with pytest.raises(OSError, match="this user has no home directory for a cache: set EAGLE_FSD_CACHE to a folder"):
        eagle_fsd.load(write(tmp_path / "tiny.gguf", target), tree=None)
    assert not list(homeless.iterdir())
