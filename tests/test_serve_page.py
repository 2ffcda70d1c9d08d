"""The page: its settings and turns without a browser, and in headless Chromium with every outside address blocked."""

import asyncio
import re
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import httpx
import pytest
from served import served, wait_for_health
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.acceptance import RULES, make_rule
from eagle_fsd.serve.app import Service

gradio = pytest.importorskip("gradio")
from eagle_fsd.serve.page import (  # noqa: E402, it needs gradio
    WAITING,
    Page,
    build,
    has_guard,
    nothing_said,
    settings_of,
    stopped,
    threshold_end,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize(("defaults", "shown"), [
    ({}, ("fsd", 0.0, 0.7, 0.0, 256)),  # lossless
    ({"threshold": 0.5, "head_guard": None}, ("fsd", 0.5, 1.0, 0.0, 256)),
    ({"max_new_tokens": 2048, "temperature": 2.0}, ("fsd", 0.0, 0.7, 2.0, 2048)),
    ({"max_new_tokens": 4, "acceptance": "exact", "threshold": 0.0}, ("exact", 0.0, 0.7, 0.0, 4)),
    ({"threshold": float("inf"), "head_guard": 0.33}, ("fsd", 1e6, 0.33, 0.0, 256)),
])
def test_whatever_the_server_was_started_with_is_among_the_settings(defaults, shown):
    found = settings_of(defaults)
    assert tuple(each["value"] for each in found.values()) == shown
    service = SimpleNamespace(name="tiny", defaults=defaults)
    parts = [each for each in build(service).blocks.values() if isinstance(each, (gradio.Slider, gradio.Dropdown))]
    assert len(parts) == 5
    for part in parts:  # what the page sends as it stands
        assert part.preprocess(part.value) == part.value


@pytest.mark.parametrize("rule", RULES)
def test_a_threshold_ends_where_the_rule_allows(rule):
    if rule != "exact":
        assert make_rule(rule, threshold_end(rule)).threshold > 0
    assert has_guard(rule) == hasattr(make_rule(rule), "head_guard")


@pytest.fixture(scope="module")
def engine():
    with eagle_fsd.Engine(tiny_chat_pair(), max_rows=2) as made:
        yield made


def page_of(engine, **defaults):
    return Page(Service(engine, "tiny", defaults, 60.0))


def states(page, said=None, asked="hi", rule="fsd", threshold=0.3, length=20, beside=False, until=None):
    """Those of the page while an answer is made; `until`: it is stopped at the first for which this holds."""
    async def read():
        found = []
        going = page.answer(asked, said or nothing_said(), rule, threshold, 0.7, 0.0, length, beside)
        async for state in going:
            found.append(state)
            if until is not None and until(state):
                await going.aclose()
                break
        return found
    return asyncio.run(read())


def test_what_the_page_sends_can_be_answered(engine):
    page = page_of(engine, divergence="tv")
    for rule in ("fsd", "lenience", "exact"):
        _, html, said = states(page, rule=rule, threshold=0.4)[-1]
        assert "alert" not in html and [each["role"] for each in said["messages"]] == ["user", "assistant"]
    assert page.chosen("fsd", 0.2, 0.5) == {"threshold": 0.2, "head_guard": 0.5}  # the divergence stays
    assert page.chosen("exact", 0.2, 0.5) == {"acceptance": "exact"}


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
    (_, _, said), *_ = states(page, until=lambda state: True)  # before the first token
    html, _ = stopped(said)
    assert said["messages"] == [] and "stopped" in html and WAITING not in html


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


# In a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None or find_spec("playwright") is None:
        pytest.skip("needs chromium and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser):
    with served("--max-rows", "4", "--page") as found:
        yield found


@pytest.fixture
def opened(server, browser):
    """A function that opens the page; at the end nothing was asked for elsewhere."""
    contexts, outside = [], []

    def guard(route):
        if route.request.url.startswith((server.url, "data:", "blob:")):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    def open_page():
        context = browser.new_context()
        context.route("**/*", guard)
        contexts.append(context)
        page = context.new_page()
        page.goto(server.url + "/page/", timeout=30_000)
        page.get_by_label("Your message").wait_for(timeout=30_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert outside == []


def ask(page, text, answers=1):
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function("count => [...document.querySelectorAll('.cost')].filter(each => "
                           "each.textContent.includes('ended by')).length >= count", arg=answers, timeout=30_000)


def set_number(page, label, value):
    field = page.get_by_label(f"number input for {label}")
    field.fill(str(value))
    field.press("Tab")


@pytest.mark.slow
def test_a_prompt_is_answered_with_coloured_tokens(opened):
    """Losslessly, as the page starts; with a threshold some are fuzzy. Markup in a prompt stays text."""
    page = opened()
    ask(page, "<img src=x onerror=\"document.title='owned'\"> What is 17 plus 25?")
    tokens = page.locator(".answer .token")
    assert "".join(tokens.all_text_contents()) == page.locator(".text").text_content()
    assert re.search(r"tokens/s · tau \d+\.\d\d · \d+ tokens · 0 fuzzy", page.locator(".cost").text_content())
    drafted = page.locator(".token.exact").first
    drafted.hover()
    assert re.search(r"exact · (divergence [\d.]+ · )?probability [\d.]+", drafted.get_attribute("data-tip"))
    assert page.locator(".asked img").count() == 0 and "<img" in page.locator(".asked").text_content()
    assert page.title() != "owned"
    page.get_by_role("button", name="New").click()
    page.wait_for_function("() => !document.querySelector('.answer')")
    page.get_by_label("Side by side with exact").check()
    set_number(page, "Threshold", 0.69)
    set_number(page, "Head guard", 1)
    ask(page, "Write about a train that leaves at noon.", answers=2)
    assert page.locator("h3").all_text_contents() == ["exact", "fsd, 0.69"]
    assert page.locator(".token.fuzzy").count() > 0
    left, right = (each.text_content() for each in page.locator(".text").all())
    assert (page.locator(".token.differs").count() > 0) == (left.split() != right.split())


@pytest.mark.slow
def test_with_a_key_the_page_asks_for_it_and_stop_frees_the_row(browser):
    with served("--page", "--ignore-eos", key="a secret") as found:
        page = browser.new_context().new_page()
        page.goto(f"{found.url}/page/", timeout=30_000)
        for password in ("wrong", "a secret"):
            page.get_by_label("password").wait_for(timeout=30_000)
            page.get_by_label("username").fill("me")
            page.get_by_label("password").fill(password)
            page.get_by_role("button", name="Login").click()
            if password == "wrong":
                page.get_by_text("Incorrect Credentials").wait_for(timeout=30_000)
                page.reload()
        page.get_by_label("Your message").wait_for(timeout=30_000)
        set_number(page, "Longest answer (tokens)", 1024)
        for turns, end in ((1, lambda: page.get_by_role("button", name="Stop").click()), (2, page.close)):
            page.get_by_label("Your message").fill("What is 17 plus 25?")
            page.get_by_role("button", name="Send").click()
            wait_for_health(found, rows=1)
            page.locator(".answers").nth(turns - 1).locator(".token").first.wait_for(timeout=30_000)
            assert page.locator(".asked").count() == turns  # what was stopped stays
            end()
            wait_for_health(found, rows=0, seconds=2)
        assert httpx.post(f"{found.url}/page/gradio_api/upload", files={"files": b"x"}).status_code == 404
