"""The page: a chat with threshold, guard and temperature beside it, and tokens coloured by where they come from."""

from __future__ import annotations

import asyncio
import hmac
import html
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
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
from ..text import GrowingText
from .protocol import options_over

log = logging.getLogger(__name__)
PATH = "/page"
REFRESH = 0.1  # seconds between two states of the page while an answer grows
USUAL_GUARD = 0.7
WAITING, STOPPED = '<span class="hint">…</span>', '<span class="hint">stopped</span>'
LONGEST = 1024  # tokens that an answer may be asked to have, unless the server's own limit is larger
SOURCES = {  # of a token: what the legend says of it
    "target": "the target’s own", "head": "the target’s own, drafted by the head",
    "copy": "the target’s own, copied from the text", "grammar": "the target’s own, forced by the grammar",
    "fuzzy": "drafted, and not the target’s own",
}
LEGEND = ('<div class="eagle legend"><ul>' + "".join(
    f'<li><span class="token {name}">word</span> {meaning}</li>' for name, meaning in SOURCES.items()) + "</ul>"
    '<p class="hint">Point at a word, tap it, or go to a fuzzy one by Tab, for its divergence and probability.</p>'
    "</div>")


@dataclass
class Shown:
    """An answer as the page shows it.

    Args:
        asked: the message that it answers.
    """

    asked: str
    tokenizer: PreTrainedTokenizerBase
    tokens: list[tuple[str, Receipt]] = field(default_factory=list)  # what each token adds to the text
    cycles: int = 0
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    output: Output | None = None  # once it has ended
    wrong: str = ""

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.tokenizer)

    def add(self, piece: Piece) -> None:
        """What a cycle emitted."""
        self.tokens += [(self.growing.add(token), receipt)
                        for token, receipt in zip(piece.token_ids, piece.receipts, strict=True)]
        self.cycles += bool(piece.token_ids)
        self.seconds = time.perf_counter() - self.began

    def end(self, output: Output) -> None:
        """The answer is whole: what is left of its text, and the engine's own figures."""
        if self.tokens:
            text, receipt = self.tokens[-1]
            self.tokens[-1] = (text + self.growing.pending(), receipt)
        self.output = output

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.tokens)

    @property
    def html(self) -> str:
        """The message and the answer with its figures."""
        body = "".join(token_html(*token) for token in self.tokens)
        wrong = f'<p class="wrong" role="alert">{html.escape(self.wrong)}</p>' if self.wrong else ""
        return (f'<div class="asked">{html.escape(self.asked)}</div><section class="answer" aria-label="Answer">'
                f'<div class="text">{body or ("" if wrong or self.output else WAITING)}</div>{wrong}'
                f'<p class="cost">{self.cost}</p></section>')

    @property
    def cost(self) -> str:
        """Speed, tau and the share of fuzzy tokens, so far."""
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
    """A token in the colour of its source, with what is known of it."""
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
    inside = "".join(turns) or ('<p class="hint">Ask something. The threshold says how far the text may go from the '
                                "target’s own.</p>")
    return f'<div class="eagle log" role="log" aria-label="Conversation"><div>{inside}</div></div>'


async def answer(
    engine: Engine, defaults: Mapping[str, Any], asked: str, conversation: dict, threshold: float, guard: float,
    temperature: float, length: float,
) -> AsyncIterator[tuple[str, str, dict]]:
    """The conversation as it grows: what stands in the field, the page, and the state.

    Args:
        defaults: options of decoding that the server was started with.
        conversation: its messages and turns so far.
    """
    if not asked.strip():
        yield asked, page_html(conversation["turns"]), conversation
        return
    messages = [*conversation["messages"], {"role": "user", "content": asked}]
    shown = Shown(asked, engine.model.tokenizer)
    given = {"temperature": float(temperature), "max_new_tokens": int(length), "seed": time.time_ns() % 2**48}
    own = rule_fields(defaults)
    given |= {name: float(value) for name, value in (("threshold", threshold), ("head_guard", guard)) if name in own}

    def state() -> tuple[str, str, dict]:
        """Also of an answer that is being made: it stays where it is stopped."""
        answered = [*messages, {"role": "assistant", "content": shown.text}]
        turns = [*conversation["turns"], shown.html]
        return "", page_html(turns), {"messages": answered if shown.text else conversation["messages"], "turns": turns}

    yield state()
    ticket: Ticket | None = None
    try:
        ticket = await asyncio.to_thread(engine.submit, messages, options_over(defaults, given), fit=True)
        last = time.perf_counter()
        async for piece in ticket:
            shown.add(piece)
            if time.perf_counter() - last > REFRESH:
                yield state()
                last = time.perf_counter()
        shown.end(await ticket)
    except (ValueError, TypeError, QueueFull, EngineClosed) as error:
        shown.wrong = str(error)
    except Exception as error:
        log.error("an answer failed", exc_info=error)
        shown.wrong = "The answer failed; the server's log says why."
    finally:
        if ticket is not None:
            ticket.cancel()
    yield state()


