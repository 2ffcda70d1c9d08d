"""Objectives: each term against its formula, and the aligned steps against what the decoder would run."""

import math

import pytest
import torch
from reference_unrolling import aligned_mask, reference_loss
from tiny import SIZES, tiny_pair, tiny_target
from transformers import LlamaConfig

from eagle_fsd import EagleModel
from eagle_fsd.heads.eagle import OutputRows
from eagle_fsd.heads.eagle3 import Eagle3Head
from train import objectives, unrolling
from train.objectives import (
    OBJECTIVES,
    TERMS,
    AlignedLoss,
    Objective,
    logit_sum,
    make_objective,
    objective_text,
    regression_sum,
)

M, D, V = 5, 4, 11
PLAIN = Objective(regression=1.0, soft_ce=0.1)


@pytest.fixture()
def pair():
    model = tiny_pair()
    model.draft.share_embeddings(model.target.embed_tokens)
    return model.target, model.draft.train()


def given(rows: int, length: int, target):
    """A pack of texts: the target's features, the tokens, of which the first ones are not learned, and the lengths."""
    tokens = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(0))
    learned = torch.arange(length) >= torch.tensor([[2], [5], [7]])[:rows]
    features = target.computation.decoder(tokens).last_hidden_state.detach()
    return features.flatten(0, 1), tokens.flatten(), learned.flatten(), [length] * rows


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
        elif name == "lk":
            total -= math.log(sum(map(min, p, q)))
        else:
            accepted = sum(map(min, p, q))
            weight, kl = math.exp(-3 * accepted), sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            total += weight * kl + (1 - weight) * (1 - accepted)
    return total


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_its_formula_and_least_for_a_perfect_head(name):
    objective = Objective(**{name: 2.0}, top_k_tokens=3)
    predicted, wanted, q_logits, p_logits = drawn(0)
    p, log_q = p_logits.softmax(-1), q_logits.log_softmax(-1)

    def term(objective, predicted, log_q):
        return objective.regression * regression_sum(predicted, wanted) + logit_sum(objective, log_q, p)

    loss = term(objective, predicted, log_q)
    assert loss.item() == pytest.approx(2 * by_hand(name, predicted, wanted, q_logits, p_logits), rel=1e-4)
    # The truncated cross-entropy is least for other distributions: there take all tokens.
    whole = Objective(**{name: 2.0}, top_k_tokens=V)
    assert term(whole, wanted, p.log()) < term(whole, predicted, log_q)


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
    assert aligned_mask(5, 3)[0].int().tolist() == expected


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "eagle3.1"])
def test_aligned_steps_predict_what_decoding_predicts(pair, monkeypatch, kind):
    target, head = pair
    if kind.startswith("eagle3"):
        norms = {"fc_norm": True, "norm_output": True} if kind == "eagle3.1" else {}
        head = Eagle3Head(LlamaConfig(**SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 20} | norms))
        target = EagleModel.from_parts(tiny_target(num_hidden_layers=8), head).target
    tokens = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    features, steps, forward = target.features(tokens, use_cache=False).detach(), [], type(head).forward

    def record(self, *args):
        steps.append(forward(self, *args))
        return steps[-1]

    monkeypatch.setattr(type(head), "forward", record)
    with torch.no_grad():
        loss, _ = AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=3, step_decay=0.8), target.logits)(
            features[0], tokens[0], tokens[0] > 0, [9])
        monkeypatch.undo()
        if kind.startswith("eagle3"):  # as SpecForge and speculators compute it: of states normalised once
            known = head.names(tokens[0, 2:])
            p = target.logits(features[0, 1:-1])[known][:, head.draft_tokens].softmax(-1)
            logits = [head.lm_head(state if head.norm_output else head.norm(state))[0, known] for state in steps]
            expected = sum(-0.8**step * (p * each.log_softmax(-1)).sum() for step, each in enumerate(logits))
            assert known.any()
            torch.testing.assert_close(loss, expected)
        head.config._attn_implementation = "sdpa"
        i = 3  # the chain that the decoder would draft after the features 0 .. i
        cache, read = head.new_cache(20), head.to_states(features[:, : i + 1])
        predicted = head(read, tokens[:, 1 : i + 2], torch.arange(i + 1)[None], None, cache)[:, -1:]
        torch.testing.assert_close(predicted[0, 0], steps[0][0, i])
        for step in (1, 2):
            predicted = head(predicted, tokens[:, i + step + 1, None], torch.tensor([[i + step]]), None, cache)
            torch.testing.assert_close(predicted[0, 0], steps[step][0, i + step])


LENGTHS = [7, 2, 40, 3, 1, 21]


