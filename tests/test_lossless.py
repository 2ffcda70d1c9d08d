"""The same tokens whatever drafts them, computes them or stands beside them: targets and heads x ways to ask.

Greedy tokens are those of `model.generate`, sampled ones those of plain decoding with the same seed, fuzzy ones those
of a request alone. V = 32 vocabulary. Every family: test_families.py; processors: test_processors.py.
"""

import functools
import itertools
import threading
from collections import Counter

import pytest
import torch
from test_eagle3 import deep_target, good_head
from test_engine import no_three_after_one
from test_generate import Recorder
from tiny import NAMED, PROMPT, VOCAB, growing_long, small_model, tiny_head, tiny_pair, tiny_target
from transformers import LogitsProcessorList, T5Config, T5ForConditionalGeneration

import eagle_fsd
from eagle_fsd import TextDrafts, TreeConfig
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.target import TargetModel

NEW = 28
LONG = 26  # texts of the matrix begin below it and above it, and some grow past it
TREE, WIDE, CHAIN, DEEP = TreeConfig(12, 4, 3), TreeConfig(16, 5, 4), TreeConfig(6, 5, 1), TreeConfig(4, 1, 3)
REPEATS = [3, 1, 4, 1, 5, 9, 2, 6] * 3  # which drafts can be copied from
PROMPTS = [REPEATS, PROMPT, [5], [7, 7, 2] * 6, [(5 * i + 3) % VOCAB for i in range(21)]]
STOCK = ("repetition_penalty", "min_new_tokens", "eos_token_id", "logits_processor")  # which model.generate has, too


# The matrix: each pair of a target and a head, asked in each way, with each of the options ------------------------


def limited(family):
    target = tiny_target(family)
    head = tiny_head(target)
    head.limit_vocabulary(torch.tensor(NAMED))
    return EagleModel.from_parts(target, head)


def eagle3(named):
    target = deep_target()
    return EagleModel.from_parts(target, good_head(target, named))


def computed_by(forward):
    pair = tiny_pair()
    if forward == "captured":
        pair.captured = CapturedCycles(pair.target, pair.draft)
    else:
        pair.target.use_attention(forward)
    return pair


def drafted_by(family, target="llama", **options):
    target = tiny_target(target)
    return EagleModel.from_parts(target, small_model(target, family, **options))


