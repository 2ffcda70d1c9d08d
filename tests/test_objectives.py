"""Objectives: each term against its formula, and the aligned steps against what the decoder would run."""

import math

import pytest
import torch
from tiny import SIZES, tiny_pair, tiny_target
from transformers import LlamaConfig

from eagle_fsd import EagleModel
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.heads.output_rows import OutputRows
from eagle_fsd.heads.unrolling import aligned_mask
from train.objectives import (
    OBJECTIVES,
    TERMS,
    AlignedLoss,
    Objective,
    make_objective,
    objective_text,
    term_sums,
)

M, D, V = 5, 4, 11
PLAIN = Objective(regression=1.0, soft_ce=0.1)


@pytest.fixture()
def pair():
    model = tiny_pair()
    model.draft.share_embeddings(model.target.embed_tokens)
    return model.target, model.draft.train()


def given(rows: int, length: int, target):
    """Tokens [rows, length], of which the first ones are not learned, and the target's features."""
    tokens = torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(0))
    learned = torch.arange(length) >= torch.tensor([[2], [5], [7]])[:rows]
    return target.current.decoder(tokens).last_hidden_state.detach(), tokens, learned


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
        else:
            total -= math.log(sum(map(min, p, q)))
    return total


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_its_formula_and_least_for_a_perfect_head(name):
    objective = Objective(**{name: 2.0}, top_k_tokens=3)
    predicted, wanted, q_logits, p_logits = drawn(0)
    p, log_q = p_logits.softmax(-1), q_logits.log_softmax(-1)
    loss = term_sums(objective, predicted, wanted, log_q, p)
    assert loss.item() == pytest.approx(2 * by_hand(name, predicted, wanted, q_logits, p_logits), rel=1e-4)
    # The truncated cross-entropy is least for other distributions: there take all tokens.
    whole = Objective(**{name: 2.0}, top_k_tokens=V)
    assert term_sums(whole, wanted, wanted, p.log(), p) < term_sums(whole, predicted, wanted, log_q, p)


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
    assert aligned_mask(5, 3, torch.device("cpu"))[0].int().tolist() == expected


@pytest.mark.parametrize("kind", ["sdpa", "eager", "eagle3", "eagle3.1"])
def test_aligned_steps_predict_what_decoding_predicts(pair, monkeypatch, kind):
    target, head = pair
    if kind.startswith("eagle3"):
        norms = {"fc_norm": True, "norm_output": True} if kind == "eagle3.1" else {}
        head = Eagle3Head(LlamaConfig(**SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 20} | norms))
        target = EagleModel.from_parts(tiny_target(num_hidden_layers=8), head).target
    else:
        head.config._attn_implementation = kind
    tokens = torch.randint(3, 32, (1, 9), generator=torch.Generator().manual_seed(0))
    features, steps, forward = target.features(tokens, use_cache=False).detach(), [], type(head).forward

    def record(self, *args):
        steps.append(forward(self, *args))
        return steps[-1]

    monkeypatch.setattr(type(head), "forward", record)
    with torch.no_grad():
        loss, _ = AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=3, step_decay=0.8), target.logits)(
            features, tokens, tokens > 0)
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
        cache, read = head.new_cache(20), head.read(features[:, : i + 1])
        predicted = head(read, tokens[:, 1 : i + 2], torch.arange(i + 1)[None], None, cache)[:, -1:]
        torch.testing.assert_close(predicted[0, 0], steps[0][0, i])
        for step in (1, 2):
            predicted = head(predicted, tokens[:, i + step + 1, None], torch.tensor([[i + step]]), None, cache)
            torch.testing.assert_close(predicted[0, 0], steps[step][0, i + step])


def test_the_loss_is_a_sum_over_documents_and_padding_adds_nothing(pair):
    target, head = pair
    features, tokens, learned = given(3, 9, target)
    loss = AlignedLoss(head, OBJECTIVES["hass"], target.logits)
    whole, agreed = loss(features, tokens, learned)
    pad = torch.nn.functional.pad
    parts = [loss(pad(features[i], (0, 0, 0, i))[None], pad(tokens[i], (0, i))[None], pad(learned[i], (0, i))[None])
             for i in range(3)]
    torch.testing.assert_close(whole, sum(part for part, _ in parts))
    torch.testing.assert_close(agreed, sum(part for _, part in parts))


def test_a_part_of_the_logits_counts_for_all_of_them(pair):
    """The mean over all residues is the loss without a stride."""
    target, head = pair
    features, tokens, learned = given(2, 14, target)
    whole, agreed = AlignedLoss(head, PLAIN, target.logits)(features, tokens, learned)
    sparse = AlignedLoss(head, Objective(regression=1.0, soft_ce=0.1, logit_stride=3), target.logits)
    parts = []
    for sparse.residue in range(3):
        parts.append(sparse(features, tokens, learned))
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
    features, tokens, _ = given(1, 12, target)
    loss, agreed = AlignedLoss(head, Objective(soft_ce=1.0), target.logits)(features, tokens, tokens > 0)
    hidden = head(features[:, :-2], tokens[:, 1:-1], torch.arange(10)[None])[0]
    expected, same, compared = 0.0, 0, 0
    for i in range(10):
        if tokens[0, i + 2] in named:
            p = target.logits(features[0, i + 1])[named].softmax(-1)
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
