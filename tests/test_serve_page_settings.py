"""The page's settings and turns, without a browser: what the server was started with, Stop, and answers that fail."""

import asyncio
from types import SimpleNamespace

import pytest
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.acceptance import RULES, make_rule
from eagle_fsd.serve.app import Service

gradio = pytest.importorskip("gradio")
from eagle_fsd.serve.page import (  # noqa: E402, it needs gradio
    WAITING,
    Page,
    build,
    dial_end,
    dial_of,
    nothing_said,
    settings_of,
    stopped,
)


@pytest.mark.parametrize(("defaults", "shown"), [
    ({}, ("fsd", 0.3, 0.0, 256)),
    ({"threshold": 0.0}, ("fsd", 0.0, 0.0, 256)),
    ({"max_new_tokens": 2048, "temperature": 2.0}, ("fsd", 0.3, 2.0, 2048)),
    ({"max_new_tokens": 4}, ("fsd", 0.3, 0.0, 4)),
    ({"acceptance": "regret", "threshold": 20.0}, ("regret", 20.0, 0.0, 256)),
    ({"acceptance": "fsd+fly", "threshold": 0.5}, ("fsd+fly", 0.5, 0.0, 256)),
    ({"acceptance": "exact", "threshold": 0.0}, ("exact", 0.0, 0.0, 256)),
    ({"threshold": float("inf")}, ("fsd", 1e6, 0.0, 256)),
])
def test_whatever_the_server_was_started_with_is_among_the_settings(defaults, shown):
    found = settings_of(defaults)
    assert tuple(each["value"] for each in found.values()) == shown
    assert found["rule"]["value"] in found["rule"]["choices"] and {*RULES} <= {*found["rule"]["choices"]}
    for name in ("dial", "temperature", "length"):
        assert found[name]["minimum"] <= found[name]["value"] <= found[name]["maximum"]
    service = SimpleNamespace(name="tiny", defaults=defaults)
    parts = [each for each in build(service).blocks.values() if isinstance(each, (gradio.Slider, gradio.Dropdown))]
    for part in parts:  # what the page sends as it stands
        assert part.preprocess(part.value) == part.value
    assert len(parts) == 4


@pytest.mark.parametrize("rule", [*RULES, "fsd+fly", "regret+relaxed"])
def test_the_dial_ends_where_the_rule_allows(rule):
    end = dial_end(rule)
    assert make_rule(rule, end).threshold == end and (end > 0) == (rule != "exact")
    assert dial_end("regret") > dial_end("fsd") == 1.0
    settings = settings_of({"acceptance": "regret", "threshold": 80.0})
    found = dial_of(rule, settings)
    assert 0 <= found["value"] <= found["maximum"] > 0
    assert dial_of("regret", settings) == {"maximum": 80.0, "value": 80.0}


@pytest.fixture(scope="module")
def engine():
    with eagle_fsd.Engine(tiny_chat_pair(), max_rows=2) as made:
        yield made


def page_of(engine, **defaults):
    return Page(Service(engine, "tiny", defaults, 60.0))


def states(page, said=None, asked="hi", rule="fsd", dial=0.3, length=20, beside=False, until=None):
    """Those of the page while an answer is made; `until`: it is stopped at the first for which this holds."""
    async def read():
        found = []
        going = page.answer(asked, said or nothing_said(), rule, dial, 0.0, length, beside)
        async for state in going:
            found.append(state)
            if until is not None and until(state):
                await going.aclose()
                break
        return found
    return asyncio.run(read())


def test_what_the_page_sends_can_be_answered(engine):
    for defaults, rule, dial in (({"acceptance": "fsd+fly", "threshold": 0.5, "gate_threshold": 0.4}, "fsd+fly", 0.5),
                                 ({"acceptance": "regret", "threshold": 20.0}, "regret", 20.0),
                                 ({"acceptance": "fsd+fly", "threshold": 0.5}, "exact", 0.5)):
        _, html, said = states(page_of(engine, **defaults), rule=rule, dial=dial)[-1]
        assert "alert" not in html and [each["role"] for each in said["messages"]] == ["user", "assistant"]


def test_the_gate_that_the_server_was_given_stays(engine):
    page = page_of(engine, acceptance="fsd+fly", threshold=0.5, gate_threshold=0.4)
    assert page.chosen("fsd+fly", 0.2) == {"threshold": 0.2}
    assert page.chosen("fsd", 0.2) == {"acceptance": "fsd", "threshold": 0.2}
    assert page.chosen("exact", 0.2) == {"acceptance": "exact"}


def test_stop_keeps_what_was_said(engine, monkeypatch):
    monkeypatch.setattr("eagle_fsd.serve.page.REFRESH", 0)
    page = page_of(engine, ignore_eos=True)
    *_, (_, _, said) = states(page, length=60, until=lambda state: "token" in state[1])
    question, answer = said["messages"]
    assert question["content"] == "hi" and answer["content"] and len(said["turns"]) == 1
    html, said = stopped(said)
    assert answer["content"][:1] in html and WAITING not in html
    *_, (_, html, later) = states(page, said, asked="ho")
    assert len(later["turns"]) == 2 and [each["role"] for each in later["messages"]] == ["user", "assistant"] * 2


def test_stop_before_the_first_token(engine):
    (_, _, said), *_ = states(page_of(engine), until=lambda state: True)
    assert said["messages"] == [] and WAITING in said["turns"][0]
    html, said = stopped(said)
    assert "stopped" in html and WAITING not in html


@pytest.mark.parametrize(("error", "told"), [(eagle_fsd.QueueFull("2 requests wait"), "2 requests wait"),
                                             (RuntimeError("a secret"), "log says why")])
def test_a_second_answer_that_fails_ends_the_first(engine, monkeypatch, error, told):
    page, submit, asked = page_of(engine), engine.submit, []

    def second_fails(*args, **options):
        asked.append(None)
        if len(asked) == 2:
            raise error
        return submit(*args, **options)

    monkeypatch.setattr(engine, "submit", second_fails)
    *_, (_, html, said) = states(page, beside=True)
    assert told in html and "secret" not in html and WAITING not in html and said["messages"] == []
