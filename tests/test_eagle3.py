"""EAGLE-3 heads: reading them, decoding with them, and what the rules see. V = 32 vocabulary, D = 16 hidden size."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference_eagle import rotate
from safetensors.torch import load_file, save_file
from test_checkpoint import configure, drop, rewrite
from tiny import HIDDEN, NAMED, PROMPT, SIZES, VOCAB, draft_tree, random_head, tiny_target

import eagle_fsd
from eagle_fsd import TreeConfig, load_head, save_head
from eagle_fsd.drafting.sizing import Plan
from eagle_fsd.export.inspection import inspect_head
from eagle_fsd.export.llama_cpp import unsupported
from eagle_fsd.export.servers import export_head
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.target import TargetModel

LAYERS = 8  # of the targets, so that the default layers exist: 2, 4 and 5
NEW = 16
WIDE = TreeConfig(16, 5, 4)


def deep_target(family: str = "llama", layers: int = LAYERS, **options):
    """A tiny target whose many layers add little each, so that a head can follow it."""
    model = tiny_target(family, num_hidden_layers=layers, **options)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
    return model


@pytest.fixture(scope="module")
def target():
    return deep_target()


def good_head(target, named=None, **options) -> Eagle3Head:
    """A head whose attention carries the last token's embedding to the output layer, as the tiny targets do."""
    head = random_head(named, num_key_value_heads=4, **options)
    attention = head.layers[0].self_attn
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        for projection, scale in ((attention.q_proj, 2.0), (attention.k_proj, 2.0), (attention.v_proj, 1.0)):
            projection.weight.normal_(std=0.02)[:, :HIDDEN] += scale * torch.eye(HIDDEN)
        attention.o_proj.weight.normal_(std=0.05).add_(torch.eye(HIDDEN))
        head.fc.weight.normal_(std=0.02)
        head.layers[0].mlp.down_proj.weight.mul_(0.1)
        head.norm.weight.fill_(1)
        rows = slice(None) if named is None else torch.tensor(named)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[rows])
    return head


