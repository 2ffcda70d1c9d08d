"""What `eagle-fsd heads check` says of heads and texts: each fault is found, and named."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from served import SMALL
from test_prepare_data import chat, rows
from tiny import NAMED, random_head, save_pair, tiny_target, tiny_trainable_pair
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import eagle_fsd
from eagle_fsd import EagleModel, load_head, save_head
from eagle_fsd.cli import main
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.encoding import encode_dataset
from eagle_fsd.data.questions import Question
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.measure import diagnosis
from eagle_fsd.measure.diagnosis import (
    GOOD,
    Findings,
    OtherConfig,
    answer_questions,
    check_pair,
    examine,
    read_documents,
    table,
    verdicts,
)
from train.objectives import OBJECTIVES, AlignedLoss, Objective


def findings(**changes):
    agreed = 100 * torch.tensor(GOOD)
    fine = {"tokens": 100, "own": 98, "surprise": 40.0, "entropy": 90.0, "likeliest": 70.0, "covered": 99,
            "agreed": agreed, "shifted": torch.tensor([60.0, 20, 20]), "followed": 90, "lengths": 97.0,
            "documents": 9, "with_header": 9}
    return Findings(**fine | changes)


def other(fields, agreed, squares=16.0):
    return OtherConfig(fields, "somebody does", agreed * torch.ones(5), squares)


@pytest.mark.parametrize("chance", [other({}, 61), other({}, 63, 36.0)], ids=["small", "noise"])
def test_a_config_that_gains_little_is_not_named(chance):
    assert verdicts(findings(agreed=60 * torch.ones(5), others=[chance]), False) == verdicts(
        findings(agreed=60 * torch.ones(5)), False)
    assert "config.json" in verdicts(findings(agreed=60 * torch.ones(5), others=[other({}, 63)]), False)[0]


@pytest.mark.parametrize(("changes", "said"), [
    ({"tokens": 99, "shifted": torch.tensor([60.0, 80, 20])}, "99 tokens are too few for a verdict"),
    ({"with_header": 7}, "2 of 9 documents lack the target's chat template"),
    ({"surprise": 120.0, "own": 50}, r"did not write these answers \(its cross-entropy on them is 1.20 nats"),
    ({"shifted": torch.tensor([60.0, 80, 20])}, r"off by one.*\(0.89, in decoding 0.67\)"),
    ({"shifted": torch.tensor([60.0, 20, 80])}, "off by one"),
    ({"lengths": 300.0}, "3.00 times as long"),
    ({"agreed": 60 * torch.tensor([0.3, 0.4, 0.5, 0.6, 0.6])}, r"reads its own predictions \(0.36\) than .* \(0.18\)"),
    ({"agreed": 3 * torch.ones(5), "others": [other({"rope_theta": 1e4}, 20), other({}, 9.9)]},
     r'more often \(0.20 .* 0.20\) with {"rope_theta": 10000.0} in its config.json: somebody does'),
    ({"agreed": 3 * torch.ones(5), "lengths": 300.0, "others": [other({}, 9.9)],
      "shifted": torch.tensor([3.0, 8, 8])}, "hardly ever"),
    ({"covered": 80}, "cannot draft 20.0% of the tokens"),
    ({"agreed": 60 * torch.tensor(GOOD), "lengths": 49.0}, r"positions \[1, 2, 3, 4, 5\]: train longer, on"),
    ({"agreed": torch.tensor([68.0, 59, 54, 30, 30])}, r"positions \[4, 5\]: train longer, then with aligned"),
])
def test_each_fault_is_named(changes, said):
    assert verdicts(findings(), False) == []
    (verdict,) = verdicts(findings(**changes), False)
    assert re.search(said, verdict)


def test_the_table_shows_shares_of_all_tokens():
    shown = table(findings(covered=80))
    for line in ("100 in 9 documents", "target:  98.0%", "0.40 nats per token; entropy 0.90", "vocabulary:    80.0%",
                 "1 to 5: 0.68 0.59 0.54 0.53 0.52 ("):
        assert line in shown


@pytest.fixture(scope="module")
def model():
    return tiny_trainable_pair()


def test_what_is_counted(model):
    """Its own greedy text is its most likely, another's is not."""
    words = ("ab", "cd", "ef")
    own = [eagle_fsd.generate(chat(word), model, max_new_tokens=24, stop_token_ids=[]).text for word in words]
    for texts, share in ((own, 1.0), (["zyx wvu"] * 3, 0.0)):
        chats = [chat(word, text) for word, text in zip(words, texts, strict=True)]
        documents, _ = encode_dataset(rows(*chats), model.tokenizer, max_length=64)
        found = examine(model, documents)
        assert (found.documents, found.with_header, found.covered) == (3, 3, found.tokens)
        assert abs(found.own / found.tokens - share) < 0.2
        assert (found.surprise > found.entropy) == (share == 0.0) == (found.own < found.likeliest)


