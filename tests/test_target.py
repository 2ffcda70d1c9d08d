"""The target's adapter: prompts that are read in parts, what its last layer returns."""

import pytest
import torch
from tiny import FAMILIES, PROMPT, tiny_head, tiny_target

from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.drafting.tree import Unread, catch_up, catch_up_in_parts
from eagle_fsd.models import target as target_module
from eagle_fsd.models.target import TargetModel, find_norm

TREE = TreeConfig(8, 3, 2)


@pytest.fixture
def parts_of_five(monkeypatch):
    monkeypatch.setitem(target_module.PREFILL, "cpu", 5)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "llama4_text", "deepseek_v3", "gpt2"])
@torch.inference_mode()
def test_a_prompt_in_parts_gives_the_same_features(family, monkeypatch):
    target = TargetModel(tiny_target(family), check=False)
    tokens = torch.tensor([PROMPT * 2])
    whole = target.prefill(tokens, target.new_cache(30))
    monkeypatch.setitem(target_module.PREFILL, "cpu", 5)
    cache = target.new_cache(30)
    torch.testing.assert_close(target.prefill(tokens, cache), whole, rtol=1e-4, atol=1e-4)
    assert cache.length == 24


@torch.inference_mode()
def test_the_draft_reads_ragged_rows_after_prompts_in_parts(parts_of_five):
    head = tiny_head(tiny_target())
    for lengths in ((5,), (24,), (1, 13, 6)):
        features = [torch.randn(length, 16) for length in lengths]
        tokens = [torch.tensor((PROMPT * 2)[:length]) for length in lengths]
        cache = head.new_cache(30, len(lengths))
        for row in (row for row, length in enumerate(lengths) if length > 1):
            length = lengths[row]
            with cache.one_row(row):
                catch_up_in_parts(head, features[row][: length // 2], tokens[row][: length // 2], cache)
        rest = [[part[length // 2 :] for part, length in zip(parts, lengths, strict=True)]
                for parts in (features, tokens)]
        last, got = catch_up(head, Unread.of(*rest, cache), cache)
        assert last.tolist() == [row[-1] for row in tokens]
        for row, length in enumerate(lengths):
            alone = head(features[row][None], tokens[row][None], torch.arange(length)[None])[0, -1:]
            torch.testing.assert_close(got[row], alone, rtol=1e-4, atol=1e-5)
        assert cache.lengths == list(lengths)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_last_layers_output_is_what_enters_the_norm(family):
    target = TargetModel(tiny_target(family), check=False)
    count = len(target.decoder_layers)
    target.feature_layers = (0, count)
    features = target.features(torch.tensor([PROMPT]), use_cache=False)
    output, last = features[..., -2 * target.hidden_size :].chunk(2, -1)
    torch.testing.assert_close(find_norm(target.computation.decoder, target.decoder_layers)(output), last)