def write(folder, head: Eagle3Head, layout: str, *, embeddings: bool = True, **changes):
    """The head's files as others publish them: `midlayer`, `layers` (flat configs) or `speculators`."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "midlayer." if layout == "midlayer" else "layers.0."
    state = {name.replace("layers.0.", prefix): value.clone() for name, value in head.state_dict().items()}
    if not embeddings:
        del state["embed_tokens.weight"]
    if head.d2t is not None:
        state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, head.draft_tokens, True)
    elif layout == "midlayer":
        state["d2t"], state["t2d"] = torch.zeros(VOCAB, dtype=torch.long), torch.ones(VOCAB, dtype=torch.bool)
    save_file(state, folder / "model.safetensors")
    own = {name: getattr(head.config, name, None) for name in (
        "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_fc", "fc_norm",
        "norm_output")}
    own = {name: value for name, value in own.items() if value is not None}
    own["draft_vocab_size"] = head.draft_vocab_size
    layer = {name: getattr(head.config, name) for name in SIZES} | {"model_type": "llama"}
    if layout == "speculators":
        own |= {"norm_before_residual": own.get("norm_before_residual", False)}
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
                  "transformer_layer_config": layer, "speculators_config": {"algorithm": "eagle3"}, **own}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def generate(pair, **options):
    options = {"max_new_tokens": NEW, "tree": WIDE, "acceptance": "exact"} | options
    return eagle_fsd.generate(PROMPT, pair, **options)


# The head's forward, slow and obvious --------------------------------------------------------------------------


def scaled(vector, norm, epsilon):
    return vector / (vector.pow(2).mean() + epsilon).sqrt() * norm.weight


def before_fc(head, x):
    config = head.config
    if getattr(config, "norm_before_fc", False):
        return scaled(x, head.input_norm, config.rms_norm_eps)
    if getattr(config, "fc_norm", False):
        low, mid, high = (x[n * HIDDEN : (n + 1) * HIDDEN] for n in range(3))
        return torch.cat([scaled(low, head.fc_norm[0], config.rms_norm_eps),
                          scaled(mid, head.fc_norm[1], config.rms_norm_eps),
                          scaled(high, head.fc_norm[2], config.rms_norm_eps)])
    return x


def hidden_by_hand(head, features, tokens):
    """The hidden state [D] of the last of T tokens, from T features: [3 D] of the target, or [D] of the head itself."""
    config, layer = head.config, head.layers[0]
    attention, eps, theta = layer.self_attn, config.rms_norm_eps, config.rope_parameters["rope_theta"]
    hidden = [head.fc.weight @ before_fc(head, x) if len(x) == head.fc.in_features else x for x in features]
    normed = [scaled(x, layer.hidden_norm, eps) for x in hidden]
    inputs = [
        torch.cat([scaled(head.embed_tokens.weight[token], layer.input_layernorm, eps), x])
        for token, x in zip(tokens, normed, strict=True)
    ]
    last, group = len(inputs) - 1, config.num_attention_heads // config.num_key_value_heads
    queries = (attention.q_proj.weight @ inputs[last]).view(config.num_attention_heads, -1)
    keys = [(attention.k_proj.weight @ x).view(config.num_key_value_heads, -1) for x in inputs]
    values = [(attention.v_proj.weight @ x).view(config.num_key_value_heads, -1) for x in inputs]
    if getattr(config, "qk_norm", False):
        queries = torch.stack([scaled(query, attention.q_norm, eps) for query in queries])
        keys = [torch.stack([scaled(each, attention.k_norm, eps) for each in key]) for key in keys]
    mixed = []
    for number, query in enumerate(queries):
        products = [rotate(query, last, theta) @ rotate(key[number // group], j, theta) for j, key in enumerate(keys)]
        weights = (torch.stack(products) / math.sqrt(len(query))).softmax(0)
        mixed.append(sum(weight * value[number // group] for weight, value in zip(weights, values, strict=True)))
    residual = normed[last] if getattr(config, "norm_before_residual", False) else hidden[last]
    middle = residual + attention.o_proj.weight @ torch.cat(mixed)
    inner, mlp = scaled(middle, layer.post_attention_layernorm, eps), layer.mlp
    gated = torch.nn.functional.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner)
    hidden = middle + mlp.down_proj.weight @ gated
    return scaled(hidden, head.norm, eps) if getattr(config, "norm_output", False) else hidden


def logits_by_hand(head, hidden):
    """[V], -inf for tokens that the head cannot name."""
    normed = hidden
    if not getattr(head.config, "norm_output", False):
        normed = scaled(hidden, head.norm, head.config.rms_norm_eps)
    own = head.lm_head.weight @ normed
    logits = torch.full((VOCAB,), -math.inf)
    for number, logit in enumerate(own.tolist()):
        logits[number if head.d2t is None else number + head.d2t[number].item()] = logit
    return logits


def states_by_hand(model, tokens, layers):
    """[T, D] entering each layer, and last, from the stock model."""
    output = model.get_decoder()(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return [output.hidden_states[number][0] for number in layers], output.last_hidden_state[0]


# What speculators and SpecForge write today: their defaults, EAGLE-3.1 (arXiv 2605.09992), a layer of Qwen3's.
TODAY = [{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
         {"fc_norm": True, "norm_output": True}, {"qk_norm": True}]


@pytest.mark.parametrize(("named", "options"), [(None, {}), (NAMED, {"norm_before_residual": True}),
                                                *((NAMED, options) for options in TODAY)], ids=str)
@torch.no_grad()
def test_drafted_trees_are_those_of_the_definition(target, named, options):
    head = random_head(named, **options)
    pair = EagleModel.from_parts(target, head)
    cache, draft_cache = pair.target.new_cache(40), head.new_cache(80)
    features = pair.target.prefill(torch.tensor([PROMPT[:-1]]), cache)
    tokens = torch.tensor([PROMPT[1:]])
    tree, logits = draft_tree(head, pair.target, features, tokens, draft_cache,
                              Plan(TreeConfig(12, 3, 3)))
    states, _ = states_by_hand(target, PROMPT[:-1], (2, 4, 5))
    read = list(torch.cat(states, -1))
    for node in range(12):
        path, hidden = tree.ancestors[0, node].nonzero()[1:, 0].tolist(), []
        for depth in range(len(path) + 1):
            tokens = PROMPT[1:] + [tree.tokens[0, n].item() for n in path[:depth]]
            hidden.append(hidden_by_hand(head, read + hidden, tokens))
        if (tree.parents[0] == node)[1:].any():  # an expanded node
            expected = logits_by_hand(head, hidden[-1])[named or ...]
            found = logits[len(path)][0, tree.draft_rows[0, node]]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        if path:
            step = logits_by_hand(head, hidden[-2]).log_softmax(-1)[tree.tokens[0, node]]
            above = tree.scores[0, tree.parents[0, node]]
            torch.testing.assert_close(tree.scores[0, node] - above, step, rtol=1e-4, atol=1e-4)


# What the target hands out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "fused"), [("llama", False), ("llama", True), ("mistral-window", False),
                                               ("gemma2", False)])
@torch.no_grad()
def test_features_are_the_states_that_enter_the_layers(family, fused):
    model = deep_target(family, 3)
    pair = TargetModel(model, fused=fused)
    assert (pair.fused is not None) == fused
    pair.feature_layers = (0, 2)
    states, last = states_by_hand(model, PROMPT, (0, 2))
    features = pair.prefill(torch.tensor([PROMPT]), pair.new_cache(20))[0]
    assert features.shape == (len(PROMPT), pair.feature_size)
    torch.testing.assert_close(features, torch.cat([*states, last], -1))
    torch.testing.assert_close(pair.logits(features), pair.logits(last))
    pair.feature_layers = (2, 3)
    entering, output, last = pair.prefill(torch.tensor([PROMPT]), pair.new_cache(20))[0].chunk(3, -1)
    torch.testing.assert_close(entering, states[1])
    torch.testing.assert_close(model.get_decoder().norm(output), last)


# Lossless decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "named"), [
    ("midlayer", None), ("midlayer", NAMED), ("layers", NAMED), ("speculators", NAMED)])
def test_published_layouts_load_and_decode_losslessly(target, tmp_path, layout, named):
    head = good_head(target, named)
    target.save_pretrained(tmp_path / "target")
    write(tmp_path / "head", head, layout, embeddings=layout != "layers")
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", tree=None)
    assert isinstance(pair.draft, Eagle3Head) and pair.target.feature_layers == (2, 4, 5)
    assert pair.draft.shares_embeddings is (layout == "layers")
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    written = EagleModel.from_parts(target, head)
    output = generate(pair)
    assert output.token_ids == expected and sum(output.stats.accepted_lengths) > 1
    assert output.stats.accepted_lengths == generate(written).stats.accepted_lengths


# Files ------------------------------------------------------------------------------------------------------------


def put(name, value):
    return lambda config, state: state.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("d2t"), "no d2t, which maps its 21 tokens to the target's 32"),
        (put("d2t", torch.zeros(20, dtype=torch.long)), r"d2t must be integers \[21\], got torch.int64 \[20\]"),
        (put("d2t", torch.full((21,), 12)), "d2t must be the offsets of 21 distinct tokens among 32"),
        (configure(draft_vocab_size=33), "draft_vocab_size 33 exceeds vocab_size 32"),
        (configure(norm_before_fc=True), r"missing \['input_norm.weight'\]"),
        (configure(eagle_config={"norm_before_fc": True}, use_aux_norm=True), "norm_before_fc and fc_norm exclude"),
        (configure(layer_types=["sliding_attention"]), "sliding_window of .*an int, got None"),
        (configure(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state false; accepted: heads that"),
        (configure(model_type="llama4_text", architectures=["EagleLlama4ForCausalLM"]),
         "layer of type 'llama4_text'; accepted: llama"),
        (configure(speculators_model_type="medusa"), "speculators_model_type 'medusa'; accepted: eagle, eagle3"),
        (configure(speculators_model_type="eagle3"), "eagle3, but no transformer_layer_config"),
        (configure(speculators_model_type="eagle3", transformer_layer_config={}), "has no norm_before_residual"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    folder = write(tmp_path, random_head(NAMED), "midlayer")
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load_head(folder)


@pytest.mark.parametrize(("change", "message"), [
    (configure(speculators_model_type="peagle"), "is of P-EAGLE .*, a parallel drafter: .*; accepted: EAGLE-1/2 and"),
    (configure(architectures=["PEagleDraftModel"]), "P-EAGLE"), (configure(parallel_drafting=True), "P-EAGLE"),
    (configure(eagle_config={"parallel_drafting": True}), "P-EAGLE"), (put("mask_hidden", torch.zeros(48)), "P-EAGLE"),
    (configure(architectures=["DFlashDraftModel"]), "DFlash, a block-diffusion drafter"),
    (configure(dflash_config={}), "DFlash, a block"), (configure(speculators_model_type="dflash2"), "DFlash, a block"),
    (configure(architectures=["DSparkDraftModel"], dflash_config={}), "DSpark, a DFlash drafter whose .* Markov head"),
    (configure(speculators_model_type="dspark", markov_rank=256), "DSpark"),
    (configure(architectures=["DominoDraftModel"]), "Domino"), (configure(speculators_model_type="mtp"), "MTP"),
])
def test_drafters_of_another_kind_are_named(tmp_path, change, message):
    rewrite(write(tmp_path, random_head(NAMED), "midlayer"), change)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


def as_modelopt(config, state):
    config["eagle_config"] = {"norm_before_fc": config.pop("norm_before_fc")}


def as_tensorrt(config, state):
    as_modelopt(config, state)
    config["eagle_config"]["return_hidden_post_norm"] = config.pop("norm_output")


def as_sglang(config, state):
    config["use_aux_norm"] = config.pop("fc_norm")
    for number, name in enumerate(("low", "mid", "high")):
        state[f"aux_norm_{name}.weight"] = state.pop(f"fc_norm.{number}.weight")


@pytest.mark.parametrize(("layout", "options", "change"), [
    *(("speculators", options, lambda config, state: None) for options in TODAY),
    ("layers", TODAY[0], as_modelopt), ("layers", TODAY[0], as_tensorrt), ("midlayer", TODAY[1], as_sglang),
    ("midlayer", TODAY[0], lambda config, state: config.pop("norm_before_fc")),  # the weights say it
])
@torch.no_grad()
def test_heads_of_today_compute_what_their_code_defines(tmp_path, layout, options, change):
    head = random_head(NAMED, **options)
    rewrite(write(tmp_path / "head", head, layout), change)
    save_head(load_head(tmp_path / "head"), tmp_path / "again")
    features = torch.randn(4, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = hidden_by_hand(head, list(features), PROMPT[:4])
    for folder in ("head", "again"):
        loaded = load_head(tmp_path / folder)
        states = loaded(loaded.to_states(features)[None], torch.tensor([PROMPT[:4]]), torch.arange(4)[None])[0, -1]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded.own_logits(states, None), logits_by_hand(head, expected)[NAMED],
                                   rtol=1e-4, atol=1e-4)
        for name, value in options.items():
            assert getattr(loaded.config, name) is value
    assert inspect_head(tmp_path / "head").facts["variant"].split(", ") == sorted(options, key=[
        "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "qk_norm"].index)


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
def test_the_two_meanings_of_norm_output_are_named(tmp_path, layout, caplog):
    """SpecForge's changed in September 2026, and nothing in the files of such a head tells when it was trained."""
    load_head(write(tmp_path, random_head(NAMED, norm_output=True), layout))
    assert ("SpecForge before September 2026 wrote it" in caplog.text) == (layout == "midlayer")


