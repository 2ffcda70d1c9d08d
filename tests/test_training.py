"""The demo pair's text and its target: growth, documents, resuming."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from eagle_fsd.data.documents import Documents
from train.demo import corpus
from train.demo.corpus import encode_tasks, python_prefixes, train_tokenizer, training_documents
from train.demo.target import Stage, build_target, grow, train_stage
from train.demo.tasks import tasks

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
    learned = [i >= length // 4 for i in range(length)]
    return Documents.of([(rng.integers(3, VOCAB, length).tolist(), learned) for _ in range(count)])


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
    stage = Stage(1, steps=6, lr=1e-3, decay=0.5, warmup=2, batch=64)

    def train(name, **options):
        return train_stage(build_target(config(1), seed=0), stage, documents, seed=0,
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


def test_training_text_is_tasks_and_source(tokenizer):
    documents = training_documents(tokenizer, 60, python_share=0.25, seed=0)
    assert len(documents.ends) == 60
    tokens, learned = documents.collate(np.arange(60))
    is_task = tokens[:, 1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert is_task.sum() == 45
    encoded = encode_tasks(tokenizer, list(tasks("train", seed=0, count=45)))
    for row, marks, (ids, answer) in zip(tokens[is_task].tolist(), learned[is_task].tolist(), encoded, strict=True):
        assert row[: len(ids)] == ids and not any(row[len(ids) :])
        assert marks == answer + [False] * (len(row) - len(ids))
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
