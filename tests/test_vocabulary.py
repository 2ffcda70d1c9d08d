"""Reduced draft vocabularies of EAGLE-1/2 heads: what is drafted, decoded, stored and counted.

V = 32 vocabulary, R = 21 draft vocabulary, D = 16 hidden size.
"""

import copy
import errno
import json
import math
import os
import shutil

import numpy as np
import pytest
import reference_eagle
import torch
from reference_acceptance import Reference
from test_drafting import assert_same_tree
from tiny import (
    HIDDEN,
    PROMPT,
    VOCAB,
    accepted_while_sampling,
    judged,
    save_pair,
    tiny_head,
    tiny_target,
    tiny_tokenizer,
)

import eagle_fsd
from eagle_fsd import RULES, TreeConfig, load_head, make_rule, save_head
from eagle_fsd.acceptance import walk
from eagle_fsd.cli import main
from eagle_fsd.data.documents import Documents
from eagle_fsd.drafting.growth import draft_tree
from eagle_fsd.heads.export import export_head
from eagle_fsd.heads.inspection import inspect_head
from eagle_fsd.heads.token_map import TOKEN_MAP
from eagle_fsd.heads.vocabulary import BLOCK, TokenCounts, count_tokens
from eagle_fsd.models.placement import weights_digest
from eagle_fsd.pair import EagleModel

NAMED = [1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 14, 17, 19, 20, 22, 23, 24, 26, 28, 30, 31]
OUTSIDE = sorted({*range(VOCAB)} - {*NAMED})
WIDE, CHAIN = TreeConfig(16, 5, 4), TreeConfig(6, 5, 1)
NEW = 16


def limited(family: str = "llama", tokens=NAMED, **options) -> EagleModel:
    """A tiny pair whose head names these tokens only."""
    target = tiny_target(family, **options)
    head = tiny_head(target)
    head.limit_vocabulary(None if tokens is None else torch.tensor(tokens))
    return EagleModel.from_parts(target, head)


def generate(pair, **options):
    options = {"max_new_tokens": NEW, "tree": WIDE, "acceptance": "exact"} | options
    return eagle_fsd.generate(PROMPT, pair, **options)


def stock(target):
    return target.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()


# What is drafted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi", "gptj", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_own_logits_are_the_targets_own_for_these_tokens(family, tied):
    """Output layers with a bias (phi, gptj), a scale (granite, cohere) and a softcap (gemma2)."""
    pair = limited(family, tie_word_embeddings=tied)
    bias = pair.target.lm_head.bias
    if bias is not None:
        bias.normal_()
        pair.draft.limit_vocabulary(torch.tensor(NAMED))
        pair = EagleModel.from_parts(pair.target.model, pair.draft)
    predicted = torch.randn(2, 3, HIDDEN)
    whole = pair.target.logits(predicted)
    assert pair.draft.output_rows.layer.weight.shape == (len(NAMED), HIDDEN)
    torch.testing.assert_close(pair.draft.own_logits(predicted, refuse), whole[..., NAMED])
    wide = pair.draft.logits(predicted, refuse)
    torch.testing.assert_close(wide[..., NAMED], whole[..., NAMED])
    assert wide[..., OUTSIDE].eq(-math.inf).all()
    pair.draft.limit_vocabulary(torch.tensor(NAMED))  # not joined with a target: the whole layer is computed
    torch.testing.assert_close(pair.draft.logits(predicted, pair.target.logits), wide)


def refuse(predicted):
    raise AssertionError("the whole output layer was computed")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("shape", [(16, 5, 4), (60, 4, 10), (12, 6, 1)], ids=str)