@pytest.mark.parametrize(("layout", "changes", "trained", "used"), [
    ("midlayer", {"norm_output": False}, False, False),
    ("midlayer", {"norm_output": False, "use_last_layernorm": True}, False, True),
    ("midlayer", {"norm_output": False}, True, True),
    ("midlayer", {"norm_output": False, "use_last_layernorm": False}, True, False),
    ("midlayer", {}, False, True),
    ("layers", {"eagle_config": {"use_last_layernorm": False}}, True, False),
    ("speculators", {"norm_output": False}, False, True),
])
@torch.no_grad()
def test_heads_without_a_norm_before_the_output_layer(tmp_path, layout, changes, trained, used, caplog):
    """SpecForge before September 2026 trained heads with norm_output false so: the norm's weights stayed the same."""
    head = random_head(NAMED)
    if not trained:
        head.norm.weight.fill_(1)
    write(tmp_path / "head", head, layout, **changes)
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    loaded = load_head(tmp_path / "head")
    assert ("norm.weight was never trained" in caplog.text) == ("use_last_layernorm" not in str(changes) and not used)
    save_head(loaded, tmp_path / "again")
    for each in (loaded, load_head(tmp_path / "again")):
        expected = head.lm_head(head.norm(states) if used else states)
        torch.testing.assert_close(each.own_logits(states, None), expected)
    assert ("no norm before its output layer" in inspect_head(tmp_path / "again").facts["variant"]) == (not used)
    if not used:
        with pytest.raises(ValueError, match="has no norm before its output layer: vllm does not compute such"):
            export_head(tmp_path / "head", "vllm", tmp_path / "vllm")
        assert "llama.cpp always computes one" in unsupported(loaded)


