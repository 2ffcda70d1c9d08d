"""The page: a chat with sliders for threshold, guard and temperature, and tokens coloured by source."""

from __future__ import annotations

import asyncio
import hmac
import html
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gradio
from fastapi import FastAPI
from fastapi.responses import RedirectResponse, Response
from transformers import PreTrainedTokenizerBase

from ..acceptance import RULES
from ..batching.engine import Engine
from ..batching.tickets import EngineClosed, Piece, QueueFull, Ticket
from ..decoding.output import Output, Receipt
from ..utils.checks import is_check
from ..utils.text import GrowingText
from .protocol import Refusal, options_over

log = logging.getLogger(__name__)
PATH = "/page"
Slot = Callable[[], AbstractAsyncContextManager]  # takes a place for a request in progress
REFRESH = 0.1  # seconds between updates while an answer is generated
WAITING, STOPPED = '<span class="hint">…</span>', '<span class="hint">stopped</span>'
CONVERSATIONS = 256  # kept at once, some hundred KB each; the one that was used least recently is dropped
SCALES = {"lenience": 3.0, "relaxed": 4.0}  # upper end of the threshold slider where that is not 1, by rule
LONGEST = 1024  # upper end of the length slider in tokens, unless the server's own limit is larger
SOURCES = {  # of a token, with the text of the legend
    "target": "the target’s own", "head": "the target’s own, drafted by the head",
    "copy": "the target’s own, copied from the text", "grammar": "the target’s own, forced by the grammar",
    "fuzzy": "drafted, not the target’s own",
}
LEGEND = ('<div class="eagle legend"><ul>' + "".join(
    f'<li><span class="token {name}">word</span> {meaning}</li>' for name, meaning in SOURCES.items()) + "</ul>"
    '<p class="hint">Point at a word or tap it for its divergence and probability; Tab moves between fuzzy ones.</p>'
    "</div>")


@dataclass
class Shown:
    """An answer as the page shows it.

    Args:
        question: the user's message.
    """

    question: str
    tokenizer: PreTrainedTokenizerBase
    tokens: list[tuple[str, Receipt]] = field(default_factory=list)  # the text that each token adds, and its receipt
    cycles: int = 0
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    output: Output | None = None  # set at the end
    error: str = ""

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.tokenizer)

    def add(self, piece: Piece) -> None:
        """Add the tokens of one cycle."""
        self.tokens += [(self.growing.add(token), receipt)
                        for token, receipt in zip(piece.token_ids, piece.receipts, strict=True)]
        self.cycles += bool(piece.token_ids)
        self.seconds = time.perf_counter() - self.began

    def end(self, output: Output) -> None:
        """Add the rest of the text and the engine's statistics."""
        if self.tokens:
            text, receipt = self.tokens[-1]
            self.tokens[-1] = (text + self.growing.pending(), receipt)
        self.output = output

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.tokens)

    @property
    def html(self) -> str:
        """The question, the answer, and its statistics."""
        body = "".join(token_html(*token) for token in self.tokens)
        error = f'<p class="error" role="alert">{html.escape(self.error)}</p>' if self.error else ""
        return (f'<div class="question">{html.escape(self.question)}</div><section class="answer" aria-label="Answer">'
                f'<div class="text">{body or ("" if error or self.output else WAITING)}</div>{error}'
                f'<p class="statistics">{self.statistics}</p></section>')

    @property
    def statistics(self) -> str:
        """Speed, tau and number of fuzzy tokens, so far."""
        count = len(self.tokens)
        if not count:
            return "&nbsp;"
        tau = (count - 1) / (self.cycles - 1) if self.cycles > 1 else 1.0
        ended = ""
        if self.output is not None:
            tau, ended = self.output.stats.mean_accepted_length, f" · ended by {self.output.finish_reason}"
        fuzzy = sum(receipt.source == "fuzzy" for _, receipt in self.tokens)
        speed = count / self.seconds if self.seconds else 0.0
        return f"{speed:.1f} tokens/s · tau {tau:.2f} · {count} tokens · {fuzzy} fuzzy{ended}"


