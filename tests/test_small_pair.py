"""The small pair, a test fixture: other tests count on what it does."""

from pathlib import Path

import pytest
import torch

import eagle_fsd

PAIRS = Path(__file__).parent / "pairs"
EXERCISES = {
    "Convert 8 hours and 38 minutes to minutes.": "518",
    "Find all numbers above 60 among 23, 83, 81, 21.": "83, 81",
    "Please sort these largest to smallest: 72, 27, 76, 53, 30, 21.": "76, 72, 53, 30, 27, 21",
}


@pytest.fixture(scope="module")
def model():
    tree = eagle_fsd.TreeConfig(16, 5, 3, 0.5)
    return eagle_fsd.load(PAIRS / "small-target", PAIRS / "small-draft", device="cpu", tree=tree)


def test_it_is_loaded_in_float32_on_every_machine(model):
    """Its weights are stored in bfloat16, which a processor may multiply faster."""
    assert model.target.dtype == model.draft.dtype == torch.float32


def test_it_solves_exercises_and_drafting_pays(model):
    for question, answer in EXERCISES.items():
        out = eagle_fsd.generate([{"role": "user", "content": question}], model, max_new_tokens=200)
        assert out.text.endswith(f"#### {answer}")
        assert out.stats.mean_accepted_length > 4.5


def test_its_template_marks_the_answers(model):
    chat = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}]
    encoded = model.tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert model.tokenizer.decode([token for token, mask in marked if mask]) == "It is 5.<|end|>"