@torch.no_grad()
def test_drafted_trees_are_those_of_a_target_that_never_names_the_others(family, shape):
    config, pair = TreeConfig(*shape), limited(family)
    features = reference_eagle.forward(pair.target.model, PROMPT[:-1])[0]
    cache = pair.draft.new_cache(len(PROMPT) + config.depth * config.top_k)
    tree, logits = draft_tree(pair.draft, pair.target, features[None], torch.tensor([PROMPT[1:]]), cache, config)
    assert logits.shape[-1] == len(NAMED)
    logits = pair.draft.widen(logits)
    silenced = copy.deepcopy(pair.target.model)
    silenced.get_output_embeddings().weight[OUTSIDE] = 0
    bias = torch.zeros(VOCAB).index_fill(0, torch.tensor(OUTSIDE), -math.inf)
    if family == "gemma2":  # its cap would bring them back, so -inf comes behind the cap
        capped = reference_eagle.softcapped
        reference_eagle.softcapped = lambda model, logits: capped(model, logits) + bias
    else:
        silenced.get_output_embeddings().bias = torch.nn.Parameter(bias)
    try:
        reference = reference_eagle.draft(pair.draft, silenced, list(features), PROMPT[1:], config)
    finally:
        if family == "gemma2":
            reference_eagle.softcapped = capped
    assert_same_tree(tree, logits, reference, config)
    assert not set(OUTSIDE) & set(tree.tokens[0, 1:].tolist())


def test_narrow_widen_and_named_are_by_token():
    head = limited(tokens=NAMED[::-1]).draft
    assert head.draft_vocab_size == 21 and head.target_tokens.tolist() == NAMED
    values = torch.randn(2, VOCAB)
    assert head.narrow(values).tolist() == [[row[token] for token in NAMED] for row in values.tolist()]
    wide = head.widen(head.narrow(values))
    assert torch.equal(wide[:, NAMED], values[:, NAMED]) and wide[:, OUTSIDE].eq(-math.inf).all()
    assert head.named(torch.tensor([[0, 20], [3, 3]])).tolist() == [[1, 31], [5, 5]]
    head.limit_vocabulary(None)
    assert head.draft_vocab_size == VOCAB and head.widen(values) is values and head.narrow(values) is values
    head.limit_vocabulary(torch.arange(VOCAB))  # all of them are no limit
    assert head.token_map is None


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2], TypeError, "a tensor of integers, got list"),
        (torch.tensor([1.0]), TypeError, "got torch.float32"),
        (torch.tensor([True]), TypeError, "got torch.bool"),
        (torch.tensor([], dtype=torch.long), ValueError, "got 0 different ones"),
        (torch.tensor([[1], [2]]), ValueError, r"2 different ones in \[2, 1\]"),
        (torch.tensor([1, 2, 1]), ValueError, r"2 different ones in \[3\]"),
        (torch.tensor([1, 32]), ValueError, "draft token 32 is none of the target's, which are 0 to 31"),
        (torch.tensor([-1, 2]), ValueError, "draft token -1"),
    ],
    ids=str,
)
def test_bad_vocabularies_are_refused(tokens, error, message):
    head = limited().draft
    with pytest.raises(error, match=message):
        head.limit_vocabulary(tokens)
    assert head.target_tokens.tolist() == NAMED


# Joining head and target ------------------------------------------------------------------------------------------


def test_rows_are_copied_once_per_target():
    pair = limited()
    rows = pair.draft.output_rows
    assert EagleModel.from_parts(pair.target.model, pair.draft).draft.output_rows is rows
    other = EagleModel.from_parts(tiny_target(seed=1), pair.draft)
    assert pair.draft.output_rows is not rows and pair.draft.output_rows.belong_to(other.target.lm_head.weight)
    other.target.model.bfloat16()
    half = EagleModel.from_parts(other.target.model, pair.draft)
    assert half.draft.output_rows.layer.weight.dtype == torch.bfloat16


class Adapted(torch.nn.Linear):
    """An output layer whose weight is not all that it computes, as with LoRA."""

    def forward(self, features):
        return super().forward(features) + features.sum(-1, keepdim=True) * torch.arange(self.out_features)


class Packed(torch.nn.Parameter):
    """A weight whose rows are not tokens, as with quantised ones."""


