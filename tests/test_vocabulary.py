"""Reduced draft vocabularies of EAGLE-1/2 heads: what is drafted, decoded, stored and counted.

V = 32 vocabulary, R = 21 draft vocabulary, D = 16 hidden size.
"""

import json
import math

import numpy as np
import pytest
import torch
from tiny import (
    HIDDEN,
    NAMED,
    PROMPT,
    VOCAB,
    save_pair,
    tiny_head,
    tiny_target,
    tiny_tokenizer,
)

import eagle_fsd
from eagle_fsd import TreeConfig, load_head, save_head
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.token_counts import BLOCK, TokenCounts, count_tokens
from eagle_fsd.export.inspection import inspect_head
from eagle_fsd.export.servers import export_head
from eagle_fsd.heads.checkpoint import TOKEN_MAP, copy_head, save_token_map
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.digest import weights_digest

OUTSIDE = sorted({*range(VOCAB)} - {*NAMED})
WIDE = TreeConfig(16, 5, 4)
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


@pytest.mark.parametrize("family", ["llama", "phi", "granite", "gemma2"])
@torch.no_grad()
def test_own_logits_are_the_targets_own_for_these_tokens(family):
    """Output layers with a bias (phi), a scale (granite) and a softcap (gemma2)."""
    pair = limited(family, tie_word_embeddings=family == "gemma2")
    bias = pair.target.lm_head.bias
    if bias is not None:
        bias.normal_()
        pair.draft.limit_vocabulary(torch.tensor(NAMED))
        pair = EagleModel.from_parts(pair.target.model, pair.draft)
    predicted = torch.randn(2, 3, HIDDEN)
    expected = pair.target.logits(predicted)[..., NAMED]
    assert pair.draft.output_rows.layer.weight.shape == (len(NAMED), HIDDEN)
    torch.testing.assert_close(pair.draft.own_logits(predicted, refuse), expected)
    pair.draft.limit_vocabulary(torch.tensor(NAMED))  # not joined with a target: the whole layer is computed
    torch.testing.assert_close(pair.draft.own_logits(predicted, pair.target.logits), expected)


def refuse(predicted):
    raise AssertionError("the whole output layer was computed")


def test_logits_and_names_are_by_token():
    head = limited(tokens=NAMED[::-1]).draft
    assert head.draft_vocab_size == 21 and head.draft_tokens.tolist() == NAMED
    head.output_rows = None
    values, output = torch.randn(2, VOCAB), torch.nn.Identity()
    assert head.target_logits(values, output).tolist() == [[row[token] for token in NAMED] for row in values.tolist()]
    assert head.names(torch.arange(VOCAB)).nonzero().flatten().tolist() == NAMED
    head.limit_vocabulary(None)
    assert head.draft_vocab_size == VOCAB and head.target_logits(values, output) is values
    head.limit_vocabulary(torch.arange(VOCAB))  # all of them are no limit
    assert head.token_map is None


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.tensor([1.0]), TypeError, "a tensor of integers, got torch.float32"),
        (torch.tensor([1, 2, 1]), ValueError, r"2 distinct ones in \[3\]"),
        (torch.tensor([1, 32]), ValueError, "draft token 32 is outside of the target's vocabulary, 0 to 31"),
    ],
    ids=str,
)
def test_bad_vocabularies_are_refused(tokens, error, message):
    head = limited().draft
    with pytest.raises(error, match=message):
        head.limit_vocabulary(tokens)
    assert head.draft_tokens.tolist() == NAMED


# Joining head and target ------------------------------------------------------------------------------------------


def test_rows_are_copied_once_per_target():
    pair = limited()
    rows = pair.draft.output_rows
    assert EagleModel.from_parts(pair.target.model, pair.draft).draft.output_rows is rows
    other = EagleModel.from_parts(tiny_target(seed=1), pair.draft)
    assert pair.draft.output_rows is rows and other.draft.output_rows.copied_from(other.target.lm_head)
    other.target.model.bfloat16()
    half = EagleModel.from_parts(other.target.model, pair.draft)
    assert half.draft.output_rows.layer.weight.dtype == torch.bfloat16


class Adapted(torch.nn.Linear):
    """An output layer whose weight is not all that it computes, as with LoRA."""

    def forward(self, features):
        return super().forward(features) + features.sum(-1, keepdim=True) * torch.arange(self.out_features)


def test_an_output_layer_without_plain_rows_is_computed_whole(caplog):
    target = tiny_target()
    layer = Adapted(HIDDEN, VOCAB, bias=False)
    layer.weight = target.lm_head.weight
    target.lm_head = layer
    head = tiny_head(target)
    head.limit_vocabulary(torch.tensor(NAMED))
    pair = EagleModel.from_parts(target, head)
    assert head.output_rows is None and "are not plain" in caplog.text
    output = generate(pair)
    assert output.token_ids == stock(target)
    drafted = [t for t, r in zip(output.token_ids, output.receipts, strict=True) if r.drafter == "head"]
    assert set(drafted) <= set(NAMED)


def test_heads_of_other_vocabularies_have_other_digests():
    """By which calibrations and latencies are known."""
    digests = {weights_digest(limited(tokens=tokens).draft) for tokens in (None, NAMED, NAMED[:-1], [0, *NAMED[1:]])}
    assert len(digests) == 4


# Decoding ---------------------------------------------------------------------------------------------------------


# Files ------------------------------------------------------------------------------------------------------------