@pytest.mark.parametrize("eagle3", [False, True])
def test_agreement_is_that_of_training(model, eagle3):
    """Training counts it from the stock decoder's features, document by document."""
    head = random_head(NAMED) if eagle3 else model.draft
    pair = EagleModel.from_parts(tiny_target(num_hidden_layers=7), head, model.tokenizer)
    documents, _ = encode_dataset(rows(chat("ab", "abc de f"), chat("cd", "gh i")), model.tokenizer, max_length=64)
    loss = AlignedLoss(head.eval(), Objective(soft_ce=1.0, aligned_steps=5), pair.target.logits)
    expected = torch.zeros(5)
    for index in range(2):
        tokens, learned = (torch.from_numpy(array) for array in documents.pack([index]))
        with torch.no_grad():
            features = pair.target.features(tokens[None], use_cache=False)[0]
            expected += loss(features, tokens, learned, [len(tokens)])[1]
    found = examine(pair, documents)
    assert found.agreed.tolist() == expected.tolist() and (found.covered < found.tokens) == eagle3


@pytest.mark.parametrize("window", [None, 3])
def test_chains_are_those_of_decoding(model, window):
    head, tokens = copy.deepcopy(model.draft), torch.arange(3, 15)
    head.window = window
    with torch.no_grad():
        features = model.target.prefill(tokens[None], model.target.new_cache(12))
        cache, states, i = head.new_cache(12), head.to_states(features), 4
        state = head.predict(states[:, :i], tokens[None, 1 : i + 1], torch.arange(i)[None], None, cache)[:, -1:]
        for step, predicted in enumerate(diagnosis.chains(head, features[0], tokens), i):
            torch.testing.assert_close(state[0, 0], predicted[step - 1])
            state = head.predict(state, tokens[None, step + 1 : step + 2], torch.tensor([[step]]), None, cache)


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}  # as ModelOpt exports it


@pytest.mark.parametrize(("eagle3", "config", "expected"), [
    (False, {"rope_theta": 1e4}, []),
    (False, {"rope_theta": 1e6}, [{"rope_theta": 1e4}]),
    (True, {"rope_theta": 1e4, "rope_scaling": YARN}, [{"rope_scaling": None}, {"use_last_layernorm": False}]),
    (True, {"rope_theta": 5e5, "rope_scaling": YARN, "norm_output": True},
     [{"rope_scaling": None}, {"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": None}, {"norm_output": False}]),
    (True, {"rope_theta": 1e4, "use_last_layernorm": False}, []),
])
def test_other_configs_are_those_of_the_file(model, tmp_path, eagle3, config, expected):
    """What they are said to agree with is what the head agrees with once config.json has these fields."""
    target = EagleModel.from_parts(tiny_target(num_hidden_layers=7), None, model.tokenizer).target
    documents, _ = encode_dataset(rows(chat("ab", "abc de f"), chat("cd", "gh i jkl")), model.tokenizer, max_length=64)
    save_head(random_head() if eagle3 else model.draft, tmp_path)

    def found(fields):
        path = tmp_path / "config.json"
        old = json.loads(path.read_text())
        old.pop("rope_parameters", None)
        path.write_text(json.dumps(old | fields))
        return examine(EagleModel.from_parts(target.model, load_head(tmp_path), model.tokenizer), documents)

    others = found(config).others
    assert [other.fields for other in others] == expected
    for other in others:
        assert torch.equal(found(config | other.fields).agreed, other.agreed)