def as_nemo(config, state):
    for name in [name for name in state if name not in ("lm_head.weight", "d2t", "t2d")]:
        state["model." + name.replace("midlayer.", "layers.0.")] = state.pop(name)


def of_the_verifier(config, state):
    state |= {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.ones(VOCAB, HIDDEN)}


@pytest.mark.parametrize("change", [
    configure(num_hidden_layers=40), configure(num_hidden_layers=36, layer_types=["full_attention"] * 36), as_nemo,
    configure(attention_bias=True, qkv_bias=True, mlp_bias=True), of_the_verifier,
    lambda config, state: config.pop("draft_vocab_size"),
], ids=["Vicuna-13B", "Qwen3", "model.", "biases", "verifier", "no draft_vocab_size"])
def test_the_weights_say_what_a_head_is(tmp_path, change, caplog):
    head = random_head(NAMED)
    rewrite(write(tmp_path, head, "midlayer"), change)
    with caplog.at_level("INFO"):
        loaded = load_head(tmp_path)
    assert "does not list the target layers that the head reads: using 2, n/2 and n-3 of n" in caplog.text
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize("fields", [
    {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}, "rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 1, 0], "rope_theta": 1e6}},
], ids=str)
def test_mrope_is_the_default_for_text(tmp_path, fields):
    head = load_head(write(tmp_path, random_head(NAMED), "midlayer", **fields))
    expected = random_head(NAMED, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert torch.equal(head.rotary_emb.inv_freq, expected.rotary_emb.inv_freq) and head.fused is not None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_the_architecture_says_whose_layer_it_is(target, tmp_path, architecture):
    """SpecForge's config for Phi-4-mini has the model_type phi3, but its layer is Llama's."""
    head = good_head(target, NAMED)
    loaded = load_head(write(tmp_path, head, "midlayer", model_type="phi3", architectures=[architecture]))
    lengths = [generate(EagleModel.from_parts(target, each)).stats.accepted_lengths for each in (head, loaded)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("names", ["qkv", "qkvo"])
def test_biases_are_found_where_no_config_says_so(target, tmp_path, names):
    head = good_head(target, NAMED, attention_bias=names == "qkvo", qkv_bias=names == "qkv")
    for name in names:
        torch.nn.init.normal_(head.layers[0].self_attn.get_submodule(f"{name}_proj").bias, std=0.1)
    loaded = load_head(write(tmp_path / "head", head, "layers"))
    lengths = [generate(EagleModel.from_parts(target, each)).stats.accepted_lengths for each in (head, loaded)]
    assert lengths[0] == lengths[1] and loaded.state_dict().keys() == head.state_dict().keys()
    save_head(loaded, tmp_path / "again")
    export_head(tmp_path / "again", "vllm", tmp_path / "vllm")
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["attention_bias"] is (names == "qkvo")
    assert load_head(tmp_path / "vllm").state_dict().keys() == head.state_dict().keys()


@pytest.mark.parametrize("fields", [
    {"draft_vocab_size": VOCAB}, {"draft_vocab_size": None}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("embeddings", [True, False])
def test_without_an_output_layer_the_targets_serves(target, tmp_path, fields, embeddings):
    """A tied head's embeddings are its output layer, where it has them."""
    head = good_head(target)
    if fields.get("tie_word_embeddings") and embeddings:
        head.lm_head.weight.data = head.embed_tokens.weight.data / 4
        head.embed_tokens.weight.data /= 4
    folder = write(tmp_path / "head", head, "midlayer", embeddings=embeddings, **fields)
    rewrite(folder, drop("lm_head.weight"))
    target.save_pretrained(tmp_path / "target")
    pair = eagle_fsd.load(tmp_path / "target", folder, device="cpu", tree=None)
    output, own = generate(pair), generate(EagleModel.from_parts(target, head))
    assert output.token_ids == own.token_ids
    assert output.stats.accepted_lengths == own.stats.accepted_lengths and sum(own.stats.accepted_lengths) > 1
    save_head(pair.draft, tmp_path / "again")
    assert load_head(tmp_path / "again").state_dict().keys() == load_head(folder).state_dict().keys()
    for size, named in ((16, NAMED), (32, None)):  # rows of the target's output layer, or one of another width
        other = write(tmp_path / str(size), random_head(named, target_hidden_size=size), "midlayer")
        rewrite(other, drop("lm_head.weight"))
        with pytest.raises(ValueError, match="missing .*lm_head.weight"):
            load_head(other)


def test_a_whole_vocabulary_needs_no_d2t_and_takes_no_offsets(tmp_path):
    folder = write(tmp_path, random_head(), "layers")
    assert "d2t" not in load_file(folder / "model.safetensors") and load_head(folder).d2t is None
    rewrite(folder, put("d2t", torch.ones(VOCAB, dtype=torch.long)))
    with pytest.raises(ValueError, match="offsets in d2t, although its draft vocabulary is the whole one"):
        load_head(folder)


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
def test_layers_are_read_from_where_they_are_named(target, tmp_path, layout):
    named = load_head(write(tmp_path / "a", random_head(eagle_aux_hidden_state_layer_ids=[0, 3, 7]), layout))
    assert named.target_layers(LAYERS) == (0, 3, 7)
    by_output = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    assert load_head(write(tmp_path / "b", random_head(), "layers", **by_output)).target_layers(LAYERS) == (2, 4, 5)
    four = load_head(write(tmp_path / "c", random_head(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5]), layout))
    assert EagleModel.from_parts(target, four).target.feature_size == 5 * HIDDEN
    with pytest.raises(ValueError, match=r"from 0 to 6, the output of the target's last, got \(0, 3, 7\)"):
        named.target_layers(6)


@pytest.mark.parametrize(("layout", "own", "changes"), [
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}, {}),
    ("layers", {}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS - 1]}})])
