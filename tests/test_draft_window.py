"""A head that sees only the last W positions of the text."""

import json
import random

import pytest
import torch
from test_captured import both
from test_eagle3 import random_head
from tiny import VOCAB, tiny_chat_pair, tiny_head, tiny_pair, tiny_target

import eagle_fsd
from eagle_fsd import EagleModel, Session, TreeConfig
from eagle_fsd.captured import programs
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.models import target as target_module
from eval import draft_window

TREE = TreeConfig(12, 3, 3)


def text(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def pair_of(kind, window):
    if kind == "EAGLE-2":
        pair = tiny_pair(max_position_embeddings=1024)
    else:
        target = tiny_target(num_hidden_layers=4, max_position_embeddings=1024)
        pair = EagleModel.from_parts(target, random_head(None, eagle_aux_hidden_state_layer_ids=[0, 1, 3]))
    pair.draft.window = window
    return pair


@torch.inference_mode()
def states_of(head, rows, window, draw):
    """The states of texts in a batch whose rows differ in length, and of two levels of a tree after them."""
    head.window, cache, states = window, head.new_cache(120, len(rows)), []
    torch.manual_seed(draw)

    def predict(count, nodes, position, ancestors):
        return head.predict(torch.randn(count, nodes, head.config.hidden_size), torch.randint(0, VOCAB, (count, nodes)),
                            position, ancestors, cache)

    for row, length in enumerate(rows):
        with cache.one_row(row):
            states.append(predict(1, length, torch.arange(length)[None], None))
            cache.lengths = [length]
    lengths = torch.tensor(rows)[:, None]
    counts = [1 + (row + draw) % 3 for row in range(len(rows))]
    read = predict(len(rows), 3, lengths + torch.arange(3), None)
    states += [read[row, :count] for row, count in enumerate(counts)]
    cache.lengths = [length + count for length, count in zip(rows, counts, strict=True)]
    ends = torch.tensor(cache.lengths)[:, None].expand(-1, 3)
    alone = torch.eye(3, dtype=torch.bool).expand(len(rows), -1, -1)
    states.append(predict(len(rows), 3, ends, alone))
    above = alone.gather(1, torch.randint(0, 3, (len(rows), 3))[..., None].expand_as(alone))
    states.append(predict(len(rows), 3, ends + 1, torch.cat([above, alone], -1)))
    return states


@pytest.mark.parametrize("window", [1, 2, 8, 30])
@pytest.mark.parametrize("rows", [[50], [50, 50], [60, 3, 31], [2, 70, 1]], ids=str)
def test_keys_outside_of_the_window_are_not_read(rows, window):
    """The fused layer reads the window's keys alone; stock modules read all, under a mask."""
    head = tiny_head(tiny_target())
    for draw in range(3):
        fused = states_of(head, rows, window, draw)
        head.fused = None
        stock = states_of(head, rows, window, draw)
        head.refresh()
        for one, other in zip(fused, stock, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [3, 64, 512])
@pytest.mark.parametrize("kind", ["EAGLE-2", "EAGLE-3"])
def test_drafts_are_the_same_everywhere_and_lossless(kind, window, monkeypatch):
    """Alone, in parts of a prompt, in a batch, in a session that goes back, and in captured cycles."""
    pair, prompts = pair_of(kind, window), [text(130), text(20, 1), text(75, 2)]
    options = {"max_new_tokens": 30, "tree": TREE, "text_drafts": "off", "ignore_eos": True}
    alone = [eagle_fsd.generate(prompt, pair, **options) for prompt in prompts]
    plain = eagle_fsd.generate(prompts, pair, **options, speculative=False)
    assert [out.token_ids for out in alone] == [out.token_ids for out in plain]
    session = Session()
    eagle_fsd.generate([*prompts[0], 5, 6], pair, **options, session=session)
    found = [eagle_fsd.generate(prompts, pair, **options),
             [eagle_fsd.generate(prompts[0], pair, **options, session=session)]]
    with monkeypatch.context() as parts:
        parts.setattr(target_module, "prefill_part", lambda device: 16)
        parts.setattr("eagle_fsd.drafting.tree.prefill_part", lambda device: 16)
        found.append([eagle_fsd.generate(prompt, pair, **options) for prompt in prompts])
    for outputs in found:
        assert [out.stats.accepted_lengths for out in outputs] == [
            out.stats.accepted_lengths for out in alone[: len(outputs)]]
    monkeypatch.setattr(programs, "BUCKET", 32)
    monkeypatch.setattr(programs, "ALIGNED", 8)
    for some in (prompts, prompts[:1]):
        both(pair, some, **options)
        assert pair.captured.taken and all(pair.captured.taken)


def test_a_window_is_saved_as_published_heads_have_it(tmp_path):
    head = tiny_head(tiny_target())
    whole = head.digest(), head.weights_key()
    head.window = 48
    assert head.digest() != whole[0] and head.weights_key() != whole[1]
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert loaded.window == 48 and loaded.digest() == head.digest()
    assert (loaded.config.layer_types, loaded.config.sliding_window) == (["sliding_attention"], 48)
    loaded.window = None
    assert loaded.digest() == whole[0]


def test_a_pair_is_loaded_with_a_window(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    save_head(tiny_head(target), tmp_path / "head")
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", tree=None, draft_window=64)
    assert pair.draft.window == 64
    with pytest.raises(ValueError, match="draft_window=64 is for a head, which this pair lacks"):
        eagle_fsd.load(tmp_path / "target", tmp_path / "target", tree=None, draft_window=64)
    with pytest.raises(ValueError, match="draft_window must be at least 1, got 0"):
        eagle_fsd.load(tmp_path / "target", tmp_path / "head", draft_window=0)


def test_windows_are_compared(tmp_path, capsys):
    pair = tiny_chat_pair(max_position_embeddings=512)
    for part in (pair.target.model, pair.tokenizer):
        part.save_pretrained(tmp_path / "target")
    save_head(pair.draft, tmp_path / "head")
    (tmp_path / "text").write_text("the cat sat on the mat. " * 30, encoding="utf-8")
    options = ["--target", tmp_path / "target", "--draft", tmp_path / "head", "--text", tmp_path / "text",
               "--windows", "20", "--prompts", "2", "--max-new-tokens", "8", "--out", tmp_path / "out"]
    assert draft_window.main([*map(str, options), "--lengths", "50"]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["length"], row["window"], row["same_answers"]) for row in rows] == [
        (50, None, "2 of 2"), (50, 20, "2 of 2")]
    assert draft_window.main([*map(str, options), "--lengths", "500"]) == 2
    assert "2 prompts of 500 need 1000: pass more files" in capsys.readouterr().err
