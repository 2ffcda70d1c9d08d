"""The model of lm-evaluation-harness: with `exact`, the answers and log-likelihoods of the harness' own `hf`."""

import json
import re

import pytest
import torch
from tiny import tiny_pair, tiny_tokenizer

from eagle_fsd import save_head
from eval import lm_eval_check

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402  # only where it is installed
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from eagle_fsd.lm_eval.model import EagleLM  # noqa: E402

GREEDY = {"do_sample": False, "until": []}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_pair(max_position_embeddings=512)  # a longer prompt loses its beginning
    model.target.model.generation_config.eos_token_id = 1
    model.target.model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    save_head(model.draft, folder / "head")
    return folder


def ours(place, **options) -> EagleLM:
    given = {"target": str(place / "target"), "draft": str(place / "head"), "device": "cpu", "tree": [16, 5, 4],
             "acceptance": "exact"}
    return EagleLM(**given | options)


@pytest.fixture(scope="module")
def exact(place):
    return ours(place)


@pytest.fixture(scope="module")
def hf(place):
    return HFLM(str(place / "target"), device="cpu", dtype="float32")


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def generations(options: dict, prompts=("a cat", "the dog sat. the", "<s>x", "b " * 300, "z")) -> list[Instance]:
    return requests("generate_until", *((prompt, GREEDY | options) for prompt in prompts))


def test_it_is_registered():
    assert get_model("eagle_fsd") is EagleLM


@pytest.mark.parametrize(
    "options",
    [
        {"max_gen_toks": 16},
        {"max_gen_toks": 16, "until": ["a", "st"]},
        {"max_gen_toks": 16, "until": "e"},
        {"max_gen_toks": 20, "repetition_penalty": 1.5},
        {"max_gen_toks": 20, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 7},
    ],
    ids=str,
)
def test_exact_answers_are_those_of_hf(hf, exact, options):
    answers = hf.generate_until(generations(options), disable_tqdm=True)
    assert exact.generate_until(generations(options), disable_tqdm=True) == answers
    assert len(set(answers)) > 1


def test_arguments_of_hf_mean_the_same(place):
    options = {"add_bos_token": False, "max_length": 64, "batch_size": 3}
    stock = HFLM(str(place / "target"), device="cpu", dtype="float32", **options | {"batch_size": 1})
    expected = stock.generate_until(generations({"max_gen_toks": 20}), disable_tqdm=True)
    model = ours(place, **options)
    assert model.generate_until(generations({"max_gen_toks": 20}), disable_tqdm=True) == expected
    assert model.batch_size == 3


def test_log_likelihoods_are_the_target_s_alone(hf, exact):
    pairs = requests("loglikelihood", ("a cat", " sat"), ("a cat", " ran"), ("", "dog"), ("b " * 300, "c"))
    assert exact.loglikelihood(pairs, disable_tqdm=True) == hf.loglikelihood(pairs, disable_tqdm=True)
    texts = requests("loglikelihood_rolling", ("the cat sat.",), ("a b " * 200,))
    assert exact.loglikelihood_rolling(texts, disable_tqdm=True) == hf.loglikelihood_rolling(texts, disable_tqdm=True)


def test_a_fuzzy_rule_is_applied(place, exact):
    found = ours(place, acceptance="fsd", threshold=0.6)
    asked = generations({"max_gen_toks": 16})
    assert found.generate_until(asked, disable_tqdm=True) != exact.generate_until(asked, disable_tqdm=True)


def test_sampling_follows_the_seed_of_the_harness(exact):
    asked = generations({"max_gen_toks": 20, "do_sample": True, "temperature": 0.9})

    def answers(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return exact.generate_until(asked, disable_tqdm=True)

    assert answers(1) == answers(1) != answers(2)


def test_a_run_goes_on_with_the_harness_own_cache(exact, tmp_path, monkeypatch):
    asked = generations({"max_gen_toks": 10})
    expected = exact.generate_until(asked, disable_tqdm=True)
    monkeypatch.setattr(exact, "cache_hook", exact.cache_hook)  # to have it back after the test
    cached = CachingLM(exact, str(tmp_path / "cache.db"))
    stop, real = 3, exact._model_generate

    def break_off(*args, **kwargs):
        nonlocal stop
        stop -= 1
        if stop < 0:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(exact, "_model_generate", break_off)
    with pytest.raises(KeyboardInterrupt):
        cached.generate_until(asked)
    stop = 2  # what is left
    assert cached.generate_until(asked) == expected and stop == 0


def test_what_cannot_be_decoded_is_refused(place, exact):
    with pytest.raises(ValueError, match="max_length 513 exceeds the target's 512 positions"):
        ours(place, max_length=513)
    with pytest.raises(ValueError, match="num_beams must be 1"):
        exact.generate_until(generations({"max_gen_toks": 5, "num_beams": 2}), disable_tqdm=True)


def test_the_check_compares_answer_by_answer(place, tmp_path, monkeypatch, capsys):
    gsm8k = tmp_path / "gsm8k.jsonl"
    gsm8k.write_text('{"question": "how many?", "answer": "three.\\n#### 3"}\n')
    out = tmp_path / "new" / "found.json"
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip and the system, for seconds
    assert lm_eval_check.main([
        "--target", str(place / "target"), "--draft", str(place / "head"), "--limit", "1",
        "--gsm8k", str(gsm8k), "--max-gen-toks", "20", "--threshold", "0.6", "--out", str(out),
    ]) == 0
    assert re.search(r"\| gsm8k_local +\| exact +\| 0.0% +\| 1 of 1 +\|", capsys.readouterr().out)
    found = json.loads(out.read_text())["tasks"]
    assert set(found) == {"tasks_local", "gsm8k_local"}
    assert any(task["models"]["fsd 0.6"]["differs_from_hf"] for task in found.values())