def test_the_output_of_the_last_layer_can_be_read(target, tmp_path, layout, own, changes):
    """Layer n of speculators, n - 1 of ModelOpt."""
    head = load_head(write(tmp_path, good_head(target, **own), layout, **changes))
    pair = EagleModel.from_parts(target, head)
    assert pair.target.feature_layers == (2, 4, LAYERS)
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    output = generate(pair)
    assert output.token_ids == expected and sum(output.stats.accepted_lengths) > 1


def test_a_head_of_its_own_size_reads_a_wider_target(tmp_path):
    model = deep_target(hidden_size=32)
    head = load_head(write(tmp_path, random_head(NAMED, target_hidden_size=32), "midlayer"))
    output = generate(EagleModel.from_parts(model, head))
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :]
    assert output.token_ids == expected.tolist()
    head.share_embeddings(None)
    with pytest.raises(ValueError, match="no embeddings, and the target's are of size 32, not 16"):
        EagleModel.from_parts(model, head)


@pytest.mark.parametrize(("named", "options"), [
    (None, {}), (NAMED, {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 6]})])
def test_saved_heads_load_again(tmp_path, named, options):
    head = random_head(named, **options)
    save_head(head, tmp_path, dtype=torch.bfloat16)
    config, state = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert "midlayer.hidden_norm.weight" in state and config["architectures"] == ["LlamaForCausalLMEagle3"]
    if named is not None:
        assert state["d2t"].dtype == torch.long and state["t2d"].nonzero()[:, 0].tolist() == named
    if options:
        assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}
    loaded = load_head(tmp_path)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, head.state_dict()[name], rtol=1e-2, atol=1e-2)
    assert loaded.target_layers(LAYERS) == head.target_layers(LAYERS)
    assert getattr(loaded.config, "norm_before_residual", False) is bool(options)