def token_html(text: str, receipt: Receipt) -> str:
    """A token in the colour of its source, with the figures of its receipt as a tooltip."""
    if not text:
        return ""
    divergence = "" if receipt.divergence is None else f" · divergence {receipt.divergence:.3f}"
    drafter = "" if receipt.drafter is None else f" · drafted by {receipt.drafter}"
    tip = f"{text!r} · {receipt.source}{drafter}{divergence} · probability {math.exp(receipt.logprob):.3f}"
    focus = 0 if receipt.source == "fuzzy" else -1
    colour = {"text": "copy"}.get(receipt.drafter, receipt.drafter) if receipt.source == "exact" else receipt.source
    return (f'<span class="token {colour}" tabindex="{focus}" data-tip="{html.escape(tip)}">'
            f"{html.escape(text)}</span>")


def page_html(turns: list[str]) -> str:
    inside = "".join(turns) or ('<p class="hint">Ask something. The threshold sets how far the text may differ from '
                                "the target’s own.</p>")
    return f'<div class="eagle log" role="log" aria-label="Conversation"><div>{inside}</div></div>'


async def answer(
    engine: Engine, defaults: Mapping[str, Any], question: str, conversation: dict, threshold: float, guard: float,
    temperature: float, length: float, slot: Slot = nullcontext,
) -> AsyncIterator[tuple[str, str, dict]]:
    """Answer a question, and yield the text of the input field, the page, and the conversation as the answer grows.

    Args:
        defaults: decoding options of the server.
        conversation: messages and turns so far.
        slot: takes a place for a request in progress.
    """
    if not question.strip():
        yield question, page_html(conversation["turns"]), conversation
        return
    messages = [*conversation["messages"], {"role": "user", "content": question}]
    shown = Shown(question, engine.model.tokenizer)
    options = {"temperature": float(temperature), "max_new_tokens": int(length), "seed": time.time_ns() % 2**48}
    own = rule_fields(defaults)
    options |= {name: float(value) for name, value in (("threshold", threshold), ("head_guard", guard)) if name in own}

    def state() -> tuple[str, str, dict]:
        """Includes the unfinished answer, which stays if the user stops it."""
        answered = [*messages, {"role": "assistant", "content": shown.text}]
        turns = [*conversation["turns"], shown.html]
        return "", page_html(turns), {"messages": answered if shown.text else conversation["messages"], "turns": turns}

    yield state()
    ticket: Ticket | None = None
    try:
        async with slot():
            ticket = await asyncio.to_thread(engine.submit, messages, options_over(defaults, options), fit=True)
            last = time.perf_counter()
            async for piece in ticket:
                shown.add(piece)
                if time.perf_counter() - last > REFRESH:
                    yield state()
                    last = time.perf_counter()
            shown.end(await ticket)
    except Refusal as error:
        shown.error = error.detail
    except Exception as error:
        expected = is_check(error) or isinstance(error, (QueueFull, EngineClosed))
        if not expected:
            log.error("an answer failed", exc_info=error)
        shown.error = str(error) if expected else "The answer failed; see the server's log."
    finally:
        if ticket is not None:
            ticket.cancel()
    yield state()


def stopped(conversation: dict) -> tuple[str, dict]:
    """The page and the conversation after Stop; answers that had not begun are marked as stopped."""
    conversation = {**conversation, "turns": [turn.replace(WAITING, STOPPED) for turn in conversation["turns"]]}
    return page_html(conversation["turns"]), conversation


def new_conversation() -> dict:
    return {"messages": [], "turns": []}


def rule_fields(defaults: Mapping[str, Any]) -> set[str]:
    """Names of the options of the server's rule; `exact` has none."""
    name = defaults.get("acceptance", "fsd")
    return set() if name == "exact" else {option.name for option in fields(RULES[name])}