@pytest.mark.parametrize(("kind", "text"), [
    ("eagle2", "hass"), ("eagle2", "sparse,logit_stride=3"), ("named", "hass,aligned_steps=2,tv=1"),
    ("eagle3", "eagle3"), ("norms", "lk=1,soft_ce=0.5,aligned_steps=4,step_decay=0.7"), ("no output", "tv=1"),
])
def test_a_pack_gives_the_losses_and_gradients_of_its_texts(pair, monkeypatch, kind, text):
    """Against dense masks and all logits at once; here in several blocks of queries and chunks of positions."""
    target, head = pair
    monkeypatch.setitem(unrolling.BLOCK_SCORES, "cpu", 1)
    monkeypatch.setitem(objectives.CHUNK_LOGITS, "cpu", 100)
    if kind == "named":
        head.limit_vocabulary(torch.arange(1, 32, 3))
    elif kind != "eagle2":
        fields = {"fc_norm": True, "norm_output": True, "qk_norm": True} if kind == "norms" else {}
        head = Eagle3Head(LlamaConfig(**SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 20} | fields))
        head.share_embeddings(target.embed_tokens)
        if kind == "no output":
            head.lm_head, head.d2t = None, None
    target.model.double()
    head.double().train()
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(sum(LENGTHS), 64 if isinstance(head, Eagle3Head) else 16, generator=generator).double()
    tokens = torch.randint(3, 32, (sum(LENGTHS),), generator=generator)
    learned = torch.rand(len(tokens), generator=generator) < 0.7
    loss = AlignedLoss(head, make_objective(text), lambda features: target.lm_head(features[..., -16:]))
    loss.residue = 1 % loss.objective.logit_stride
    found = loss(features, tokens, learned, LENGTHS)
    found[0].backward()
    grads = {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}
    head.zero_grad(set_to_none=True)
    texts = zip(*(each.split(LENGTHS) for each in (features, tokens, learned)), strict=True)
    values, agreed = zip(*(reference_loss(loss, *each) for each in texts if len(each[0]) > 2), strict=True)
    sum(values).backward()
    assert found[0].item() == pytest.approx(sum(values).item(), rel=1e-6)
    assert found[1].tolist() == sum(agreed).tolist()
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(grads[name], weight.grad, rtol=1e-4, atol=1e-5 * weight.grad.abs().max().item())
    with torch.no_grad():
        assert loss(features, tokens, learned, LENGTHS)[0].item() == pytest.approx(found[0].item(), rel=1e-6)


def test_a_part_of_the_logits_counts_for_all_of_them(pair):
    """The mean over all residues is the loss without a stride."""
    target, head = pair
    pack = given(2, 14, target)
    whole, agreed = AlignedLoss(head, PLAIN, target.logits)(*pack)
    sparse = AlignedLoss(head, Objective(regression=1.0, soft_ce=0.1, logit_stride=3), target.logits)
    parts = []
    for sparse.residue in range(3):
        parts.append(sparse(*pack))
    assert len({loss.item() for loss, _ in parts}) == 3
    torch.testing.assert_close(sum(loss for loss, _ in parts) / 3, whole)
    torch.testing.assert_close(sum(count for _, count in parts) / 3, agreed.float())


@torch.no_grad()
@pytest.mark.parametrize("copied", [False, True])
def test_only_tokens_that_the_head_can_name_are_compared(pair, copied):
    """The cross-entropy of one step, position by position, from its definition; the target's rows copied or not."""
    target, head = pair
    named = [0, 3, 4, 7, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 21, 22, 25, 27, 30, 31]
    head.limit_vocabulary(torch.tensor(named))
    if copied:
        head.output_rows = OutputRows.of(target.lm_head, head.token_map, target.scale, target.softcap)
    features, tokens, _, lengths = given(1, 12, target)
    loss, agreed = AlignedLoss(head, Objective(soft_ce=1.0), target.logits)(features, tokens, tokens > 0, lengths)
    hidden = head(features[None, :-2], tokens[None, 1:-1], torch.arange(10)[None])[0]
    expected, same, compared = 0.0, 0, 0
    for i in range(10):
        if tokens[i + 2] in named:
            p = target.logits(features[i + 1])[named].softmax(-1)
            log_q = target.logits(hidden[i])[named].log_softmax(-1)
            expected, same, compared = expected - (p * log_q).sum(), same + (p.argmax() == log_q.argmax()), compared + 1
    assert 0 < compared < 10
    torch.testing.assert_close(loss, expected)
    assert agreed.item() == same


@pytest.mark.parametrize(("text", "match"), [
    ("unheard", "unknown objective 'unheard'; accepted: eagle"), ("eagle,speed=1", "no field 'speed'"),
    ("tv=-1", "tv must be a number of at least 0, got -1.0"), ("tv=much", "tv must be float, got 'much'"),
    ("aligned_steps=2", "one of regression"), ("tv=1,aligned_steps=0", "aligned_steps must be at least 1"),
    ("hass,aligned_steps=1000", "at most 32"), ("tv=1,step_decay=1.5", "step_decay"), ("tv=nan", "got nan"),
])
def test_bad_objectives_are_refused(text, match):
    with pytest.raises(ValueError, match=match):
        make_objective(text)


def test_objectives_start_from_a_name_and_take_changes():
    changed = make_objective("hass,aligned_steps=2,noise=0.1")
    assert (changed.top_k, changed.aligned_steps, changed.noise) == (1.0, 2, 0.1)
    assert make_objective(objective_text(changed)) == changed
    assert make_objective("eagle") == OBJECTIVES["eagle"] and objective_text(OBJECTIVES["eagle"]) == "eagle"
