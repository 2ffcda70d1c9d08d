"""The small bundled pair: what tests and the fallback count on, and the source that it has not seen."""

import pytest
import torch

import eagle_fsd
from eagle_fsd import TreeConfig
from eagle_fsd.data.bundled import small_pair
from train.tasks.generator import is_correct, tasks
from train.tasks.source import python_files, python_prefixes


@pytest.fixture(scope="module")
def model():
    return eagle_fsd.load(*small_pair(), device="cpu", tree=TreeConfig(16, 5, 3, 0.5))


def test_it_is_loaded_in_float32_on_every_machine(model):
    """Its weights are stored in bfloat16, which a processor may multiply faster."""
    assert model.target.dtype == model.draft.dtype == torch.float32


def test_it_answers_its_tasks_and_drafting_pays(model):
    asked = list(tasks("heldout", seed=99, count=18))
    answers = [eagle_fsd.generate(task.messages, model, acceptance="exact", max_new_tokens=200) for task in asked]
    assert sum(is_correct(task, answer.text) for task, answer in zip(asked, answers, strict=True)) >= 14
    lengths = [length + 1 for answer in answers for length in answer.stats.accepted_lengths]
    assert sum(lengths) / len(lengths) > 4.5  # as before it was folded: 5.3


def test_its_template_marks_the_answers(model):
    task = next(task for task in tasks("train", seed=0, count=8) if task.family == "followup")
    chat = [*task.messages, {"role": "assistant", "content": task.answer}]
    encoded = model.tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answers = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert model.tokenizer.decode(answers).split("<|end|>") == [task.messages[1]["content"], task.answer, ""]


def test_text_round_trips_and_digits_stand_alone(model):
    text = "def f(x):\n\treturn x + 1234  # häh?"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert model.tokenizer.decode(ids) == text
    assert [model.tokenizer.decode([i]) for i in ids].count("3") == 1


def test_python_prefixes_are_of_few_files():
    prefixes = python_prefixes(5)
    assert len(prefixes) == 5 and all(150 < len(p) <= 300 and p.endswith("\n") for p in prefixes)
    assert 10 < len(python_files()) < 200