def test_a_text_is_split_at_the_targets_positions_and_needs_no_chat_template(model, tmp_path):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = None
    (tmp_path / "book.txt").write_text("abc def. " * 60)  # a token per character
    pair = replace(model, tokenizer=tokenizer)
    documents = read_documents(tmp_path / "book.txt", 2, pair)
    assert documents.lengths.tolist() == [model.target.max_positions] * 2
    found = examine(pair, documents)
    assert found.with_header == found.documents == 2


def test_questions_are_answered_in_batches(model, monkeypatch):
    sizes = []
    monkeypatch.setattr(diagnosis, "generate", lambda prompts, *args, **options: sizes.append(len(prompts))
                        or eagle_fsd.generate(prompts, *args, **options))
    questions = [Question(number, "", ("ab" * (number + 1),)) for number in range(9)]
    assert len(answer_questions(model, questions, 4)) and sizes == [8, 1]
    with pytest.raises(ValueError, match="the target takes at most"):  # before the first answer
        answer_questions(model, [*questions, Question(9, "", ("ab" * 99,))], 4)
    assert sizes == [8, 1]


@pytest.mark.parametrize(("part", "said"), [("draft", "got no drafter"), ("tokenizer", "the target has no tokenizer")])
def test_a_pair_without_one_part_is_refused(model, part, said):
    with pytest.raises(ValueError, match=said):
        check_pair(replace(model, **{part: None}))


