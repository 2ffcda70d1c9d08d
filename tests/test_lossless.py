"""Lossless decoding of stock models, token by token. V = 32 vocabulary."""

import pytest
import torch
from tiny import PROMPT, VOCAB, tiny_head, tiny_pair, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, T5Config, T5ForConditionalGeneration

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel

NEW = 28
SMALL, WIDE, CHAIN = TreeConfig(5, 3, 2), TreeConfig(16, 5, 4), TreeConfig(6, 5, 1)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mistral-window", "mixtral")  # all of them: test_families.py
MODELS = [*[(family, attention) for family in FAMILIES for attention in ("eager", "sdpa")], ("gemma2", "eager")]


def stock_greedy(model, prompt=PROMPT, **options):
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options)
    return output[0, len(prompt) :].tolist()


def generate(pair, prompt=PROMPT, tree=WIDE, acceptance="exact", threshold=0.0, **options):
    return eagle_fsd.generate(
        prompt, pair, max_new_tokens=NEW, tree=tree, acceptance=acceptance, threshold=threshold, **options
    )


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_greedy_decoding_equals_the_stock_model(family, attention):
    pair = tiny_pair(family, attention=attention)
    expected = stock_greedy(pair.target.model)
    for tree in (SMALL, WIDE, CHAIN, TreeConfig(4, 1, 3)):
        output = generate(pair, tree=tree)
        assert output.token_ids == expected
        assert sum(output.stats.accepted_lengths) > 0
    for rule in ("fsd", "tilt"):
        assert generate(pair, acceptance=rule).token_ids == expected
    assert generate(EagleModel.from_parts(pair.target.model, None)).token_ids == expected


@pytest.mark.parametrize("prompt", [[7], [7, 20], PROMPT * 3], ids=len)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_short_and_long_prompts(family, prompt):
    pair = tiny_pair(family)
    assert generate(pair, prompt).token_ids == stock_greedy(pair.target.model, prompt)


@pytest.mark.parametrize("window", [3, 8, 20])
def test_sliding_windows_crossed_in_the_prompt_the_tree_and_the_answer(window):
    pair = tiny_pair("mistral", sliding_window=window)
    expected = stock_greedy(pair.target.model)
    assert generate(pair).token_ids == expected
    assert expected != stock_greedy(tiny_target("mistral", sliding_window=None))  # the window matters


def test_windows_of_some_layers():
    layer_types = ["full_attention", "sliding_attention"]
    pair = tiny_pair("qwen2", use_sliding_window=True, sliding_window=6, layer_types=layer_types)
    expected = stock_greedy(pair.target.model)
    assert generate(pair).token_ids == expected
    assert expected != stock_greedy(tiny_target("qwen2"))


#          0                       after 4 committed tokens, of which two are kept rows of an earlier tree
#        /   \
#       1     2
#      / \     \
#     3   4     5
#     |
#     6
PARENTS = [0, 0, 0, 1, 1, 2, 3]
TOKENS = [9, 30, 2, 17, 4, 30, 11]


LEAVES = [4, 5, 6]


@torch.no_grad()
def assert_nodes_are_verified_like_their_paths(model):
    target = TargetModel(model)
    parents = torch.tensor([PARENTS])
    ancestors = ancestors_of(parents, 3)
    depths = ancestors.sum(-1) - 1
    paths = [[j for j in range(7) if ancestors[0, i, j]] for i in range(7)]
    cache = target.new_cache(40)
    target.prefill(torch.tensor([PROMPT]), cache)
    context = list(PROMPT)
    for kept in ([0, 2, 5], [0, 1, 3, 6], [0]):
        features = target.verify(torch.tensor([TOKENS]), depths + len(context), ancestors, cache)
        logits = target.logits(features)
        for leaf in LEAVES:
            path = paths[leaf]
            tokens = context + [TOKENS[node] for node in path]
            expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -len(path) :]
            torch.testing.assert_close(logits[0, path], expected, rtol=1e-4, atol=1e-4)
        cache.commit([len(context)], [[len(context) + node for node in kept]])
        context += [TOKENS[node] for node in kept]
        assert cache.length == len(context)


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_every_node_is_verified_like_its_own_path(family, attention):
    assert_nodes_are_verified_like_their_paths(tiny_target(family, attention=attention))


SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(options):
    pair = tiny_pair()
    plain = EagleModel.from_parts(pair.target.model, None)
    answers, accepted = set(), 0
    for seed in range(4):
        expected = generate(plain, seed=seed, **options)
        for rule, tree in (("exact", SMALL), ("exact", WIDE), ("fsd", WIDE), ("tilt", CHAIN)):
            output = generate(pair, tree=tree, acceptance=rule, seed=seed, **options)
            assert output.token_ids == expected.token_ids
            accepted += sum(output.stats.accepted_lengths)
        answers.add(tuple(expected.token_ids))
    assert len(answers) == 4
    assert accepted > 20


def test_sampled_tokens_follow_the_distribution_of_the_target():
    """The first token comes from the prefill, the second from a tree."""
    pair = tiny_pair()
    seeds, temperature, top_k = 600, 1.5, 3
    counts: dict[tuple, int] = {}
    for seed in range(seeds):
        output = eagle_fsd.generate(
            PROMPT, pair, max_new_tokens=2, temperature=temperature, top_k=top_k, seed=seed, tree=SMALL,
            acceptance="exact",
        )
        counts[tuple(output.token_ids)] = counts.get(tuple(output.token_ids), 0) + 1

    def law(context):
        with torch.no_grad():
            best = pair.target.model(torch.tensor([context])).logits[0, -1].topk(top_k)
        return dict(zip(best.indices.tolist(), (best.values / temperature).softmax(0).tolist(), strict=True))

    expected = {
        (first, second): p * q for first, p in law(PROMPT).items() for second, q in law([*PROMPT, first]).items()
    }
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts.get(pair, 0) - seeds * p) ** 2 / (seeds * p) for pair, p in expected.items())
    assert chi_square < 26.1  # 99.9% quantile at 8 degrees of freedom


def test_learned_positions_end_with_the_last_one():
    """The last trees reach below the last position, which has no embedding beyond it."""
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, init_std=0.3,
        word_embed_proj_dim=16, max_position_embeddings=len(PROMPT) + NEW, eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    output = generate(EagleModel.from_parts(model, tiny_head(model)))
    assert output.token_ids == stock_greedy(model)
    assert sum(output.stats.accepted_lengths) > 0


def tiny_t5():
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def test_models_with_an_encoder_are_refused():
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not supported: a decoder-only"):
        EagleModel.from_parts(tiny_t5(), None)


def test_texts_stay_on_their_side_of_a_change_of_rotary_frequencies():
    """Where a text becomes long, `model.generate` computes all of it anew; ours ends there."""
    short = len(PROMPT) + 10
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [4.0, 5.0],
            "original_max_position_embeddings": short}
    pair = tiny_pair("phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=short)
    output = generate(pair)
    assert len(output.token_ids) == 10 and sum(output.stats.accepted_lengths) > 0
    assert output.token_ids == stock_greedy(pair.target.model)[:10]
    assert generate(pair, PROMPT * 3).token_ids == stock_greedy(pair.target.model, PROMPT * 3)


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_attention_without_arbitrary_masks_is_refused(attention):
    model = tiny_target()
    model.config._attn_implementation = attention
    with pytest.raises(ValueError, match=f"{attention}.*accepted: sdpa, eager"):
        EagleModel.from_parts(model, None)


def test_a_target_whose_logits_are_scaled_beyond_its_head_is_refused():
    model = tiny_target()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported: its logits"):
        EagleModel.from_parts(model, None)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"hidden_size": 32}, "hidden size is 16.* 32"), ({"vocab_size": 40}, "vocabulary size is 32.* 40")],
)
def test_a_head_of_another_target_is_refused(option, message):
    head = tiny_head(tiny_target())
    other = AutoModelForCausalLM.from_config(LlamaConfig(**tiny_target().config.to_dict() | option))
    with pytest.raises(ValueError, match=message):
        EagleModel.from_parts(other, head)
