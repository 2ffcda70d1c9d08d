"""The page in headless Chromium, with every outside address blocked; skipped where there is no browser."""

import os
import re
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from served import served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [name for name in ("gradio", "playwright") if find_spec(name) is None] + ([] if CHROMIUM else ["chromium"])
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]
SHOTS = os.environ.get("EAGLE_FSD_SHOTS")  # a folder for screenshots to look at
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def server():
    with served("--max-rows", "4", "--page") as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


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

    def open_page(viewport=WIDE, scheme="light", url=None):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        context.route("**/*", guard)
        contexts.append(context)
        page = context.new_page()
        page.goto((url or server.url) + "/page/", timeout=30_000)
        page.get_by_label("Your message").wait_for(timeout=30_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert outside == []


def shot(page, name):
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


def ask(page, text, answers=1):
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("count => [...document.querySelectorAll('.cost')].filter(each => "
                           "each.textContent.includes('ended by')).length >= count", arg=answers, timeout=30_000)


def set_number(page, label, value):
    field = page.get_by_label(f"number input for {label}")
    field.fill(str(value))
    field.press("Tab")


def test_a_prompt_is_answered_with_coloured_tokens(opened):
    page = opened()
    ask(page, "What is 17 plus 25?")
    answer = page.locator(".answer")
    tokens = answer.locator(".token")
    assert tokens.count() > 4
    assert "".join(tokens.all_text_contents()) == answer.locator(".text").text_content()
    assert re.search(r"tokens/s · tau \d+\.\d\d · \d+ tokens", answer.locator(".cost").text_content())
    sources = {re.search(r"token (\w+)", each.get_attribute("class"))[1] for each in tokens.all()}
    assert {"target", "exact"} <= sources <= {"target", "exact", "fuzzy"}
    drafted = answer.locator(".token.exact").first
    drafted.hover()
    assert re.search(r"exact · (divergence [\d.]+ · )?probability [\d.]+", drafted.get_attribute("data-tip"))
    assert "probability" in drafted.evaluate("each => getComputedStyle(each, '::after').content")
    shot(page, "wide-light")


def test_the_dial_moves_the_text(opened):
    page = opened()
    set_number(page, "Dial (threshold)", 0)
    ask(page, "What is 17 plus 25?")
    assert " 0 fuzzy" in page.locator(".cost").text_content()
    page.get_by_role("button", name="New").click()
    page.wait_for_function("() => !document.querySelector('.answer')")
    set_number(page, "Dial (threshold)", 0.69)
    ask(page, "Write about a train that leaves at noon.")
    assert page.locator(".token.fuzzy").count() > 0
    assert page.locator("h3").text_content() == "fsd, 0.69"


def test_side_by_side_marks_the_words_that_differ(opened):
    page = opened()
    page.get_by_label("Side by side with exact").check()
    set_number(page, "Dial (threshold)", 0.69)
    ask(page, "Write about a train that leaves at noon.", answers=2)
    assert page.locator("h3").all_text_contents() == ["exact", "fsd, 0.69"]
    left, right = (each.text_content() for each in page.locator(".text").all())
    marked = page.locator(".token.differs").count()
    assert (marked > 0) == (left.split() != right.split())
    shot(page, "wide-light-beside")


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")],
                         ids=["wide-dark", "narrow-light", "narrow-dark"])
def test_it_fits_and_is_readable(opened, request, viewport, scheme):
    page = opened(viewport, scheme)
    page.get_by_label("Side by side with exact").check()
    set_number(page, "Dial (threshold)", 0.5)
    ask(page, "How many days are in 3 weeks?", answers=2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    fuzzy = page.locator(".token.fuzzy, .token.exact").first
    fuzzy.hover()
    text, ground = fuzzy.evaluate("each => [getComputedStyle(each).color, getComputedStyle(each).backgroundColor]")
    assert contrast(text, ground) >= 4.5
    shot(page, request.node.callspec.id)


def contrast(one, other):
    """Of two CSS colours, as WCAG 2 defines it."""
    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted(map(luminance, (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_is_enough(opened):
    page = opened()
    page.get_by_label("Your message").focus()
    page.keyboard.type("What is 6 plus 7?")
    page.keyboard.press("Enter")
    page.locator(".cost", has_text="ended by").wait_for(timeout=30_000)
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(document.activeElement.getAttribute('aria-label') || "
                                  "document.activeElement.textContent || '').trim()"))
    for wanted in ("Send", "Stop", "New"):
        assert wanted in reached
    assert any("Dial" in each for each in reached) and any("Rule" in each for each in reached)


def test_markup_in_a_prompt_stays_text(opened):
    page = opened()
    ask(page, "<img src=x onerror=\"document.title='owned'\"> What is 2 plus 2?")
    assert page.locator(".asked img").count() == 0 and "<img" in page.locator(".asked").text_content()
    assert page.title() != "owned"


def test_with_a_key_the_page_asks_for_it_and_stop_frees_the_row(browser):
    with served("--page", "--ignore-eos", key="a secret") as found:
        page = browser.new_context().new_page()
        page.goto(f"{found.url}/page/", timeout=30_000)
        page.get_by_label("password").wait_for(timeout=30_000)
        page.get_by_label("username").fill("me")
        page.get_by_label("password").fill("wrong")
        page.get_by_role("button", name="Login").click()
        page.get_by_text("Incorrect Credentials").wait_for(timeout=30_000)
        page.reload()
        page.get_by_label("password").wait_for(timeout=30_000)
        page.get_by_label("username").fill("me")
        page.get_by_label("password").fill("a secret")
        page.get_by_role("button", name="Login").click()
        page.get_by_label("Your message").wait_for(timeout=30_000)
        set_number(page, "Longest answer (tokens)", 1024)
        for turns, end in ((1, lambda: page.get_by_role("button", name="Stop").click()), (2, page.close)):
            page.get_by_label("Your message").fill("What is 17 plus 25?")
            page.get_by_role("button", name="Send").click()
            wait_for_rows(found, 1)
            page.locator(".answers").nth(turns - 1).locator(".token").first.wait_for(timeout=30_000)
            assert page.locator(".asked").count() == turns  # what was stopped stays
            end()
            wait_for_rows(found, 0, seconds=2)
        assert httpx.post(f"{found.url}/page/gradio_api/upload", files={"files": b"x"}).status_code == 404


def wait_for_rows(server, count, seconds=30):
    until = time.monotonic() + seconds
    while (rows := httpx.get(f"{server.url}/health").json()["rows"]) != count and time.monotonic() < until:
        time.sleep(0.02)
    assert rows == count