@pytest.mark.parametrize("kind", ["adapted", "packed"])
def test_an_output_layer_without_plain_rows_is_computed_whole(kind, caplog):
    target = tiny_target()
    if kind == "adapted":
        layer = Adapted(HIDDEN, VOCAB, bias=False)
        layer.weight = target.lm_head.weight
        target.lm_head = layer
    else:
        target.lm_head.weight = Packed(target.lm_head.weight.data)
    head = tiny_head(target)
    head.limit_vocabulary(torch.tensor(NAMED))
    pair = EagleModel.from_parts(target, head)
    assert head.output_rows is None and "no plain rows to take" in caplog.text
    output = generate(pair)
    assert output.token_ids == stock(target)
    drafted = [t for t, r in zip(output.token_ids, output.receipts, strict=True) if r.source != "target"]
    assert set(drafted) <= set(NAMED)


def test_heads_of_other_vocabularies_have_other_digests():
    """By which calibrations and latencies are known."""
    digests = {weights_digest(limited(tokens=tokens).draft) for tokens in (None, NAMED, NAMED[:-1], [0, *NAMED[1:]])}
    assert len(digests) == 4


# Decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "granite", "phi"])
def test_greedy_decoding_stays_the_targets_own(family):
    pair = limited(family)
    expected, accepted = stock(pair.target.model), 0
    for tree in (WIDE, CHAIN, TreeConfig(4, 1, 3)):
        output = generate(pair, tree=tree)
        assert output.token_ids == expected
        accepted += sum(output.stats.accepted_lengths)
    assert accepted > 0
    assert generate(pair, acceptance="fsd", threshold=0.0).token_ids == expected


def test_a_vocabulary_that_names_nothing_right_costs_acceptance_only():
    whole = generate(limited(tokens=None))
    wrong = sorted({*range(VOCAB)} - {*whole.token_ids})
    output = generate(limited(tokens=wrong))
    assert output.token_ids == whole.token_ids and sum(whole.stats.accepted_lengths) > 0
    assert sum(output.stats.accepted_lengths) == 0


def test_sampling_draws_what_plain_decoding_draws_with_the_same_seed():
    assert accepted_while_sampling(limited(), range(3), max_new_tokens=NEW, tree=WIDE) > 12


@pytest.mark.parametrize("rule", ["exact", "fsd"])
def test_batches_decode_as_single_prompts_do(rule):
    pair, prompts = limited(), [PROMPT, PROMPT[:4], PROMPT[3:]]
    options = {"max_new_tokens": NEW, "tree": WIDE, "acceptance": rule, "threshold": 0.5 if rule == "fsd" else None}
    together = eagle_fsd.generate(prompts, pair, **options)
    for prompt, output in zip(prompts, together, strict=True):
        alone = eagle_fsd.generate(prompt, pair, **options)
        assert output.token_ids == alone.token_ids
        assert output.stats.accepted_lengths == alone.stats.accepted_lengths


def test_inside_the_targets_own_generate():
    pair = limited()
    tokens = pair.target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, custom_generate=eagle_fsd.custom_generate,
        draft=pair.draft,
    )
    assert tokens[0, len(PROMPT) :].tolist() == stock(pair.target.model)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in RULES if name != "exact"])
def test_fuzzy_rules_decide_as_the_slow_reference_does(name, temperature):
    """Where the draft's probability of a token is 0, at every node of every cycle."""
    pair, rule, cycles = limited(), make_rule(name, threshold=0.5, **judged(name)), 0

    def checked(verification):
        nonlocal cycles
        assert verification.draft_logits[..., OUTSIDE].eq(-math.inf).all()
        decision = rule(verification)
        walked, reference = walk(verification, decision), Reference(rule, verification, 0)
        path, token = reference.walk()
        assert walked.accepted[0].nonzero()[:, 0].tolist() == path and walked.choice[0, walked.last[0]] == token
        if decision.divergence is not None:
            nodes = range(verification.tree.tokens.shape[1])
            expected = [reference.node_divergence(v) if reference.children(v) else math.nan for v in nodes]
            torch.testing.assert_close(decision.divergence[0], torch.tensor(expected), equal_nan=True, rtol=1e-4,
                                       atol=1e-6)
        cycles += 1
        return decision

    output = generate(pair, acceptance=checked, temperature=temperature, seed=1)
    assert cycles and len(output.token_ids) == NEW
    drafted = [t for t, r in zip(output.token_ids, output.receipts, strict=True) if r.source != "target"]
    assert drafted and set(drafted) <= set(NAMED)