HEADS = {
    "llama": tiny_pair,
    "no head": lambda: EagleModel.from_parts(tiny_target(), None),
    **{f"reduced vocabulary, {family}": functools.partial(limited, family) for family in ("llama", "gemma2")},
    "EAGLE-3": lambda: eagle3(None),
    "EAGLE-3, reduced": lambda: eagle3(NAMED),
}
TARGETS = {
    **{f"llama, {forward}": functools.partial(computed_by, forward) for forward in ("sdpa", "captured")},
    **{f"{family}, grouped": functools.partial(tiny_pair, family, attention="grouped")
       for family in ("mistral-window", "gpt_oss")},
    # Windows, chunks, latent keys, learned positions; Llama-4 counts positions and goes row by row.
    **{family: functools.partial(tiny_pair, family)
       for family in ("qwen2-window", "llama4_text", "deepseek_v3", "gpt2", "opt")},
    "phi3, growing long": functools.partial(growing_long, "phi3", LONG),
    # Other causal LMs draft: with more rows of padding than the target; with fewer, and windows; with too few positions
    # for the texts.
    "a small llama": functools.partial(drafted_by, "llama", "gemma3_text", vocab_size=40, num_hidden_layers=1),
    "a small mistral": functools.partial(drafted_by, "mistral-window", vocab_size=31),
    "a small gpt2": functools.partial(drafted_by, "gpt2", "qwen2-window", max_position_embeddings=30),
}
GREEDY = [
    {}, {"acceptance": "exact", "tree": CHAIN}, {"acceptance": "relaxed", "tree": DEEP, "text_drafts": "off"},
    {"acceptance": "lenience", "tree": WIDE, "text_drafts": TextDrafts(256, 12)},
    {"repetition_penalty": 1.3}, {"eos_token_id": [2, 4, 9, 17], "min_new_tokens": 5},
    {"logits_processor": LogitsProcessorList([no_three_after_one])},
]
SAMPLED = [
    {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_k": 5, "acceptance": "lenience", "tree": CHAIN},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "text_drafts": "off"},
    {"temperature": 1.0, "acceptance": "exact", "logits_processor": [no_three_after_one],
     "text_drafts": TextDrafts(3, 2)},
]
FUZZY = [
    {"threshold": 0.5}, {"threshold": 0.5, "budget": 0.5, "temperature": 0.8, "seed": 3},
    {"acceptance": "relaxed", "threshold": 1.0, "logits_processor": [no_three_after_one], "budget": 9.0},
    {"threshold": 0.9, "head_guard": None, "fuzzy_within": (PROMPT[-1], 31)},
    {"acceptance": "typical", "threshold": 0.5, "temperature": 0.8},
]
OPTIONS = [{"max_new_tokens": 14, "tree": TREE, "seed": 1} | options for options in (*GREEDY, *SAMPLED, *FUZZY)]


def plainly(pair, prompt, options):
    """The tokens of an answer that nothing drafts: `model.generate`'s, or our own where noise or fuzzy steps matter."""
    if options.get("threshold"):
        return eagle_fsd.generate(prompt, pair, **options).token_ids
    if "temperature" in options:
        plain = EagleModel.from_parts(pair.target.model, None)
        return eagle_fsd.generate(prompt, plain, **{**options, "acceptance": "exact", "text_drafts": "off"}).token_ids
    stock = {name: options[name] for name in STOCK if name in options}
    output = pair.target.model.generate(torch.tensor([prompt]), max_new_tokens=options["max_new_tokens"],
                                        do_sample=False, pad_token_id=0, **stock)
    return output[0, len(prompt) :].tolist()


def alone(pair, asked):
    for prompt, options in asked:
        recorder = Recorder()
        output = eagle_fsd.generate(prompt, pair, streamer=recorder, **options)
        assert recorder.tokens == output.token_ids
        yield output


def in_a_batch(pair, asked):
    for _, rows in itertools.groupby(asked, key=lambda each: id(each[1])):
        prompts, options = zip(*rows, strict=True)
        yield from eagle_fsd.generate([*prompts], pair, **options[0] | {"seed": [options[0]["seed"]] * len(prompts)})


def joining(pair, asked):
    """Requests with other options, three at a time, whose prompts are read in parts and are remembered."""
    with eagle_fsd.Engine(pair, tree=TREE, max_rows=3, prefill_chunk=6, prefixes=2) as engine:
        tickets = [engine.submit(prompt, **options | {"tree": TREE}) for prompt, options in asked]
        for ticket in tickets:
            output = ticket.result()
            assert [token for piece in ticket for token in piece.token_ids] == output.token_ids
            yield output
        assert engine.stats.reused_tokens > 0


def in_a_session(pair, asked):
    """After another answer to the beginning of the prompt; then once more, of which all but the end was read."""
    for prompt, options in asked:
        session = eagle_fsd.Session()
        eagle_fsd.generate(prompt[:9], pair, session=session, max_new_tokens=7, temperature=1.0, tree=TREE, seed=2)
        eagle_fsd.generate(prompt, pair, session=session, max_new_tokens=3, tree=TREE)
        output = eagle_fsd.generate(prompt, pair, session=session, **options)
        assert output.stats.prefill_tokens <= 2
        yield output


def check_counts(output):
    """Who drafted each token, by the receipts and by the counts, which the end of the answer does not cut."""
    stats, at = output.stats, 1
    for length in stats.accepted_lengths:
        drafters = [receipt.drafter for receipt in output.receipts[at : at + length + 1]]
        assert None not in drafters[:length] and drafters[length:] in ([], [None])
        at += length + 1
    counted = Counter(receipt.drafter for receipt in output.receipts if receipt.drafter)
    assert output.receipts[0].drafter is None and stats.accepted.total() == sum(stats.accepted_lengths)
    cut = at - len(output.token_ids)  # the last of which nobody drafted
    assert (stats.accepted - counted).total() == max(0, cut - 1) and counted <= stats.accepted <= stats.proposed
    assert [receipt.token for receipt in output.receipts] == output.token_ids
    assert all(receipt.drafter == "head" for receipt in output.receipts if receipt.source == "fuzzy")


def assert_same(pair, way, asked, expected=None):
    """Tokens of requests are those of plain decoding; returns how many drafts were accepted, by drafter."""
    accepted = Counter()
    for (prompt, options), output in zip(asked, way(pair, asked), strict=True):
        assert output.token_ids == (expected or plainly)(pair, prompt, options)
        check_counts(output)
        accepted += output.stats.accepted
    return accepted


@functools.cache
def prepared(name):
    """A pair, and plain decoding that remembers its answers."""
    known = {}

    def expected(pair, prompt, options):
        key = tuple(prompt), OPTIONS.index(options)
        if key not in known:
            known[key] = plainly(pair, prompt, options)
        return known[key]

    return (HEADS | TARGETS)[name](), expected


@pytest.mark.parametrize("way", [alone, in_a_batch, joining, in_a_session])
@pytest.mark.parametrize("name", [*HEADS, *TARGETS])
def test_tokens_are_those_of_plain_decoding(name, way):
    pair, expected = prepared(name)
    rows = 2 if way is in_a_batch else 1
    asked = [(PROMPTS[(number + row) % len(PROMPTS)], options)
             for number, options in enumerate(OPTIONS if name in HEADS else OPTIONS[::2]) for row in range(rows)]
    accepted = assert_same(pair, way, asked, expected)
    assert (accepted["head"] > 3 or name == "no head") and (accepted["text"] > 5 or name in TARGETS)


# Targets ----------------------------------------------------------------------------------------------------------


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
        cache.commit([len(context)], [kept])
        context += [TOKENS[node] for node in kept]
        assert cache.length == len(context)


def test_learned_positions_end_with_the_last_one():
    """The last trees reach below the last position, which has no embedding beyond it."""
    pair = tiny_pair("opt", max_position_embeddings=len(PROMPT) + NEW)
    for way in (alone, in_a_batch):
        assert assert_same(pair, way, [(PROMPT, {"max_new_tokens": NEW, "tree": WIDE, "seed": 0})])["head"] > 0


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_texts_become_long(family):
    """Where a text becomes long for a longrope, `model.generate` computes all of it anew, and so does this, with the
    answer and all that belongs to it going on. No text uses the keys of a text of the other kind."""
    pair, options = growing_long(family, LONG), {"max_new_tokens": NEW, "tree": WIDE}
    for length in (3, LONG - 4, LONG - 1, LONG, LONG + 1):
        prompt, seen, session = (PROMPT * 3)[:length], [], eagle_fsd.Session()

        def never(ids, scores, seen=seen):
            return bool(seen.append(ids[0].tolist()))

        expected = plainly(pair, prompt, options)
        output = eagle_fsd.generate(prompt, pair, session=session, stopping_criteria=[never], **options)
        assert output.token_ids == expected and output.stats.prefill_tokens == length
        assert seen == [prompt + expected[:end] for end in range(1, NEW + 1)]
        check_counts(output)
        assert sum(output.stats.accepted_lengths) > 10
        for later in (prompt[: length - 2] + [7], prompt + output.token_ids + PROMPT):
            again = eagle_fsd.generate(later, pair, session=session, **options)
            assert again.token_ids == plainly(pair, later, options)
    assert again.stats.prefill_tokens < len(later)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_text_that_has_become_long_waits_for_the_short_ones_beside_it(cancels):
    """In an engine, whose batch has texts of one kind. Then it is the next to go on, unless it was cancelled."""
    pair, read, submitted = growing_long("phi3", LONG), [], threading.Event()

    def criterion(name):
        def watch(ids, scores):
            submitted.wait(30)
            read.append(name)
            if cancels and ids.shape[1] == LONG + 1:
                tickets[name].cancel()
            return False
        return watch

    asked, until = {"long": (REPEATS, NEW), "beside": ([5], 20), "next": (PROMPT, 9)}, LONG + 1 - len(REPEATS)
    with eagle_fsd.Engine(pair, tree=TREE, max_rows=2, prefixes=0) as engine:
        tickets = {name: engine.submit(prompt, max_new_tokens=new, stopping_criteria=[criterion(name)])
                   for name, (prompt, new) in asked.items()}
        submitted.set()
    for name, (prompt, new) in asked.items():
        output, cancelled = tickets[name].result(), cancels and name == "long"
        assert output.token_ids == plainly(pair, prompt, {"max_new_tokens": until if cancelled else new})
        assert output.finish_reason == ("cancelled" if cancelled else "length")
    assert cancels or read[until + 20 :] == ["long"] * (NEW - until) + ["next"] * 9
    assert engine.rows == engine.stats.reused_tokens == 0


def test_a_text_of_a_family_that_mixes_keys_ends_before_it_becomes_long(caplog):
    """There, `model.generate` computes the new keys only as those of a long text."""
    pair, options = growing_long("llama", LONG), {"max_new_tokens": NEW, "tree": WIDE}
    for length in (LONG - 4, LONG, LONG + 1):
        prompt, left = (PROMPT * 3)[:length], LONG + 1 - length or NEW
        for way in (alone, joining):
            for output in way(pair, [(prompt, options)] * 2):
                assert output.token_ids == plainly(pair, prompt, options)[:left] and output.finish_reason == "length"
    assert f"max_new_tokens lowered from {NEW} to the 5 free positions" in caplog.text  # once


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