def stopped(conversation: dict) -> tuple[str, dict]:
    """The page and the state after Stop: what had not begun to be answered waits for nothing."""
    conversation = {**conversation, "turns": [turn.replace(WAITING, STOPPED) for turn in conversation["turns"]]}
    return page_html(conversation["turns"]), conversation


def new_conversation() -> dict:
    return {"messages": [], "turns": []}


def rule_fields(defaults: Mapping[str, Any]) -> set[str]:
    """The options of the server's rule; `exact` has none."""
    name = defaults.get("acceptance", "fsd")
    return set() if name == "exact" else {each.name for each in fields(RULES[name])}


def settings_of(defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Value and range of the page's sliders: whatever the server was started with lies in them. Without a threshold
    it starts at 0."""
    name = str(defaults.get("acceptance", "fsd"))
    threshold, heat = min(float(defaults.get("threshold") or 0.0), 1e6), float(defaults.get("temperature", 0.0))
    length = int(defaults.get("max_new_tokens", LONGEST))
    limit, included = RULES[name].threshold_limit
    end = max(0.01, min(RULES[name].threshold_scale, limit if included else limit - 0.01), threshold)
    guard, own = defaults.get("head_guard", "default"), rule_fields(defaults)
    return {
        "threshold": {"value": threshold, "maximum": end, "step": 0.01, "visible": "threshold" in own},
        "guard": {"value": {"default": USUAL_GUARD, None: 1.0}.get(guard, guard), "maximum": 1, "step": 0.05,
                  "visible": "head_guard" in own},
        "temperature": {"value": heat, "maximum": max(1.5, heat), "step": 0.05},
        "length": {"value": length, "maximum": max(LONGEST, length), "step": 1},
    }


def build(engine: Engine, name: str, defaults: Mapping[str, Any]) -> gradio.Blocks:
    """The page's parts and what they do."""
    settings = settings_of(defaults)

    async def answers(*inputs: Any) -> AsyncIterator[tuple[str, str, dict]]:
        async for state in answer(engine, defaults, *inputs):
            yield state

    with gradio.Blocks(title=f"eagle_fsd · {name}", analytics_enabled=False, fill_width=True) as blocks:
        conversation = gradio.State(new_conversation())
        with gradio.Row():
            with gradio.Column(scale=3, min_width=320):
                shown = gradio.HTML(page_html([]), elem_id="conversation")
                asked = gradio.Textbox(label="Your message", lines=1, max_lines=8, autofocus=True,
                                       placeholder="Enter sends, Shift+Enter begins a line", submit_btn=False)
                with gradio.Row():
                    send = gradio.Button("Send", variant="primary", min_width=80)
                    stop = gradio.Button("Stop", min_width=80)
                    clear = gradio.Button("New", min_width=80)
            with gradio.Column(scale=1, min_width=280):
                threshold = gradio.Slider(label="Threshold", minimum=0, **settings["threshold"],
                                          info="0: the target’s own text. More: more drafted tokens pass.")
                guard = gradio.Slider(label="Head guard", minimum=0, **settings["guard"],
                                      info="A fuzzy token needs 1 - this of the best one’s probability. 1: no guard.")
                temperature = gradio.Slider(label="Temperature", info="0: greedy", minimum=0, **settings["temperature"])
                length = gradio.Slider(label="Length", info="tokens of an answer, at most", minimum=1,
                                       **settings["length"])
                gradio.HTML(f'<div class="eagle"><p class="model">{html.escape(name)}</p></div>')
                gradio.HTML(LEGEND)

        quiet = {"api_visibility": "private", "show_progress": "hidden"}
        inputs, outputs = [asked, conversation, threshold, guard, temperature, length], [asked, shown, conversation]
        running = gradio.on([send.click, asked.submit], answers, inputs, outputs, concurrency_limit=None, **quiet)
        stop.click(stopped, [conversation], [shown, conversation], cancels=[running], **quiet)
        clear.click(lambda: ("", page_html([]), new_conversation()), None, outputs, cancels=[running], **quiet)
    return blocks


def mount_page(app: FastAPI, engine: Engine, name: str, defaults: Mapping[str, Any], key: str | None) -> None:
    """Adds the page at `PATH`, with and without a slash at its end; with a key, it asks for that as a password."""
    app.add_api_route(PATH, lambda: RedirectResponse(PATH + "/"), include_in_schema=False)
    app.add_api_route("/favicon.ico", lambda: Response(status_code=204), include_in_schema=False)  # browsers ask for it
    login: dict[str, Any] = {} if key is None else {
        "auth": lambda user, password: hmac.compare_digest(password.encode(), key.encode()),
        "auth_message": "Any user name; the password is the server’s API key.",
    }
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gradio.mount_gradio_app(
        app, build(engine, name, defaults).queue(default_concurrency_limit=None, max_size=64), PATH, theme=theme,
        max_file_size=0,  # it takes none
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"), ssr_mode=False, footer_links=[],
        enable_monitoring=False, pwa=False, mcp_server=False, **login,
    )