def test_an_infinite_divergence_and_a_tree_that_is_too_wide_are_said(caplog):
    output = generate(limited(), acceptance="fsd", threshold=0.5, divergence="kl")
    assert not any(receipt.source == "fuzzy" for receipt in output.receipts)
    assert "kl is infinite with a draft that names 21 of 32 tokens" in caplog.text
    with pytest.raises(ValueError, match="top_k 22 exceeds the draft's vocabulary .21 tokens"):
        generate(limited(), tree=TreeConfig(24, 2, 22))


# Files ------------------------------------------------------------------------------------------------------------


def test_saved_heads_keep_their_vocabulary(tmp_path):
    pair = limited()
    save_head(pair.draft, tmp_path / "head")
    assert torch.load(tmp_path / "head" / TOKEN_MAP, weights_only=True) == NAMED  # what SGLang reads
    pair.target.model.save_pretrained(tmp_path / "target")
    loaded = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    assert loaded.draft.target_tokens.tolist() == NAMED
    assert loaded.draft.output_rows.belong_to(loaded.target.lm_head.weight)
    assert generate(loaded).stats.accepted_lengths == generate(pair).stats.accepted_lengths
    pair.draft.limit_vocabulary(None)
    save_head(pair.draft, tmp_path / "head")
    assert not (tmp_path / "head" / TOKEN_MAP).exists() and load_head(tmp_path / "head").token_map is None


@pytest.mark.parametrize("held", [NAMED[::-1], torch.tensor(NAMED, dtype=torch.int32)], ids=["list", "tensor"])
def test_token_maps_of_others_are_read_in_any_order(tmp_path, held):
    save_head(limited(tokens=None).draft, tmp_path)
    torch.save(held, tmp_path / TOKEN_MAP)
    assert load_head(tmp_path).target_tokens.tolist() == NAMED


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "token_map.pt cannot be read"),
        (lambda path: path.write_text("1 2 3"), "token_map.pt was refused"),
        (lambda path: torch.save(["a"], path), "no list of token ids"),
        (lambda path: torch.save({"tokens": [1]}, path), "no list of token ids"),
        (lambda path: torch.save([1.5], path), "no list of token ids but torch.float32"),
        (lambda path: torch.save([[1], [1, 2]], path), "no list of token ids"),
        (lambda path: torch.save([], path), "token_map.pt cannot be used"),
        (lambda path: torch.save([1, 1], path), "token_map.pt cannot be used: .* 1 different ones"),
        (lambda path: torch.save([2**70], path), "no list of token ids"),
        (lambda path: torch.save([VOCAB], path), "draft token 32 is none of the target's"),
    ],
)
def test_damaged_token_maps_are_refused(tmp_path, write, message):
    save_head(limited(tokens=None).draft, tmp_path)
    write(tmp_path / TOKEN_MAP)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_head(tmp_path)


def test_export_gives_it_to_those_who_can_use_it(tmp_path, capsys, caplog):
    save_pair(tmp_path, limited_with_tokenizer())
    head, target = tmp_path / "head", tmp_path / "target"
    assert inspect_head(head).facts["draft vocabulary"].startswith(f"21 of them, in {TOKEN_MAP}")
    assert main(["export", str(head), "--to", "sglang", "--out", str(tmp_path / "sglang")]) == 0
    assert f"--speculative-token-map {tmp_path / 'sglang' / TOKEN_MAP}" in capsys.readouterr().out
    assert load_head(tmp_path / "sglang").target_tokens.tolist() == NAMED and not caplog.records
    for to in ("vllm", "eagle"):
        export_head(head, to, tmp_path / to, target=target)
        assert not (tmp_path / to / TOKEN_MAP).exists() and f"{to} drafts all 32 tokens" in caplog.text
    assert inspect_head(tmp_path / "vllm").facts["draft vocabulary"] == "all of them"


def limited_with_tokenizer() -> EagleModel:
    pair = limited()
    pair.tokenizer = tiny_tokenizer()
    return pair


# Counting ---------------------------------------------------------------------------------------------------------


