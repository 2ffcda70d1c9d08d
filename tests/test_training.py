"""Target and head training: growth, packing, aligned steps, resuming."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from eagle_fsd.draft import DraftHead
from eagle_fsd.target import TargetModel
from train import corpus
from train.corpus import Documents, encode_tasks, python_prefixes, train_tokenizer, training_documents
from train.head import HeadTraining, aligned_mask, head_loss, train_head
from train.target import Stage, build_target, grow, train_stage
from train.tasks import tasks

VOCAB = 50


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(400)


@pytest.fixture(autouse=True, scope="module")
def little_source():
    """A few files of the standard library in place of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "python_files", lambda split, files=corpus.python_files: files(split)[:60])
        yield


def random_documents(count: int, length: int) -> Documents:
    rng = np.random.default_rng(0)
    return Documents.of([(rng.integers(3, VOCAB, length).tolist(), length // 4) for _ in range(count)])


def test_growing_keeps_the_function():
    shallow = build_target(config(2), seed=0).eval()
    deep = grow(shallow, 6).eval()
    tokens = torch.arange(3, 20)[None]
    assert deep.config.num_hidden_layers == 6
    torch.testing.assert_close(deep(tokens).logits, shallow(tokens).logits)


def test_grown_layers_are_trainable():
    deep = grow(build_target(config(1), seed=0), 3)
    deep(torch.arange(3, 20)[None]).logits.sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.abs().sum() > 0 for layer in deep.model.layers)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_growing_needs_a_multiple(layers):
    with pytest.raises(ValueError, match="multiple"):
        grow(build_target(config(2), seed=0), layers)


def test_interrupted_target_training_ends_in_the_same_weights(tmp_path, monkeypatch):
    documents = random_documents(64, 16)
    stage = Stage(1, steps=6, lr=1e-3, decay=0.5, warmup=2)

    def train(name, **options):
        return train_stage(build_target(config(1), seed=0), stage, documents, batch=64, seed=0,
                           checkpoint=tmp_path / name, **options)

    whole = train("whole.pt").state_dict()
    stopped = iter(range(100))
    clip = torch.nn.utils.clip_grad_norm_

    def interrupt(*args):
        if next(stopped) == 3:
            raise KeyboardInterrupt
        clip(*args)

    with monkeypatch.context() as context:
        context.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train("stopped.pt")
    assert torch.load(tmp_path / "stopped.pt", weights_only=True)["step"] == 3
    resumed = train("stopped.pt").state_dict()
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name])


def test_documents_are_collated_with_learned_answers_and_padding():
    documents = Documents.of([([1, 5, 6, 7], 2), ([1, 8], 1), ([1, 9, 9], 3)])
    tokens, learned = documents.collate(np.array([1, 0]))
    assert tokens.tolist() == [[1, 8, 0, 0], [1, 5, 6, 7]]
    assert learned.tolist() == [[False, True, False, False], [False, False, True, True]]


def test_batches_hold_every_document_once_within_their_size():
    rng = np.random.default_rng(0)
    documents = Documents.of([([1] * int(n), 1) for n in rng.integers(2, 60, 9000)])
    lengths = np.diff(documents.ends, prepend=0)
    batches = documents.batches(600, seed=1)
    assert sorted(np.concatenate(batches).tolist()) == list(range(9000))
    assert all(lengths[batch].max() * len(batch) <= 600 for batch in batches)
    assert sum(lengths[batch].max() * len(batch) for batch in batches) < 1.05 * lengths.sum()  # little padding
    assert all((a == b).all() for a, b in zip(batches, documents.batches(600, seed=1), strict=True))


def test_documents_are_joined_and_read_back(tmp_path):
    documents = Documents.of([([1, 5], 1)]).joined(Documents.of([([1, 6, 7], 2)]))
    documents.save(tmp_path / "text.npz")
    tokens, learned = Documents.load(tmp_path / "text.npz").collate(np.array([0, 1]))
    assert tokens.tolist() == [[1, 5, 0], [1, 6, 7]]
    assert learned.tolist() == [[False, True, False], [False, False, True]]


