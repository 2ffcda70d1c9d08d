"""Lossless decoding of stock models, token by token. V = 32 vocabulary. Every family: test_families.py."""

import pytest
import torch
from tiny import PROMPT, VOCAB, accepted_while_sampling, tiny_pair, tiny_target
from transformers import T5Config, T5ForConditionalGeneration

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel

NEW = 28
SMALL, WIDE, CHAIN = TreeConfig(5, 3, 2), TreeConfig(16, 5, 4), TreeConfig(6, 5, 1)
# Dense, windows, experts, softcaps, sinks, chunks, latent keys, parallel blocks, learned positions.
SHAPES = [("llama", "eager"), ("llama", "sdpa"), ("mistral-window", "sdpa"), ("qwen2-window", "eager"),
          ("mixtral", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("llama4_text", "eager"),
          ("deepseek_v3", "eager"), ("gptj", "eager"), ("opt", "eager")]


def stock_greedy(model, prompt=PROMPT, **options):
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options)
    return output[0, len(prompt) :].tolist()


def generate(pair, prompt=PROMPT, tree=WIDE, acceptance="exact", threshold=0.0, **options):
    return eagle_fsd.generate(
        prompt, pair, max_new_tokens=NEW, tree=tree, acceptance=acceptance, threshold=threshold, **options
    )


@pytest.mark.parametrize(("family", "attention"), SHAPES)
def test_greedy_decoding_equals_the_stock_model(family, attention):
    pair = tiny_pair(family, attention=attention)
    for prompt in (PROMPT, [7]):
        expected = stock_greedy(pair.target.model, prompt)
        for rule, tree in (("fsd", WIDE), ("relaxed", CHAIN), ("lenience", SMALL), ("exact", TreeConfig(4, 1, 3))):
            output = generate(pair, prompt, tree, rule)
            assert output.token_ids == expected
            assert sum(output.stats.accepted_lengths) > 0
    assert generate(EagleModel.from_parts(pair.target.model, None), prompt).token_ids == expected


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


@pytest.mark.parametrize("options", [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.2},
], ids=str)
def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(options):
    for tree in (SMALL, WIDE, CHAIN):
        assert accepted_while_sampling(tiny_pair(), range(3), max_new_tokens=NEW, tree=tree, **options) > 20


def test_learned_positions_end_with_the_last_one():
    """The last trees reach below the last position, which has no embedding beyond it."""
    pair = tiny_pair("opt", max_position_embeddings=len(PROMPT) + NEW)
    output = generate(pair)
    assert output.token_ids == stock_greedy(pair.target.model) and sum(output.stats.accepted_lengths) > 0


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


def test_targets_that_cannot_be_served_are_refused():
    t5 = T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not supported: a decoder-only"):
        EagleModel.from_parts(t5, None)
    scaled = tiny_target()
    forward = scaled.forward

    def doubled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    scaled.forward = doubled
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported: its logits of a tree"):
        EagleModel.from_parts(scaled, None)


def test_what_is_no_part_is_refused():
    target = tiny_target()
    for parts, message in ((("gpt2", None), "target must be a Pre"), ((target, "head"), "draft must be"),
                           ((target, None, "gpt2"), "tokenizer must be")):
        with pytest.raises(TypeError, match=message):
            EagleModel.from_parts(*parts)