def counts(counted, kept_back, special=()):
    return TokenCounts(np.array(counted), np.array(kept_back), special)


def test_ranks_coverage_and_sizes_by_hand():
    found = counts([5, 0, 9, 1, 0], [1, 0, 2, 0, 5], special=(3,))
    assert found.ranked(found.counted).tolist() == [3, 2, 0, 1, 4]
    assert found.coverage().tolist() == [0, 2 / 8, 3 / 8, 3 / 8, 1]
    assert found.commonest(3).tolist() == [0, 2, 3]  # of all: 6, 0, 11, 1, 5, and token 3 is special
    assert [found.size_for(share) for share in (0.1, 0.25, 0.3, 3 / 8, 0.4, 1)] == [2, 2, 3, 3, 5, 5]
    assert counts([3, 1], [0, 0]).coverage().tolist() == [0.75, 1]  # nothing kept back
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"must have 1 to 5 tokens, got {size}"):
            found.commonest(size)
    for share in (0, 1.1, math.nan):
        with pytest.raises(ValueError, match="a share in"):
            found.size_for(share)


def test_answers_and_texts_are_counted_and_questions_are_not(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [
        {"conversations": [{"from": "human", "value": "zzz"}, {"from": "gpt", "value": "aab"}]},
        {"messages": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "a"}]},
        {"text": "c"}, {"nothing": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "plain.txt").write_text("dd")
    Documents.of([([4, 5, 6], [False, True, True])]).save(tmp_path / "dataset")
    sources = [str(tmp_path / name) for name in ("rows.jsonl", "plain.txt", "dataset")]
    found = count_tokens(sources, VOCAB, tokenizer)
    ids = dict(zip("abcd", tokenizer("abcd", add_special_tokens=False)["input_ids"], strict=True))
    expected = np.zeros(VOCAB, int)
    for letter, count in (("a", 3), ("b", 1), ("c", 1), ("d", 2)):
        expected[ids[letter]] += count
    expected[[5, 6]] += 1
    assert found.counted.tolist() == expected.tolist() and not found.kept_back.any()
    assert found.special == (0, 1, 2, 3)
    assert count_tokens(sources[2:], VOCAB).counted[[5, 6]].tolist() == [1, 1]  # without a tokenizer


def test_every_tenth_block_is_kept_back(tmp_path):
    ids = np.repeat(np.arange(20) % 2 + 4, BLOCK)  # blocks 9 and 19 are of token 5
    Documents.of([(ids, np.ones(len(ids), bool))]).save(tmp_path / "dataset")
    found = count_tokens([str(tmp_path / "dataset")], VOCAB)
    assert found.counted[[4, 5]].tolist() == [10 * BLOCK, 8 * BLOCK]
    assert found.kept_back[[4, 5]].tolist() == [0, 2 * BLOCK]


def test_what_cannot_be_counted_is_refused(tmp_path):
    empty, other = tmp_path / "empty.jsonl", tmp_path / "other"
    empty.write_text('{"text": ""}\n')
    Documents.of([([4, VOCAB], [True, True])]).save(other)
    for name in ("half", "damaged"):
        Documents.of([([4, 5], [True, True])]).save(tmp_path / name)
    (tmp_path / "half" / "ends.npy").unlink()
    np.save(tmp_path / "damaged" / "learned.npy", np.ones(1, bool))
    for source, tokenizer, message in (
        (tmp_path / "none.jsonl", tiny_tokenizer(), "is neither a file nor a dataset"),
        (tmp_path, tiny_tokenizer(), "is neither a file nor a dataset"),
        (empty, None, "needs the target's tokenizer"),
        (empty, tiny_tokenizer(), "no answer to count"),
        (other, None, "holds token 32, the head knows 0 to 31"),
        (tmp_path / "half", None, "is neither a file nor a dataset"),
        (tmp_path / "damaged", None, "damaged is damaged: its arrays differ in length"),
    ):
        with pytest.raises(ValueError, match=message):
            count_tokens([str(source)], VOCAB, tokenizer)


