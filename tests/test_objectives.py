"""Objectives: each term against its formula, and the aligned steps against what the decoder would run."""

import math

import pytest
import torch
from tiny import tiny_pair

from eagle_fsd.acceptance.divergence import js
from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.eagle import DraftHead
from train.core.objectives import OBJECTIVES, TERMS, AlignedLoss, Objective, aligned_mask, make_objective, term_sums

M, D, V = 5, 4, 11


@pytest.fixture()
def pair():
    model = tiny_pair()
    model.draft.share_embeddings(model.target.embed_tokens)
    return model.target, model.draft.train()


def drawn(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in ((M, D), (M, D), (M, V), (M, V))]


def by_hand(name: str, predicted, wanted, q_logits, p_logits) -> float:
    """The term of one position after the other, from its definition."""
    total = 0.0
    for i in range(M):
        p, q = p_logits[i].softmax(-1).tolist(), q_logits[i].softmax(-1).tolist()
        if name == "regression":
            gaps = (predicted[i] - wanted[i]).abs().tolist()
            total += sum(0.5 * g * g if g < 1 else g - 0.5 for g in gaps) / D
        elif name == "soft_ce":
            total -= sum(a * math.log(b) for a, b in zip(p, q, strict=True))
        elif name == "top_k":
            total -= sum(p[x] * math.log(q[x]) for x in sorted(range(V), key=lambda x: -p[x])[:3])
        elif name == "tv":
            total += sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        elif name == "overlap":
            total -= math.log(sum(map(min, p, q)))
        else:
            gap = js(p_logits[i], q_logits[i]).item()
            total += gap if name == "divergence" else 1 / (1 + math.exp(-(gap - 0.1) / 0.05))
    return total


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_its_formula(name):
    objective = Objective(**{name: 2.0}, top_k_tokens=3)
    predicted, wanted, q_logits, p_logits = drawn(0)
    loss = term_sums(objective, predicted, wanted, q_logits, p_logits, p_logits.softmax(-1))
    assert loss.item() == pytest.approx(2 * by_hand(name, predicted, wanted, q_logits, p_logits), rel=1e-4)


@pytest.mark.parametrize("name", TERMS)
def test_a_perfect_head_has_the_smallest_loss_and_no_gradient(name):
    _, wanted, _, p_logits = drawn(1)
    q_logits, predicted = p_logits.clone().requires_grad_(), wanted.clone().requires_grad_()
    objective = Objective(**{name: 1.0}, top_k_tokens=V)
    p = p_logits.softmax(-1)
    loss = term_sums(objective, predicted, wanted, q_logits, p_logits, p)
    loss.backward()
    if name not in ("tv", "overlap"):  # these have a corner there
        assert q_logits.grad is None or q_logits.grad.abs().max() < 1e-5
    assert loss <= term_sums(objective, predicted + 0.1, wanted, q_logits + torch.randn(M, V), p_logits, p)


def test_gradients_stay_finite_where_probabilities_round_to_zero():
    q_logits = torch.tensor([[0.0, -300.0, -200.0]], requires_grad=True)
    p_logits = torch.tensor([[0.0, -250.0, -400.0]])
    for name in TERMS[1:]:
        features = torch.zeros(1, 2)
        term_sums(Objective(**{name: 1.0}), features, features, q_logits, p_logits, p_logits.softmax(-1)).backward()
        assert q_logits.grad.isfinite().all(), name


def test_aligned_mask_of_step_3():
    # Query i sees target features up to i - 2, key i - 1 of step 2 and key i of step 3.
    grid = """
        00000 00000 10000
        00000 10000 01000
        10000 01000 00100
        11000 00100 00010
        11100 00010 00001
    """
    expected = [[int(bit) for bit in line.replace(" ", "")] for line in grid.split("\n") if line.strip()]
    assert aligned_mask(5, 3, torch.device("cpu"))[0, 0].int().tolist() == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_aligned_steps_predict_what_decoding_predicts(pair, monkeypatch, attention):
    target, head = pair
    tokens = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    features = target.decoder(tokens).last_hidden_state.detach()
    steps = []
    forward = DraftHead.forward

    def record(self, *args):
        steps.append(forward(self, *args))
        return steps[-1]

    monkeypatch.setattr(DraftHead, "forward", record)
    head.config._attn_implementation = attention
    with torch.no_grad():
        AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=3), target.logits)(
            features, tokens, torch.ones_like(tokens, dtype=torch.bool)
        )
        monkeypatch.undo()
        head.config._attn_implementation = "sdpa"
        i = 3  # the chain that the decoder would draft after the features 0 .. i
        cache = head.new_cache(20)
        predicted = head(features[:, : i + 1], tokens[:, 1 : i + 2], torch.arange(i + 1)[None], None, cache)[:, -1:]
        torch.testing.assert_close(predicted[0, 0], steps[0][0, i])
        for step in (1, 2):
            predicted = head(predicted, tokens[:, i + step + 1, None], torch.tensor([[i + step]]), None, cache)
            torch.testing.assert_close(predicted[0, 0], steps[step][0, i + step])


