"""The options' dataclasses, and the signatures that are made of them."""

import inspect
import subprocess
import sys
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from tiny import PROMPT, tiny_pair

import eagle_fsd
from eagle_fsd.drafting.measuring import greedy_decoder
from eagle_fsd.options import AcceptanceOptions, LoadOptions, SamplingOptions

DECODING = {field.name: field.default for kind in (SamplingOptions, AcceptanceOptions) for field in fields(kind)}
OF_TRANSFORMERS = {"logits_processor", "stopping_criteria", "streamer", "synced_gpus", "generation_config"}


def given(function, *without):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()
            if name not in without and parameter.kind is not inspect.Parameter.VAR_KEYWORD}


def test_generate_takes_every_option():
    others = {"prompt", "model", "session"} | OF_TRANSFORMERS
    assert given(eagle_fsd.generate, *others) == DECODING


def test_custom_generate_takes_what_generate_does_not_say_itself():
    others = {"model", "input_ids", "draft"} | OF_TRANSFORMERS
    wanted = {field.name: field.default for field in fields(AcceptanceOptions)} | {"seed": None}
    assert given(eagle_fsd.custom_generate, *others) == wanted


def test_load_takes_every_option_of_loading():
    assert given(eagle_fsd.load) == {field.name: field.default for field in fields(LoadOptions)}


@pytest.mark.parametrize("kind", [SamplingOptions, AcceptanceOptions, LoadOptions])
def test_every_option_has_a_default_and_says_what_it_means(kind):
    arguments = inspect.getdoc(kind).split("Args:")[1]
    for field in fields(kind):
        assert field.default is not MISSING
        assert f"    {field.name}: " in arguments, field.name


def test_options_and_rule_names_import_no_torch():
    code = ("import sys, eagle_fsd; from eagle_fsd.options import SamplingOptions; from eagle_fsd.acceptance import "
            "RULE_CLASSES; assert SamplingOptions().greedy and 'fsd' in RULE_CLASSES; print('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_lazy_names_are_those_for_editors():
    """What `if TYPE_CHECKING` imports, what `__all__` says and what is really there."""
    for package in (eagle_fsd, eagle_fsd.acceptance):
        for name in package.__all__:
            assert getattr(package, name) is not None
        assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="'eagle_fsd' has no attribute 'nothing'"):
        eagle_fsd.nothing  # noqa: B018


def test_values_of_other_options_are_left_out():
    assert SamplingOptions.of({"temperature": 0.5, "prompt": "x", "tree": None}) == SamplingOptions(temperature=0.5)


def test_numbers_of_numpy_are_numbers():
    assert AcceptanceOptions(budget=np.float32(2)).budget == 2 and SamplingOptions(max_new_tokens=np.int64(3))
    pair = tiny_pair()
    with pytest.raises(ValueError, match="seed must be below"):
        eagle_fsd.generate([PROMPT, PROMPT], pair, seed=np.int64(2**63 - 1), max_new_tokens=2)


@pytest.mark.parametrize("ids", [lambda ids: iter(ids), lambda ids: np.array(ids)], ids=["iterator", "array"])
def test_stop_tokens_hold_for_every_prompt(ids):
    pair = tiny_pair()
    first = eagle_fsd.generate(PROMPT, pair, max_new_tokens=4, acceptance="exact").token_ids[0]
    found = eagle_fsd.generate([PROMPT, PROMPT], pair, max_new_tokens=4, stop_token_ids=ids([first]))
    assert [output.finish_reason for output in found] == ["stop", "stop"]


def test_plain_decoding_keeps_no_features():
    """Nobody reads them, and to join them for every token costs what the text is long."""
    pair = tiny_pair()
    with torch.inference_mode():
        decoder = greedy_decoder(pair.target, None, PROMPT, None, 8)
        decoder.prefill()
        for _ in range(5):
            decoder.step()
            assert decoder.requests[0].features is None


def test_a_promise_needs_a_head_that_brings_it():
    pair, prompt = tiny_pair(), torch.tensor([PROMPT])
    with pytest.raises(ValueError, match="quality= needs draft= as a directory"):
        pair.target.model.generate(prompt, custom_generate=eagle_fsd.custom_generate, draft=pair.draft,
                                   quality="accuracy_drop<=1%", max_new_tokens=2, do_sample=False)