def test_the_command(tmp_path, capsys):
    save_pair(tmp_path)
    text = "the cat sat on the mat and the dog sat on the cat."
    data, head = tmp_path / "data.jsonl", tmp_path / "head"
    data.write_text(json.dumps({"text": text}))
    command = ["vocab", str(head), "--data", str(data), "--target", str(tmp_path / "target")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "50 tokens of text, 13 different ones, 4 special ones" in shown and "100.000%" in shown
    assert not (head / TOKEN_MAP).exists()
    assert main([*command, "--coverage", "1", "--out", str(tmp_path / "copy")]) == 0
    assert "17 of 32 tokens are drafted" in capsys.readouterr().out
    assert not (head / TOKEN_MAP).exists()
    tokenizer = tiny_tokenizer()
    used = {*tokenizer(text)["input_ids"], 0, 1, 2, 3}
    assert load_head(tmp_path / "copy").target_tokens.tolist() == sorted(used)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"config.json", "model.safetensors", TOKEN_MAP}
    assert main([*command, "--size", "8"]) == 0
    assert load_head(head).draft_vocab_size == 8
    pair = eagle_fsd.load(tmp_path / "target", head, device="cpu")
    assert generate(pair).token_ids == stock(pair.target.model)
    (head / TOKEN_MAP).unlink()
    assert load_head(head).token_map is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "0"], "must have 4 to 32 tokens, got 0"),
        (["--size", "33"], "must have 4 to 32 tokens, got 33"),
        (["--coverage", "1.5"], "must be a share in (0, 1]"),
        (["--data", "/no/such.jsonl"], "/no/such.jsonl is neither a file"),
    ],
)
def test_wrong_options_end_with_one_line_and_write_nothing(tmp_path, capsys, options, message):
    save_pair(tmp_path)
    (tmp_path / "data.txt").write_text("some text")
    before = sorted(tmp_path.rglob("*"))
    command = ["vocab", str(tmp_path / "head"), "--target", str(tmp_path / "target"), "--data",
               str(tmp_path / "data.txt"), *options]
    capsys.readouterr()
    assert main(command) == 2
    errors = capsys.readouterr().err.strip()
    assert message in errors and "\n" not in errors
    assert sorted(tmp_path.rglob("*")) == before


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_replaces_nothing_but_a_copy(tmp_path, capsys):
    save_pair(tmp_path)
    (tmp_path / "data.txt").write_text("some text")
    command = ["vocab", str(tmp_path / "head"), "--target", str(tmp_path / "target"), "--data",
               str(tmp_path / "data.txt"), "--size", "8", "--out"]
    before = files(tmp_path / "target")
    assert main([*command, str(tmp_path / "target")]) == 2 and files(tmp_path / "target") == before
    save_head(tiny_head(tiny_target(), seed=1), tmp_path / "other")
    before = files(tmp_path / "other")
    assert main([*command, str(tmp_path / "other")]) == 2 and files(tmp_path / "other") == before
    assert "only an empty folder or a copy of the same head is replaced" in capsys.readouterr().err
    for _ in range(2):
        assert main([*command, str(tmp_path / "copy")]) == 0


def test_a_full_disk_leaves_no_half_copy(tmp_path, monkeypatch, capsys):
    save_pair(tmp_path)
    (tmp_path / "data.txt").write_text("some text")
    command = ["vocab", str(tmp_path / "head"), "--target", str(tmp_path / "target"), "--data",
               str(tmp_path / "data.txt"), "--size", "8"]
    assert main([*command, "--out", str(tmp_path / "copy")]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    copy_file = shutil.copyfile
    capsys.readouterr()

    def half(source, goal):
        copy_file(source, goal)
        if goal.name != "config.json":
            os.truncate(goal, 100)
            raise OSError(errno.ENOSPC, "No space left on device")

    def half_map(held, path):
        path.write_bytes(b"PK")
        raise RuntimeError("unexpected pos 576 vs 534")

    for module, name, broken in ((shutil, "copyfile", half), (torch, "save", half_map)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            for out in ([], ["--out", str(tmp_path / "new")], ["--out", str(tmp_path / "copy")]):
                if out or name == "save":
                    assert main([*command[:-1], "9", *out]) == 2 and "cannot be written" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()