def test_inspect_says_what_it_is(target, tmp_path):
    write(tmp_path / "head", random_head(NAMED), "midlayer")
    target.save_pretrained(tmp_path / "target")
    found = inspect_head(tmp_path / "head", tmp_path / "target")
    assert found.facts["kind"].startswith("EAGLE-3") and "layers 2, n/2, n-3" in found.facts["reads"]
    assert found.facts["draft vocabulary"] == "21 of them" and found.target_problems == []
    assert found.facts["output layer"] == "its own"
    tiny_target().save_pretrained(tmp_path / "shallow")
    (problem,) = inspect_head(tmp_path / "head", tmp_path / "shallow").target_problems
    assert "from 0 to 2, the output of the target's last" in problem


@pytest.mark.parametrize(("to", "file"), [("eagle", "pytorch_model.bin"), ("sglang", "model.safetensors"),
                                          ("vllm", "model.safetensors")])
def test_heads_are_exported_in_the_layout_of_their_authors(tmp_path, to, file):
    """As read here, too; no program gets a variant that it does not compute."""
    write(tmp_path / "head", random_head(NAMED), "speculators", embeddings=False)
    before = inspect_head(tmp_path / "head").server_problems[to]
    assert (to == "vllm") == (before == []) and (to == "vllm" or "would ignore layers.0.*" in before[0])
    path = export_head(tmp_path / "head", to, tmp_path / "out", dtype=torch.float32)
    assert path == tmp_path / "out" / file and inspect_head(tmp_path / "out").server_problems[to] == []
    state = load_file(path) if file.endswith("safetensors") else torch.load(path, weights_only=True)
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d", "lm_head.weight"} < state.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "target_hidden_size" not in config
    ours, back = load_head(tmp_path / "head").state_dict(), load_head(tmp_path / "out").state_dict()
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)


