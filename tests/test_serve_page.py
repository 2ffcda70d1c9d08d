"""The page: its settings and turns without a browser, and in headless Chromium with every outside address blocked."""

import asyncio
import re
import shutil
from html import unescape
from importlib.util import find_spec

import httpx
import pytest
from served import here, served, wait_for_health
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.serve.app import Service

gradio = pytest.importorskip("gradio")
from gradio.state_holder import StateHolder  # noqa: E402

from eagle_fsd.serve.page import (  # noqa: E402, needs gradio
    CONVERSATIONS,
    WAITING,
    answer,
    build,
    new_conversation,
    settings_of,
    stopped,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize(("defaults", "shown"), [
    ({}, (0.0, 0.7, 0.0, 1024)),  # lossless
    ({"threshold": 0.5, "head_guard": None}, (0.5, 1.0, 0.0, 1024)),
    ({"acceptance": "typical", "temperature": 2.0}, (0.0, 0.7, 2.0, 1024)),
    ({"acceptance": "exact", "threshold": 0.0, "max_new_tokens": 5000}, (0.0, 1.0, 0.0, 5000)),
    ({"acceptance": "fsd_paper", "threshold": 0.5}, (0.5, 1.0, 0.0, 1024)),  # has no guard by default
    ({"threshold": float("inf"), "head_guard": 0.33, "max_new_tokens": 9}, (1e6, 0.33, 0.0, 9)),
])
def test_whatever_the_server_was_started_with_is_among_the_settings(defaults, shown):
    found = settings_of(defaults)
    assert tuple(each["value"] for each in found.values()) == shown
    assert found["guard"]["visible"] == (defaults.get("acceptance") != "exact")
    blocks = build(None, "a <tiny> model", defaults).blocks.values()
    assert any("a &lt;tiny&gt; model" in str(each.value) for each in blocks if isinstance(each, gradio.HTML))
    sliders = [each for each in blocks if isinstance(each, gradio.Slider)]
    assert len(sliders) == 4
    for slider in sliders:  # what the page sends as it stands
        assert slider.preprocess(slider.value) == slider.value


@pytest.fixture(scope="module")
def engine():
    with eagle_fsd.Engine(tiny_chat_pair(), max_rows=2) as made:
        yield made


def states(engine, said=None, asked="hi", until=None, **defaults):
    """Those of the page while an answer is made; `until`: it is stopped at the first for which this holds."""
    defaults = {"max_new_tokens": 40, **defaults}

    async def read():
        sliders = 0.3, 0.7, 0.0, defaults["max_new_tokens"]
        found, going = [], answer(engine, defaults, asked, said or new_conversation(), *sliders)
        async for state in going:
            found.append(state)
            if until is not None and until(state):
                await going.aclose()
                break
        return found
    return asyncio.run(read())


@pytest.mark.parametrize("defaults", [{"divergence": "tv"}, {"acceptance": "lenience"}, {"acceptance": "exact"}])
def test_what_the_page_sends_can_be_answered(engine, defaults):
    _, html, said = states(engine, **defaults)[-1]
    assert "alert" not in html and [each["role"] for each in said["messages"]] == ["user", "assistant"]


def test_stop_keeps_what_was_said(engine, monkeypatch):
    monkeypatch.setattr("eagle_fsd.serve.page.REFRESH", 0)
    *_, (_, _, said) = states(engine, ignore_eos=True, until=lambda state: "token" in state[1])
    question, answered = said["messages"]
    assert question["content"] == "hi" and answered["content"] and len(said["turns"]) == 1
    html, said = stopped(said)
    assert answered["content"][:1] in html and WAITING not in html
    *_, (_, html, later) = states(engine, said, asked="ho")
    assert len(later["turns"]) == 2 and [each["role"] for each in later["messages"]] == ["user", "assistant"] * 2
    (_, _, said), *_ = states(engine, until=lambda state: True)  # before the first token
    html, _ = stopped(said)
    assert said["messages"] == [] and "stopped" in html and WAITING not in html


@pytest.mark.parametrize(("error", "told"), [(eagle_fsd.QueueFull("2 requests wait"), "2 requests wait"),
                                             (RuntimeError("a secret"), "see the server's log")])
def test_an_answer_that_fails_says_so(engine, monkeypatch, error, told):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(engine, "submit", fails)
    *_, (_, html, said) = states(engine)
    assert told in unescape(html) and "secret" not in html and WAITING not in html and said["messages"] == []


def test_conversations_of_visitors_are_bounded(engine):
    holder = StateHolder()
    holder.set_blocks(build(engine, "tiny", {}))
    for visitor in range(CONVERSATIONS + 20):
        holder[str(visitor)]
    assert len(holder.session_data) <= CONVERSATIONS + 1 and str(visitor) in holder and "0" not in holder


def test_the_page_takes_a_place_as_other_requests_do(engine, monkeypatch):
    monkeypatch.setattr("eagle_fsd.serve.page.REFRESH", 0)
    service = Service(engine, "tiny", {}, connections=1)

    async def twice():
        sliders = 0.3, 0.7, 0.0, 40
        first = answer(engine, {}, "hi", new_conversation(), *sliders, service.slot)
        second = answer(engine, {}, "ho", new_conversation(), *sliders, service.slot)
        while "token" not in (await anext(first))[1]:
            pass
        refused = [state async for state in second][-1]
        await first.aclose()
        return refused, [state async for state in answer(engine, {}, "ho", new_conversation(), *sliders, service.slot)]

    (_, html, _), states_after = asyncio.run(twice())
    assert "already handles 1 requests (max_connections)" in html and "alert" not in states_after[-1][1]


def test_it_takes_no_files_and_asks_for_the_key():
    with here(page=True, key="a secret") as found:
        answered = httpx.get(f"{found.url}/page/")
        assert httpx.get(f"{found.url}/page").headers["location"] == "/page/"
        assert answered.status_code == 200 and "default-src 'self'" in answered.headers["content-security-policy"]
        with httpx.Client(base_url=f"{found.url}/page") as client:
            assert client.post("/login", data={"username": "me", "password": "wrong"}).status_code == 400
            assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 401
            assert client.post("/login", data={"username": "me", "password": "a secret"}).status_code == 200
            assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 413
            assert client.get("/gradio_api/file=/etc/passwd").status_code in (403, 404)
        assert httpx.get(f"{found.url}/v1/models").status_code == 401


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


def set_number(page, label, value):
    field = page.get_by_label(f"number input for {label}")
    field.fill(str(value))
    field.press("Tab")


@pytest.mark.slow
def test_the_page_in_a_browser(browser):
    """An answer in colours, lossless as the page starts; fuzzy with a threshold; Stop frees the row. Markup in a
    prompt stays text, and nothing is asked for elsewhere."""
    outside = []
    with served("--page", "--max-new-tokens", "60", "--ignore-eos") as found:
        def guard(route):
            if route.request.url.startswith((found.url, "data:", "blob:")):
                route.continue_()
            else:
                outside.append(route.request.url)
                route.abort()

        context = browser.new_context()
        context.route("**/*", guard)
        page = context.new_page()
        page.goto(found.url + "/page/", timeout=30_000)
        message = page.get_by_label("Your message")
        message.wait_for(timeout=30_000)

        def ask(text):
            message.fill(text)
            page.keyboard.press("Enter")
            page.wait_for_function("document.querySelector('.statistics')?.textContent.includes('ended by')",
                                   timeout=60_000)

        ask("<img src=x onerror=\"document.title='owned'\"> What is 17 plus 25?")
        tokens = page.locator(".answer .token")
        assert "".join(tokens.all_text_contents()) == page.locator(".text").text_content()
        assert re.search(r"tokens/s · tau \d+\.\d\d · 60 tokens · 0 fuzzy", page.locator(".statistics").text_content())
        assert re.search(r"exact · drafted by (head|text) · .*probability [\d.]+",
                         page.locator(".token.head, .token.copy").first.get_attribute("data-tip"))
        assert page.locator(".question img").count() == 0 and page.title() != "owned"
        page.get_by_role("button", name="New").click()
        page.wait_for_function("() => !document.querySelector('.answer')")
        set_number(page, "Threshold", 0.69)
        set_number(page, "Head guard", 1)
        ask("Write about a train that leaves at noon.")
        assert page.locator(".token.fuzzy").count() > 0
        message.fill("What is 17 plus 25?")
        page.get_by_role("button", name="Send").click()
        wait_for_health(found, rows=1)
        page.get_by_role("button", name="Stop").click()
        wait_for_health(found, rows=0, seconds=2)
        assert page.locator(".question").count() == 2  # what was stopped stays
    assert outside == []
