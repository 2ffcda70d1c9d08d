"""The model of lm-evaluation-harness: with `exact`, the answers and log-likelihoods of the harness' own `hf`."""

import pytest
import torch
from tiny import tiny_pair, tiny_tokenizer

from eagle_fsd import TreeConfig, save_head

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402  # only where it is installed
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from eagle_fsd.lm_eval import EagleLM, sort_arguments  # noqa: E402

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
        {"max_gen_toks": 16, "until": ["a", "st"]},
        {"max_gen_toks": 20, "repetition_penalty": 1.5},
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
    found = ours(place, acceptance="fsd", threshold=0.6, head_guard="none")
    asked = generations({"max_gen_toks": 16})
    assert found.generate_until(asked, disable_tqdm=True) != exact.generate_until(asked, disable_tqdm=True)


def test_sampling_follows_the_seed_of_the_harness(exact):
    asked = generations({"max_gen_toks": 20, "do_sample": True, "temperature": 0.9})

    def answers(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return exact.generate_until(asked, disable_tqdm=True)

    assert answers(1) == answers(1) != answers(2)


def test_what_cannot_be_decoded_is_refused(place, exact):
    with pytest.raises(ValueError, match="max_length 513 exceeds the target's 512 positions"):
        ours(place, max_length=513)
    with pytest.raises(ValueError, match="num_beams must be 1"):
        exact.generate_until(generations({"max_gen_toks": 5, "num_beams": 2}), disable_tqdm=True)


def test_arguments_go_where_they_belong():
    loading, decoding, harness = sort_arguments({
        "target": "t", "draft": "d", "acceptance": "fsd", "threshold": 0.2, "head_guard": "none", "batch_size": 8,
        "max_batch_size": None, "device": "cpu", "max_length": 512, "tree": [16, 5, 4, 0.5],
    })
    assert loading == {"target": "t", "draft": "d", "device": "cpu", "tree": TreeConfig(16, 5, 4, 0.5)}
    assert (decoding.acceptance, decoding.threshold, decoding.head_guard) == ("fsd", 0.2, None)
    assert harness == {"batch_size": 8, "max_length": 512}
    assert [sort_arguments({"tree": tree})[0]["tree"] for tree in ("none", "auto")] == [None, "auto"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained": "t"}, r"takes target= and draft=, not pretrained="),
        ({"target": "t", "treshold": 0.2}, "unknown model_args treshold; accepted: target, draft, .*threshold"),
        ({"acceptance": "fast"}, "unknown rule 'fast'"),
        ({"threshold": -1}, "threshold"),
        ({"acceptance": "exact", "divergence": "js"}, "rule 'exact' has no option 'divergence'"),
        ({"tree": "16"}, r"tree must be auto, none or \[total_tokens,depth,top_k\]"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_loaded(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sort_arguments(given)