@pytest.mark.parametrize(("options", "trait", "supported"), [
    ({"norm_before_residual": True}, "norm_before_residual", {"vllm"}), ({"fc_norm": True}, "fc_norm", {"vllm"}),
    ({"qk_norm": True}, "qk_norm", {"vllm"}), ({"qkv_bias": True}, "biases of q, k and v", {"vllm"}),
    ({"use_last_layernorm": False}, "no norm before its output layer", set()),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "target layers other than 2, n/2 and n-3", {"vllm", "sglang"}),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, None, {"vllm", "sglang", "eagle"}),
])
def test_what_a_program_does_not_compute_is_refused_and_said(tmp_path, options, trait, supported):
    save_head(random_head(NAMED, **options), tmp_path / "head")
    found = inspect_head(tmp_path / "head")
    assert found.facts["variant"] == (trait or "as published by its authors")
    for to in ("eagle", "sglang", "vllm"):
        said = [f"it would not compute {trait}"] if to not in supported else []
        assert [each for each in found.server_problems[to] if "architecture" not in each] == said
        if to in supported:
            export_head(tmp_path / "head", to, tmp_path / to)
        else:
            with pytest.raises(ValueError, match=f"has {trait}: {to} does not compute such heads"):
                export_head(tmp_path / "head", to, tmp_path / to)


def test_threads_read_their_own_features():
    target = TargetModel(deep_target())
    target.feature_layers = (2, 4, 5)
    texts = torch.randint(VOCAB, (2, 1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = [target.features(text) for text in texts]

    def same(number):
        with torch.inference_mode():
            return all(torch.equal(target.features(texts[number]), expected[number]) for _ in range(40))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(same, range(2))) == [True, True]
