"""Reading and writing heads in the published layout. V = 32, D = 16."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, PROMPT, VOCAB, tiny_head, tiny_target

from eagle_fsd import load, load_head, save_head
from eagle_fsd.heads.checkpoint import copy_head, is_causal_lm
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.loading.pair import EagleModel

KEYS = {
    "embed_tokens.weight",
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


@pytest.fixture
def head():
    return tiny_head(tiny_target())


@pytest.fixture
def saved(head, tmp_path):
    """A head's directory that a test may damage."""
    save_head(head, tmp_path / "head")
    return tmp_path / "head"


def rewrite(directory, change):
    """Apply `change(config, state)` to a saved head."""
    config = json.loads((directory / "config.json").read_text())
    state = load_file(directory / "model.safetensors")
    change(config, state)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(state, directory / "model.safetensors")


def predicted(head):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 5, HIDDEN, generator=generator)
    with torch.no_grad():
        return head(features, torch.tensor([PROMPT[:5]]), torch.arange(5)[None])


def test_loading_draws_no_random_numbers(saved):
    """For a large vocabulary they would take seconds, and a user's seed would give other numbers after a load."""
    before = torch.get_rng_state()
    load_head(saved)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("bias", "qkv_bias"), [(False, False), (True, True)])
def test_round_trip(tmp_path, head, bias, qkv_bias):
    if bias or qkv_bias:
        config = head.config
        config.qkv_bias = qkv_bias
        head = DraftHead(config, bias=bias)
        for weight in head.parameters():
            torch.nn.init.normal_(weight)
    save_head(head, tmp_path, dtype=torch.float64 if bias else None, tree={"depth": 3})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bias"] is bias and config["num_hidden_layers"] == 1 and config["tree"] == {"depth": 3}
    keys = set(load_file(tmp_path / "model.safetensors"))
    extra = {"fc.bias"} if bias else set()
    if qkv_bias:  # q, k and v, but not o
        extra |= {f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    assert keys == KEYS | extra
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == (torch.float64 if bias else torch.float32)
    loaded = load_head(tmp_path)
    assert not loaded.shares_embeddings and not loaded.training and loaded.dtype == torch.float32
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert torch.equal(predicted(loaded), predicted(head))


def test_a_head_replaces_one_in_the_other_format(saved, head):
    changed = tiny_head(tiny_target(), seed=5)
    save_head(changed, saved, file="pytorch_model.bin")
    assert torch.equal(predicted(load_head(saved)), predicted(changed))
    assert not torch.equal(predicted(changed), predicted(head))
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "pytorch_model.bin"]


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
def test_a_pickle_with_code_is_refused_and_not_run(saved, tmp_path, save):
    save({"fc.weight": Exploit(tmp_path / "ran")}, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        load_head(saved)
    assert not (tmp_path / "ran").exists()
    torch.save([torch.zeros(2)], saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no dictionary of tensors"):
        load_head(saved)


def test_without_embeddings_the_targets_are_used(saved, tmp_path):
    rewrite(saved, lambda config, state: state.pop("embed_tokens.weight"))
    head, target = load_head(saved), tiny_target()
    assert head.shares_embeddings
    pair = EagleModel.from_parts(target, head)
    assert pair.draft.embed_tokens is target.get_input_embeddings()
    save_head(head, tmp_path / "again")
    assert "embed_tokens.weight" not in load_file(tmp_path / "again" / "model.safetensors")


def test_the_file_and_not_the_config_says_whether_there_is_a_bias(saved, head):
    rewrite(saved, lambda config, state: config.pop("bias"))  # a missing key means true
    loaded = load_head(saved)
    assert loaded.fc.bias is None and torch.equal(predicted(loaded), predicted(head))
    bias = torch.randn(HIDDEN)
    rewrite(saved, lambda config, state: config.update(bias=False) or state.update({"fc.bias": bias}))
    loaded = load_head(saved)
    assert torch.equal(loaded.fc.bias, bias) and not torch.equal(predicted(loaded), predicted(head))


def drop(name):
    return lambda config, state: state.pop(name)


def put(name, *shape):
    return lambda config, state: state.update({name: torch.zeros(shape)})


def configure(**fields):
    return lambda config, state: config.update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), "missing .*fc.weight"),
        (put("lm_head.weight", VOCAB, HIDDEN), "unknown .*lm_head.weight"),
        (put("fc.weight", HIDDEN, 3 * HIDDEN), "(?s)does not fit its config.json: .*fc.weight"),
        (put("layers.1.mlp.up_proj.weight", 24, HIDDEN), "weights of layer 0, 1; accepted: draft heads of 1 layer"),
        (put("layers.0.self_attn.k_proj.bias", 8), "unknown .*k_proj.bias"),
        (put("model.fc.weight", HIDDEN, 2 * HIDDEN), "contains fc.weight twice, once as "),
        (configure(hidden_size="wide"), "config.json is no Llama config"),
        (configure(hidden_act="magic"), "no head can be constructed from .*config.json: KeyError"),
        (configure(rms_norm_eps=-1.0), "no head can be constructed from .*config.json: .* not finite"),
        (configure(num_key_value_heads=3), "no head can be constructed from .*config.json"),
        (lambda config, state: state["fc.weight"].fill_(torch.nan), "damaged: fc.weight has values that are not"),
        (lambda config, state: state.update({"fc.weight": state["fc.weight"].to(torch.int8)}), "is torch.int8, "),
    ],
)
def test_heads_that_do_not_fit_are_refused(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=message):
        load_head(saved)