def test_the_loss_is_a_sum_that_splits_over_documents(pair):
    target, head = pair
    tokens = torch.randint(3, 32, (3, 9), generator=torch.Generator().manual_seed(0))
    learned = torch.arange(9) >= torch.tensor([[2], [5], [7]])
    features = target.decoder(tokens).last_hidden_state.detach()
    loss = AlignedLoss(head, OBJECTIVES["aligned"], target.logits)
    whole, agreed = loss(features, tokens, learned)
    parts = [loss(features[i : i + 1], tokens[i : i + 1], learned[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(whole, sum(part for part, _ in parts))
    torch.testing.assert_close(agreed, sum(part for _, part in parts))
    documents = Documents.of(zip(tokens.tolist(), learned.tolist(), strict=True))
    assert documents.learnable(range(3)) == 7 + 4 + 2


def test_later_steps_begin_where_the_objective_says(pair):
    target, head = pair
    tokens = torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    learned = torch.ones(2, 9, dtype=torch.bool)
    features = target.decoder(tokens).last_hidden_state.detach()
    late = Objective(regression=1.0, soft_ce=0.1, aligned_steps=2, aligned_from=0.7)
    losses = {name: AlignedLoss(head, objective, target.logits) for name, objective in (
        ("late", late), ("one", OBJECTIVES["plain"]), ("two", Objective(regression=1.0, soft_ce=0.1, aligned_steps=2)))}
    for step, same in ((0, "one"), (699, "one"), (700, "two"), (999, "two")):
        losses["late"].start(step, 1000)
        for ours, theirs in zip(losses["late"](features, tokens, learned), losses[same](features, tokens, learned),
                                strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_part_of_the_logits_counts_for_all_of_them(pair):
    """The mean over all residues is the loss without a stride."""
    target, head = pair
    tokens = torch.randint(3, 32, (2, 14), generator=torch.Generator().manual_seed(0))
    learned = torch.arange(14) >= torch.tensor([[3], [6]])
    features = target.decoder(tokens).last_hidden_state.detach()
    whole, agreed = AlignedLoss(head, OBJECTIVES["plain"], target.logits)(features, tokens, learned)
    sparse = AlignedLoss(head, Objective(regression=1.0, soft_ce=0.1, logit_stride=3), target.logits)
    parts = []
    for step in range(3):
        sparse.start(step, 100)
        parts.append(sparse(features, tokens, learned))
    assert len({loss.item() for loss, _ in parts}) == 3
    torch.testing.assert_close(sum(loss for loss, _ in parts) / 3, whole)
    torch.testing.assert_close(sum(count for _, count in parts) / 3, agreed.float())


def test_padding_changes_nothing(pair):
    target, head = pair
    tokens = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    learned = torch.arange(9)[None] >= 4
    features = target.decoder(tokens).last_hidden_state.detach()
    loss = AlignedLoss(head, OBJECTIVES["hass"], target.logits)
    padded = [torch.nn.functional.pad(x, pad) for x, pad in ((features, (0, 0, 0, 4)), (tokens, (0, 4)),
                                                             (learned, (0, 4)))]
    torch.testing.assert_close(loss(features, tokens, learned)[0], loss(*padded)[0])


def test_only_the_head_is_trained_and_saved(pair):
    target, head = pair
    loss = AlignedLoss(head, OBJECTIVES["eagle"], target.logits)
    trained = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    assert all(name.startswith(("head.fc.", "head.layers.0.")) for name in trained)
    assert sorted(loss.state_dict()) == sorted(trained)
    frozen = {id(parameter) for parameter in target.model.parameters()}
    assert not any(id(parameter) in frozen for parameter in loss.parameters())


@pytest.mark.parametrize(
    ("description", "match"),
    [
        ("unheard", "unknown objective 'unheard'; accepted: eagle"),
        ({"name": "eagle", "speed": 1}, "no field 'speed'"),
        ({"tv": -1.0}, "tv must be a number of at least 0, got -1.0"),
        ({"tv": "much"}, "tv must be a number of at least 0, got 'much'"),
        ({"tv": 1.0, "aligned_steps": 2.5}, "aligned_steps must be a whole number of at least 1, got 2.5"),
        ({"gate": 1.0, "gate_threshold": "low"}, "gate_threshold must be a number of at least 0, got 'low'"),
        ({}, "one of regression"),
        ({"tv": 1.0, "aligned_steps": 0}, "aligned_steps"),
        ({"tv": 1.0, "step_decay": 1.5}, "step_decay"),
        ({"tv": 1.0, "aligned_from": 1.0}, r"aligned_from must be a number in \[0, 1\), got 1.0"),
        ({"tv": 1.0, "logit_stride": 0}, "logit_stride"),
        ({"gate": 1.0, "gate_divergence": "cosine"}, "unknown divergence 'cosine'"),
        ({"gate": 1.0, "gate_softness": 0.0}, "gate_softness"),
        ({"tv": float("nan")}, "tv must be a number of at least 0, got nan"),
    ],
)
def test_bad_objectives_are_refused(description, match):
    with pytest.raises(ValueError, match=match):
        make_objective(description)


def test_objectives_start_from_a_name_and_take_changes():
    assert make_objective({"name": "hass", "aligned_steps": 2}).aligned_steps == 2
    assert make_objective("eagle") == OBJECTIVES["eagle"] == Objective(regression=1.0, soft_ce=0.1, noise=0.1)