def test_training_text_is_tasks_and_source(tokenizer):
    documents = training_documents(tokenizer, 60, python_share=0.25, seed=0)
    assert len(documents.ends) == 60
    tokens, learned = documents.collate(np.arange(60))
    is_task = tokens[:, 1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert is_task.sum() == 45
    encoded = encode_tasks(tokenizer, list(tasks("train", seed=0, count=45)))
    for row, marks, (ids, start) in zip(tokens[is_task].tolist(), learned[is_task].tolist(), encoded, strict=True):
        assert row[: len(ids)] == ids and not any(row[len(ids) :])
        assert marks == [start <= i < len(ids) for i in range(len(row))]
    assert learned[~is_task, 1].all() and not learned[:, 0].any()


def test_template_marks_the_answers(tokenizer):
    task = next(t for t in tasks("train", seed=0, count=8) if t.family == "followup")
    chat = [*task.messages, {"role": "assistant", "content": task.answer}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answers = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    texts = tokenizer.decode(answers).split("<|end|>")
    assert texts == [task.messages[1]["content"], task.answer, ""]


def test_text_round_trips_and_digits_stand_alone(tokenizer):
    text = "def f(x):\n\treturn x + 1234  # häh?"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in ids].count("3") == 1


def test_python_prefixes_are_held_out_source():
    prefixes = python_prefixes(5)
    assert len(prefixes) == 5 and all(150 < len(p) <= 300 and p.endswith("\n") for p in prefixes)


def test_aligned_mask_of_step_3():
    # Query i sees target features up to i - 2, key i - 1 of step 2 and key i of step 3.
    drawn = """
        00000 00000 10000
        00000 10000 01000
        10000 01000 00100
        11000 00100 00010
        11100 00010 00001
    """
    expected = [[int(bit) for bit in line.replace(" ", "")] for line in drawn.split("\n") if line.strip()]
    assert aligned_mask(5, 3, torch.device("cpu"))[0, 0].int().tolist() == expected


@pytest.fixture()
def pair():
    target = TargetModel(build_target(config(2), seed=0))
    torch.manual_seed(1)
    head = DraftHead(config(1))
    head.share_embeddings(target.embed_tokens)
    return target, head


def test_aligned_steps_predict_what_decoding_predicts(pair, monkeypatch):
    target, head = pair
    tokens = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    features = target.model.model(tokens).last_hidden_state
    steps = []
    forward = DraftHead.forward

    def record(self, *args):
        steps.append(forward(self, *args))
        return steps[-1]

    monkeypatch.setattr(DraftHead, "forward", record)
    with torch.no_grad():
        head_loss(head, target, features, tokens, torch.ones_like(tokens, dtype=torch.bool), HeadTraining(1))
        monkeypatch.undo()
        i = 3  # the chain that the decoder would draft after the features 0 .. i
        cache = head.new_cache(20)
        predicted = head(features[:, : i + 1], tokens[:, 1 : i + 2], torch.arange(i + 1)[None], None, cache)[:, -1:]
        torch.testing.assert_close(predicted[0, 0], steps[0][0, i])
        for step in (1, 2):
            predicted = head(predicted, tokens[:, i + step + 1, None], torch.tensor([[i + step]]), None, cache)
            torch.testing.assert_close(predicted[0, 0], steps[step][0, i + step])


def test_head_training_lowers_the_loss_leaves_the_target_and_resumes(pair, tmp_path):
    target, head = pair
    documents = random_documents(32, 24)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    x, y = map(torch.from_numpy, documents.collate(np.arange(8)))
    features = target.model.model(x).last_hidden_state.detach()
    training = HeadTraining(steps=30, batch=192, lr=3e-3, warmup=5, aligned_steps=2)

    def loss() -> float:
        with torch.no_grad():
            return head_loss(head, target, features, x, y, training)[0].item()

    start = loss()
    train_head(head, target, documents, training, checkpoint=tmp_path / "head.pt")
    assert loss() < start
    for name, value in target.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    trained = {name: value.clone() for name, value in head.state_dict().items()}
    train_head(head, target, documents, training, checkpoint=tmp_path / "head.pt")  # finished: nothing is trained again
    for name, value in head.state_dict().items():
        torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