def prefix(config, state):
    for name in list(state):
        state["model." + name] = state.pop(name)


@pytest.mark.parametrize("change", [
    configure(num_hidden_layers=40, layer_types=["full_attention"] * 40), configure(draft_vocab_size=None),
    configure(draft_vocab_size=16), configure(qkv_bias=True, attention_bias=True, mlp_bias=True), prefix,
    put("layers.0.self_attn.rotary_emb.inv_freq", 2),
], ids=["the target's layers", "null", "reduced", "biases", "prefix", "frequencies"])
def test_the_weights_say_what_a_head_is(saved, head, tmp_path, change):
    """Configs in the wild are often the target's, or have fields of another kind."""
    rewrite(saved, change)
    loaded = load_head(saved)
    assert type(loaded) is DraftHead and loaded.draft_vocab_size == VOCAB
    assert torch.equal(predicted(loaded), predicted(head))
    save_head(loaded, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()).get("draft_vocab_size") is None
    assert torch.equal(predicted(load_head(tmp_path / "again")), predicted(head))


def as_speculators(config, state):
    """EAGLE-1 and HASS heads as speculators 0.2 wrote them: without embeddings, the layer's config nested."""
    for name in list(state):
        first, _, rest = name.partition(".")
        new = {"layers": "transformer." + rest.removeprefix("0."), "fc": "fusion_fc." + rest}.get(first)
        value = state.pop(name)
        if new is not None:
            state[new] = value
    layer = dict(config)
    config.clear()
    config |= {"speculators_model_type": "eagle", "transformer_layer_config": layer, "layernorms": False,
               "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "fusion_bias": False}


def test_heads_of_speculators_0_2_are_read(saved, head, tmp_path):
    rewrite(saved, as_speculators)
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    pair = load(tmp_path / "target", saved, device="cpu", tree=None)
    assert type(pair.draft) is DraftHead and pair.draft.shares_embeddings
    head.share_embeddings(target.get_input_embeddings())
    assert torch.equal(predicted(pair.draft), predicted(head))
    rewrite(saved, put("pre_lm_head_layernorm.weight", HIDDEN))
    with pytest.raises(ValueError, match="unknown .*pre_lm_head_layernorm.weight"):
        load(tmp_path / "target", saved, device="cpu", tree=None)


@pytest.mark.parametrize(("fields", "message"), [
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false; accepted: heads that read"),
    ({"speculators_model_type": "mtp"}, "is of MTP"),
    ({"draft_vocab_size": VOCAB}, "missing .*fc.weight"),
])
def test_heads_without_fc_are_no_causal_lms(saved, fields, message):
    """ModelOpt's have the config of a causal LM."""
    rewrite(saved, drop("fc.weight"))
    assert is_causal_lm(saved)
    rewrite(saved, configure(**fields))
    assert not is_causal_lm(saved)
    with pytest.raises(ValueError, match=message):
        load_head(saved)


def shard(directory, suffix="safetensors"):
    """Spread a saved head over two files and an index."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem, save = ("model", save_file) if suffix == "safetensors" else ("pytorch_model", torch.save)
    weight_map = {name: f"{stem}-0000{1 + number % 2}-of-00002.{suffix}" for number, name in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        save({name: state[name] for name in state if weight_map[name] == file}, directory / file)
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_head_in_several_files_is_read(saved, head, tmp_path, suffix):
    index = shard(saved, suffix)
    assert torch.equal(predicted(load_head(saved)), predicted(head))
    copy_head(saved, tmp_path / "copy", torch.arange(9))
    assert torch.equal(predicted(load_head(tmp_path / "copy")), predicted(head))
    first = min(saved.glob("*-00001-*"))
    for text, message in ((index.read_text().replace(first.name, "nowhere"), "lists nowhere, which is no file in"),
                          (index.read_text().replace(first.name, "../copy/" + first.name), "lists ../copy"),
                          ("[]", "cannot be read as an index"), ('{"weight_map": {"a": 1}}', "cannot be read as an")):
        (tmp_path / "copy" / index.name).write_text(text)
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path / "copy")
    other = tiny_head(tiny_target(), seed=5)
    save_head(other, saved, file="pytorch_model.bin")
    assert torch.equal(predicted(load_head(saved)), predicted(other)) and not index.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_truncated_and_missing_files_are_refused(saved, name):
    if name == "pytorch_model.bin":
        torch.save(load_file(saved / "model.safetensors"), saved / name)
        (saved / "model.safetensors").unlink()
    data = (saved / name).read_bytes()
    for keep in (len(data) - 2, 100, 0):
        (saved / name).write_bytes(data[:keep])
        with pytest.raises(ValueError, match=name):
            load_head(saved)
    (saved / name).unlink()
    with pytest.raises(ValueError, match="no config.json" if name == "config.json" else "no weights"):
        load_head(saved)