def test_saved_heads_keep_their_vocabulary(tmp_path):
    pair = limited()
    save_head(pair.draft, tmp_path / "head")
    assert torch.load(tmp_path / "head" / TOKEN_MAP, weights_only=True) == NAMED  # what SGLang reads
    torch.save(torch.tensor(NAMED[::-1], dtype=torch.int32), tmp_path / "head" / TOKEN_MAP)  # in any order
    pair.target.model.save_pretrained(tmp_path / "target")
    loaded = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", tree=None)
    assert loaded.draft.draft_tokens.tolist() == NAMED
    assert loaded.draft.output_rows.copied_from(loaded.target.lm_head)
    assert generate(loaded).stats.accepted_lengths == generate(pair).stats.accepted_lengths
    pair.draft.limit_vocabulary(None)
    save_head(pair.draft, tmp_path / "head")
    assert not (tmp_path / "head" / TOKEN_MAP).exists() and load_head(tmp_path / "head").token_map is None


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "token_map.pt was refused: it is damaged"),
        (lambda path: path.write_text("1 2 3"), "token_map.pt was refused"),
        (lambda path: torch.save(["a"], path), "token_map.pt cannot be used as a list of token ids"),
        (lambda path: torch.save([VOCAB], path), "as a list of token ids: draft token 32 is outside of the target's"),
    ],
)
def test_damaged_token_maps_are_refused(tmp_path, write, message):
    save_head(limited(tokens=None).draft, tmp_path)
    write(tmp_path / TOKEN_MAP)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_head(tmp_path)


def test_export_gives_it_to_those_who_can_use_it(tmp_path, caplog):
    pair = limited()
    pair.tokenizer = tiny_tokenizer()
    save_pair(tmp_path, pair)
    head, target = tmp_path / "head", tmp_path / "target"
    assert inspect_head(head).facts["draft vocabulary"].startswith(f"21 of them, in {TOKEN_MAP}")
    export_head(head, "sglang", tmp_path / "sglang")
    assert load_head(tmp_path / "sglang").draft_tokens.tolist() == NAMED and not caplog.records
    for to in ("vllm", "eagle"):
        export_head(head, to, tmp_path / to, target=target)
        assert not (tmp_path / to / TOKEN_MAP).exists() and f"{to} does not support a reduced vocabulary" in caplog.text
    assert inspect_head(tmp_path / "vllm").facts["draft vocabulary"] == "all of them"


def test_a_copy_has_the_heads_files_and_a_vocabulary(tmp_path):
    save_head(limited(tokens=None).draft, tmp_path / "head")
    (tmp_path / "head" / "notes.txt").write_text("not the head's")
    tokens = torch.tensor(NAMED)
    assert copy_head(tmp_path / "head", tmp_path / "copy", tokens) == tmp_path / "copy" / TOKEN_MAP
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"config.json", "model.safetensors", TOKEN_MAP}
    assert load_head(tmp_path / "copy").draft_tokens.tolist() == NAMED
    assert not (tmp_path / "head" / TOKEN_MAP).exists()
    with pytest.raises(ValueError, match="copy contains config.json, and nothing is overwritten"):
        copy_head(tmp_path / "head", tmp_path / "copy", tokens)
    save_token_map(tmp_path / "copy", tokens[:8])
    assert load_head(tmp_path / "copy").draft_vocab_size == 8


# Counting ---------------------------------------------------------------------------------------------------------


def counts(counted, held_out, special=()):
    return TokenCounts(np.array(counted), np.array(held_out), special)


def test_ranks_coverage_and_sizes_by_hand():
    found = counts([5, 0, 9, 1, 0], [1, 0, 2, 0, 5], special=(3,))
    assert found.ranked(found.counts).tolist() == [3, 2, 0, 1, 4]
    assert found.coverage().tolist() == [0, 2 / 8, 3 / 8, 3 / 8, 1]
    assert found.most_frequent(3).tolist() == [0, 2, 3]  # of all: 6, 0, 11, 1, 5, and token 3 is special
    assert [found.size_for(share) for share in (0.1, 0.25, 0.3, 3 / 8, 0.4, 1)] == [2, 2, 3, 3, 5, 5]
    assert counts([3, 1], [0, 0]).coverage().tolist() == [0.75, 1]  # nothing kept back
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"must have 1 to 5 tokens, got {size}"):
            found.most_frequent(size)
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
    assert found.counts.tolist() == expected.tolist() and not found.held_out.any()
    assert found.special == (0, 1, 2, 3)
    assert count_tokens(sources[2:], VOCAB).counts[[5, 6]].tolist() == [1, 1]  # without a tokenizer


def test_every_tenth_block_is_kept_back(tmp_path):
    ids = np.repeat(np.arange(20) % 2 + 4, BLOCK)  # blocks 9 and 19 are of token 5
    Documents.of([(ids, np.ones(len(ids), bool))]).save(tmp_path / "dataset")
    found = count_tokens([str(tmp_path / "dataset")], VOCAB)
    assert found.counts[[4, 5]].tolist() == [10 * BLOCK, 8 * BLOCK]
    assert found.held_out[[4, 5]].tolist() == [0, 2 * BLOCK]


def test_what_cannot_be_counted_is_refused(tmp_path):
    empty, other = tmp_path / "empty.jsonl", tmp_path / "other"
    empty.write_text('{"text": ""}\n')
    Documents.of([([4, VOCAB], [True, True])]).save(other)
    for source, tokenizer, message in (
        (tmp_path / "none.jsonl", tiny_tokenizer(), "is neither a file nor a dataset"),
        (empty, None, "needs the target's tokenizer"),
        (empty, tiny_tokenizer(), "must contain answers to count"),
        (other, None, "contains token 32; the head's vocabulary is 0 to 31"),
    ):
        with pytest.raises(ValueError, match=message):
            count_tokens([str(source)], VOCAB, tokenizer)