def settings_of(defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values and ranges of the page's sliders. The ranges include the server's defaults."""
    name = str(defaults.get("acceptance", "fsd"))
    threshold, temperature = min(float(defaults.get("threshold") or 0.0), 1e6), float(defaults.get("temperature", 0.0))
    length = int(defaults.get("max_new_tokens", LONGEST))
    limit, included = RULES[name].threshold_limit
    end = max(0.01, min(SCALES.get(name, 1.0), limit if included else limit - 0.01), threshold)
    own = rule_fields(defaults)
    guard = defaults.get("head_guard", "default")
    guard = getattr(RULES[name], "head_guard", None) if guard == "default" else guard
    return {
        "threshold": {"value": threshold, "maximum": end, "step": 0.01, "visible": "threshold" in own},
        "guard": {"value": 1.0 if guard is None else guard, "maximum": 1, "step": 0.05,
                  "visible": "head_guard" in own},
        "temperature": {"value": temperature, "maximum": max(1.5, temperature), "step": 0.05},
        "length": {"value": length, "maximum": max(LONGEST, length), "step": 1},
    }


def build(engine: Engine, name: str, defaults: Mapping[str, Any], slot: Slot = nullcontext) -> gradio.Blocks:
    """Build the page."""
    settings = settings_of(defaults)

    async def answers(*inputs: Any) -> AsyncIterator[tuple[str, str, dict]]:
        async for state in answer(engine, defaults, *inputs, slot):
            yield state

    with gradio.Blocks(title=f"eagle_fsd · {name}", analytics_enabled=False, fill_width=True) as blocks:
        blocks.state_session_capacity = CONVERSATIONS  # as `launch` sets it, which a mounted page does not call
        conversation = gradio.State(new_conversation())
        with gradio.Row():
            with gradio.Column(scale=3, min_width=320):
                shown = gradio.HTML(page_html([]), elem_id="conversation")
                question = gradio.Textbox(label="Your message", lines=1, max_lines=8, autofocus=True, submit_btn=False,
                                          placeholder="Enter sends, Shift+Enter starts a new line")
                with gradio.Row():
                    send = gradio.Button("Send", variant="primary", min_width=80)
                    stop = gradio.Button("Stop", min_width=80)
                    clear = gradio.Button("New", min_width=80)
            with gradio.Column(scale=1, min_width=280):
                threshold = gradio.Slider(label="Threshold", minimum=0, **settings["threshold"],
                                          info="0: the target’s own text. Higher: more drafted tokens are accepted.")
                guard = gradio.Slider(label="Head guard", minimum=0, **settings["guard"],
                                      info="A fuzzy token needs 1 - guard of the best one’s probability. 1: no guard.")
                temperature = gradio.Slider(label="Temperature", info="0: greedy", minimum=0, **settings["temperature"])
                length = gradio.Slider(label="Length", info="most tokens of an answer", minimum=1,
                                       **settings["length"])
                gradio.HTML(f'<div class="eagle"><p class="model">{html.escape(name)}</p></div>')
                gradio.HTML(LEGEND)

        quiet = {"api_visibility": "private", "show_progress": "hidden"}
        inputs = [question, conversation, threshold, guard, temperature, length]
        outputs = [question, shown, conversation]
        running = gradio.on([send.click, question.submit], answers, inputs, outputs, concurrency_limit=None, **quiet)
        stop.click(stopped, [conversation], [shown, conversation], cancels=[running], **quiet)
        clear.click(lambda: ("", page_html([]), new_conversation()), None, outputs, cancels=[running], **quiet)
    return blocks


def mount_page(
    app: FastAPI, engine: Engine, name: str, defaults: Mapping[str, Any], key: str | None, slot: Slot
) -> None:
    """Add the page at `PATH`, with and without a trailing slash. The API key, if there is one, is its password."""
    app.add_api_route(PATH, lambda: RedirectResponse(PATH + "/"), include_in_schema=False)
    app.add_api_route("/favicon.ico", lambda: Response(status_code=204), include_in_schema=False)  # browsers request it
    login: dict[str, Any] = {} if key is None else {
        "auth": lambda user, password: hmac.compare_digest(password.encode(), key.encode()),
        "auth_message": "Any user name; the password is the server’s API key.",
    }
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gradio.mount_gradio_app(
        app, build(engine, name, defaults, slot).queue(default_concurrency_limit=None, max_size=64), PATH, theme=theme,
        max_file_size=0,  # no uploads
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"), ssr_mode=False, footer_links=[],
        enable_monitoring=False, pwa=False, mcp_server=False, **login,
    )