def test_the_command(model, tmp_path, capsys, monkeypatch):
    """It reads a dataset's last documents, a file's first ones, or answers that the target writes now."""
    save_pair(tmp_path, model)
    documents, _ = encode_dataset(rows(chat("a", "no no"), chat("hi", "yes")), model.tokenizer, max_length=24)
    documents.save(tmp_path / "data")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n' + "".join(  # a bad row is no document
        json.dumps({"messages": chat(*turns)}) + "\n" for turns in (("hi", "yes"), ("a", "no no"))))
    (tmp_path / "questions.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "ab"}\n')
    command = ["heads", "check", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"),
               "--device", "cpu", "--documents", "1", "--max-new-tokens", "8"]
    for flag, name, said in (("--data", "data", "4 in 1 documents"), ("--data", "chats.jsonl", "4 in 1 documents"),
                             ("--questions", "questions.jsonl", "most likely to the target:  100.0%")):
        assert main([*command, flag, str(tmp_path / name)]) == 0
        assert said in (shown := capsys.readouterr().out) and "\n- " in shown, shown
    learned = {"data": documents.digest(), "learned": 1}  # as training records it
    (tmp_path / "head" / "evaluation.json").write_text(json.dumps(learned))
    all_of_it = [*command, "--documents", "9", "--data", str(tmp_path / "data")]
    assert main(all_of_it) == 0 and "4 in 1 documents" in capsys.readouterr().out  # the other one only
    (tmp_path / "head" / "evaluation.json").write_text(json.dumps(learned | {"learned": 2}))
    assert main(all_of_it) == 2 and "the head has learned all of" in capsys.readouterr().err
    (tmp_path / "head" / "evaluation.json").write_text(json.dumps(learned | {"data": "another"}))
    assert main(all_of_it) == 0 and "in 2 documents" in capsys.readouterr().out
    monkeypatch.setattr(diagnosis, "generate", None)
    for bad, said in ((["--documents", "0"], "--documents must be at least 1, got 0"),
                      ([], "pass either --data or --questions"), (["--data", "nowhere"], "nowhere is neither a file"),
                      (["--questions", str(tmp_path / "questions.jsonl"), "--draft", str(tmp_path / "target")],
                       "got a causal LM")):
        assert main([*command, *bad]) == 2 and said in capsys.readouterr().err


PROMPTS = ("What is {} + {}?", "Count from {} to {}.", "A shop has {} pens and sells {}. How many are left?")


@pytest.fixture(scope="module")
def small():
    """The small pair, what it answers to 72 questions, and the features of that."""
    pair = eagle_fsd.load(*SMALL, dtype="float32", device="cpu", tree=None, prepack=False)
    asked = [chat(text.format(7 * n % 89 + 2, 5 * n % 61 + 2)) for n in range(24) for text in PROMPTS]
    answers = [{"role": "assistant", "content": answer.text, "token_ids": answer.token_ids}
               for answer in eagle_fsd.generate(asked, pair, max_new_tokens=48, acceptance="exact")]
    chats = [[*each, answer] for each, answer in zip(asked, answers, strict=True)]
    documents, _ = encode_dataset(rows(*chats), pair.tokenizer, max_length=96)
    tokens, learned = (torch.from_numpy(array) for array in documents.collate(np.arange(56)))
    with torch.no_grad():
        return pair, documents, tokens, learned, pair.target.features(tokens, use_cache=False)


def trained(small, steps: int, *, scale: float = 1.0, shift: int = 0) -> DraftHead:
    """A head that has seen the target's features so many times, times `scale` or beside the wrong tokens."""
    pair, _, tokens, learned, features = small
    torch.manual_seed(0)
    head = DraftHead(pair.draft.config)
    head.share_embeddings(pair.target.embed_tokens)
    features = scale * features[:, shift:]
    tokens, learned = (given[:, : features.shape[1]] for given in (tokens, learned))
    loss = AlignedLoss(head.train(), OBJECTIVES["sparse"], pair.target.logits)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for step in range(steps):
        batch = torch.arange(8) + 8 * step % 56
        pack = (each[batch].flatten(0, 1) for each in (features, tokens, learned))
        (loss(*pack, [tokens.shape[1]] * len(batch))[0] / learned[batch].sum()).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def published(small, change) -> DraftHead:
    head = copy.deepcopy(small[0].draft)
    with torch.no_grad():
        change(head)
    return head


def halves_changed(head):
    head.fc.weight.copy_(torch.cat(head.fc.weight.chunk(2, 1)[::-1], 1))


def rotated(small, **rope) -> DraftHead:
    """The head, which has learned with a rope_theta of 10000, under another rotary embedding."""
    head = copy.deepcopy(small[0].draft)
    head.config.rope_parameters |= rope
    head.rotary_emb = LlamaRotaryEmbedding(head.config)
    return head


@pytest.mark.parametrize(("made", "said"), [
    (lambda small: small[0].draft, None),
    (lambda small: rotated(small, **YARN), '{"rope_scaling": null} in its config.json: ModelOpt exports'),
    (lambda small: rotated(small, rope_theta=1e6), '{"rope_theta": 10000.0} in its config.json: AngelSlim'),
    (lambda small: trained(small, 6), "train longer, on more"),
    (lambda small: trained(small, 12), "train longer, then with"),
    (lambda small: trained(small, 36, shift=1), "off by one"),
    (lambda small: trained(small, 30, scale=4.0), "times as long as the target's: it was trained with another norm"),
    (lambda small: trained(small, 40, scale=0.1), "more often if it reads its own predictions"),
    (lambda small: published(small, lambda head: head.fc.weight.mul_(2)), "times as long as the target's"),
    (lambda small: published(small, lambda head: head.layers[0].mlp.down_proj.weight.neg_()), "hardly ever agrees"),
    (lambda small: published(small, halves_changed), "hardly ever agrees"),
    (lambda small: trained(small, 0), "hardly ever agrees"),
    (lambda small: published(small, lambda head: head.limit_vocabulary(torch.arange(300))), "cannot draft"),
], ids=["good", "yarn", "theta", "6 steps", "12 steps", "off by one", "longer", "shorter", "fc", "mlp", "halves", "new",
        "vocabulary"])
def test_heads_that_are_damaged_and_heads_that_are_young(small, made, said):
    """Each is told what is the matter with it, and nothing else."""
    pair, documents = small[:2]
    held_out = Documents.of(documents.document(index) for index in range(56, 72))
    found = verdicts(examine(replace(pair, draft=made(small)), held_out), False)
    assert found == [] if said is None else len(found) == 1 and said in found[0], found
