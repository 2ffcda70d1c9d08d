"""Training EAGLE-3 heads by the script that trains the others. V = 32 vocabulary, D = 16 hidden size."""

import json

import numpy as np
import pytest
import torch
from tiny import PROMPT, tiny_target

import eagle_fsd
from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel
from train.core.config import make_config
from train.core.new_heads import new_head
from train.core.objectives import OBJECTIVES, AlignedLoss, Objective
from train.features import write_features
from train.train_draft_head import train

TOKENS = np.arange(3, 23)  # those that the data speaks in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target of eight layers and 40 documents."""
    folder = tmp_path_factory.mktemp("eagle3")
    tiny_target(num_hidden_layers=8, attention="sdpa").save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 20, 40)
    Documents.of([(rng.choice(TOKENS, n).tolist(), [i > n // 3 for i in range(n)]) for n in lengths]).save(
        folder / "data"
    )
    return folder


def settings(place, output, **changes):
    return make_config({
        "target": place / "target", "data": place / "data", "output": place / output, "eval_documents": 3,
        "target_dtype": "float32", "mixed_precision": "no", "steps": 8, "batch_tokens": 128, "lr": 3e-3, "warmup": 2,
        "save_every": 8, "eval_every": 8, "tree": [6, 3, 2], "tracker": "none", "decode_prompts": 1,
        "decode_tokens": 8, "objective": {"name": "eagle3", "aligned_steps": 3},
        "head": {"kind": "eagle3", "draft_vocab_size": len(TOKENS)}, **changes,
    })


def losses(output):
    return [json.loads(line)["loss"] for line in (output / "train.jsonl").read_text().splitlines()]


def test_a_trained_head_names_the_commonest_tokens_and_decodes_losslessly(place):
    trained = train(settings(place, "online"), cpu=True)
    curve = losses(place / "online")
    assert np.mean(curve[-3:]) < np.mean(curve[:3])
    pair = eagle_fsd.load(place / "target", trained, device="cpu")
    assert isinstance(pair.draft, Eagle3Head) and pair.draft.target_tokens.tolist() == TOKENS.tolist()
    expected = pair.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=8, acceptance="exact")
    assert output.token_ids == expected[0, len(PROMPT) :].tolist()

    model, _ = load_target(place / "target", dtype="float32")
    target = TargetModel(model)
    write_features(target, Documents.load(place / "data"), place / "last")
    with pytest.raises(ValueError, match=r"reads what enters layers \[2, 4, 5\], .* holds \[\]"):
        train(settings(place, "offline", features=str(place / "last")), cpu=True)
    target.layers = (2, 4, 5)
    write_features(target, Documents.load(place / "data"), place / "features")
    train(settings(place, "offline", features=str(place / "features"), evaluate=False), cpu=True)
    np.testing.assert_allclose(losses(place / "offline"), curve, atol=1e-3)


def test_aligned_steps_predict_what_decoding_predicts(place, monkeypatch):
    head = new_head(settings(place, "unused"))
    pair = EagleModel.from_parts(tiny_target(num_hidden_layers=8), head)
    tokens = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    features, steps, forward = pair.target.features(tokens, use_cache=False).detach(), [], Eagle3Head.forward

    def record(self, *args):
        steps.append(forward(self, *args))
        return steps[-1]

    monkeypatch.setattr(Eagle3Head, "forward", record)
    with torch.no_grad():
        AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=3), pair.target.logits)(
            features, tokens, torch.ones_like(tokens, dtype=torch.bool)
        )
        monkeypatch.undo()
        i, cache = 3, head.new_cache(20)  # the chain that the decoder would draft after the features 0 .. i
        hidden = head(head.read(features[:, : i + 1]), tokens[:, 1 : i + 2], torch.arange(i + 1)[None], None, cache)
        torch.testing.assert_close(hidden[0, i], steps[0][0, i])
        hidden = hidden[:, -1:]
        for step in (1, 2):
            hidden = head(hidden, tokens[:, i + step + 1, None], torch.tensor([[i + step]]), None, cache)
            torch.testing.assert_close(hidden[0, 0], steps[step][0, i + step])


@torch.no_grad()
def test_a_position_counts_by_what_the_head_can_name_of_it(place):
    """The cross-entropy of one step, position by position, from its definition."""
    head = new_head(settings(place, "unused"))
    named = [0, 3, 4, 7, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 21, 22, 25, 27, 30, 31]
    head.d2t.copy_(torch.tensor(named) - torch.arange(20))
    pair = EagleModel.from_parts(tiny_target(num_hidden_layers=8), head)
    tokens = torch.randint(3, 32, (1, 7), generator=torch.Generator().manual_seed(1))
    features = pair.target.features(tokens, use_cache=False)
    loss, agreed = AlignedLoss(head, Objective(soft_ce=1.0), pair.target.logits)(
        features, tokens, torch.ones_like(tokens, dtype=torch.bool)
    )
    p = pair.target.logits(features)[0].softmax(-1)
    hidden = head(head.read(features[:, :-2]), tokens[:, 1:-1], torch.arange(5)[None])
    log_q = head.logits(hidden, pair.target.logits)[0].log_softmax(-1)
    expected = -sum(p[i + 1, token] * log_q[i, token] for i in range(5) for token in named)
    torch.testing.assert_close(loss, expected)
    assert agreed.item() == (p[1:-1].argmax(-1) == log_q.argmax(-1)).sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "plain"}, "an EAGLE-3 head predicts no features, regression must be 0, got 1.0"),
        ({"head": {"kind": "eagle4"}}, "head: kind must be one of eagle2, eagle3, got 'eagle4'"),
        ({"head": {"draft_vocab_size": 33}}, "draft_vocab_size 33 exceeds vocab_size 32"),
        ({"head": {"draft_vocab_size": 0}}, "draft_vocab_size must be a whole number of at least 1"),
        ({"head": {"kind": "eagle3", "draft_vocab_size": 33}}, "draft_vocab_size 33 exceeds vocab_size 32"),
        ({"head": {"kind": "eagle3", "eagle_aux_hidden_state_layer_ids": [0, 8]}}, r"layers \(0, 8\) are wanted"),
    ],
)
def test_settings_that_do_not_fit_are_refused(place, changes, message):
    with pytest.raises(ValueError, match=message):
        train(settings(place, "refused", **changes), cpu=True)


def test_the_published_objective():
    assert OBJECTIVES["eagle3"] == Objective(soft_ce=1.0, aligned_steps=7, step_decay=0.8)
