import math

import pytest

from eagle_fsd import TreeConfig


@pytest.mark.parametrize(("shape", "scored", "nodes"), [
    ((60, 8, 10), 1 + 10 + 7 * 100, 60),
    ((60, 1, 10), 11, 11),  # no more than the root and its children
    ((12, 3, 2), 11, 11),
    ((9, 20, 1), 21, 9),
])
def test_nodes_are_what_is_asked_for_or_what_can_be_scored(shape, scored, nodes):
    config = TreeConfig(*shape)
    assert (config.scored_nodes, config.nodes) == (scored, nodes)


@pytest.mark.parametrize(("options", "error"), [
    ({"total_tokens": 1}, ValueError), ({"total_tokens": 5000}, ValueError), ({"total_tokens": 6.0}, TypeError),
    ({"depth": "3"}, TypeError), ({"top_k": True}, TypeError), ({"draft_temperature": 0}, ValueError),
    ({"draft_temperature": math.nan}, ValueError), ({"draft_temperature": "hot"}, ValueError),
    ({"levels": 3}, TypeError),
], ids=str)
def test_bad_values_are_refused_with_their_name(options, error):
    with pytest.raises(error, match=next(iter(options))):
        TreeConfig(**options)
