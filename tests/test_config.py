import dataclasses
import math

import pytest

from eagle_fsd import TreeConfig


@pytest.mark.parametrize(
    ("shape", "scored", "nodes"),
    [
        ((60, 8, 10), 10 + 7 * 100, 60),
        ((5, 3, 2), 2 + 2 * 4, 5),
        ((60, 1, 10), 10, 11),  # no more than the root and its children
        ((12, 3, 2), 10, 11),
        ((11, 3, 2), 10, 11),
        ((9, 20, 1), 20, 9),
        ((2, 1, 1), 1, 2),
    ],
)
def test_nodes_are_what_is_asked_for_or_what_can_be_scored(shape, scored, nodes):
    config = TreeConfig(*shape)
    assert (config.scored_nodes, config.nodes) == (scored, nodes)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"total_tokens": 1}, ValueError, "total_tokens"),
        ({"depth": 0}, ValueError, "depth"),
        ({"top_k": -1}, ValueError, "top_k"),
        ({"total_tokens": 6.0}, TypeError, "total_tokens"),
        ({"depth": "3"}, TypeError, "depth"),
        ({"top_k": True}, TypeError, "top_k"),
        ({"draft_temperature": 0}, ValueError, "draft_temperature"),
        ({"draft_temperature": -1.0}, ValueError, "draft_temperature"),
        ({"draft_temperature": math.inf}, ValueError, "draft_temperature"),
        ({"draft_temperature": math.nan}, ValueError, "draft_temperature"),
        ({"draft_temperature": "hot"}, ValueError, "draft_temperature"),
        ({"levels": 3}, TypeError, "levels"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_their_name(options, error, word):
    with pytest.raises(error, match=word):
        TreeConfig(**options)


def test_a_config_cannot_change_after_its_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TreeConfig().depth = 0
