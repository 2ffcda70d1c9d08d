"""`--model_args` of the harness' model: what needs no harness."""

import sys

import pytest

from eagle_fsd import AcceptanceOptions, TreeConfig
from eagle_fsd.lm_eval.__main__ import main
from eagle_fsd.lm_eval.arguments import sort_arguments


def test_arguments_go_where_they_belong():
    found = sort_arguments({
        "target": "t", "draft": "d", "acceptance": "fsd", "threshold": 0.2, "batch_size": 8, "max_batch_size": None,
        "device": "cpu", "max_length": 512, "tree": [16, 5, 4, 0.5],
    })
    assert found.loading == {"target": "t", "draft": "d", "device": "cpu", "tree": TreeConfig(16, 5, 4, 0.5)}
    assert found.decoding == AcceptanceOptions(acceptance="fsd", threshold=0.2)
    assert found.harness == {"batch_size": 8, "max_length": 512}
    assert sort_arguments({"tree": None}).loading == sort_arguments({"tree": "none"}).loading == {"tree": None}
    assert sort_arguments({"tree": "auto"}).loading == {"tree": "auto"}
    assert sort_arguments({"quality": "accuracy_drop<=1%"}).decoding == AcceptanceOptions(quality="accuracy_drop<=1%")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained": "t"}, r"takes target= \(and draft=\), not pretrained="),
        ({"target": "t", "treshold": 0.2}, "unknown model_args treshold; accepted: target, draft, .*threshold"),
        ({"target": 3}, "target must be a directory or hub id, got 3"),
        ({"acceptance": "fast"}, "unknown rule 'fast'"),
        ({"acceptance": 3}, "acceptance must be the name of a rule, got 3"),
        ({"threshold": -1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": "much"}, "threshold"),
        ({"acceptance": "exact", "divergence": "js"}, "rule 'exact' has no option 'divergence'"),
        ({"acceptance": "fsd", "divergence": "xx"}, "xx"),
        ({"quality": "good"}, "good"),
        ({"quality": "accuracy_drop<=1%", "threshold": 0.2}, "leave acceptance=, threshold=, divergence= and gate"),
        ({"budget": -1}, "budget must be at least 0 nats, got -1"),
        ({"tree": "16"}, r"tree must be auto, none or \[total_tokens,depth,top_k\]"),
        ({"tree": [16, 0, 4]}, "TreeConfig.depth must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_loaded(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sort_arguments(given)


def test_without_the_harness_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"pip install eagle_fsd\[lm_eval\]"):
        main()
