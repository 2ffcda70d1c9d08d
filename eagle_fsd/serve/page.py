"""The page: a chat with the threshold beside it, tokens coloured by where they come from, two settings side by side."""

from __future__ import annotations

import asyncio
import difflib
import hmac
import html
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gradio
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ..acceptance import RULES
from ..engine.output import Output, Receipt
from ..text import GrowingText
from .app import Service, cancel
from .guards import Refusal
from .protocol import options_over
from .tickets import EngineClosed, QueueFull, Ticket, interleaved

log = logging.getLogger(__name__)
PATH = "/page"
REFRESH = 0.1  # seconds between two states of the page while an answer grows
LONGEST_ANSWER = 1024  # tokens, at the slider's end
USUAL_GUARD = 0.7
WAITING, STOPPED = '<span class="hint">…</span>', '<span class="hint">stopped</span>'
# Nothing is fetched from elsewhere, whatever the framework or a text would like to.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
LEGEND = ('<div class="eagle-legend legend eagle" style="min-height:0"><span class="token target">target’s own</span> '
          '<span class="token exact">drafted, as the target</span> <span class="token fuzzy">drafted, fuzzy</span> '
          '<span class="hint">Point at a token, tap it, or go to a fuzzy one by Tab, for its divergence and '
          "probability.</span></div>")


@dataclass
class Shown:
    """An answer as the page shows it.

    Args:
        title: the setting that it is made with.
    """

    title: str
    tokenizer: PreTrainedTokenizerBase
    tokens: list[tuple[str, Receipt]] = field(default_factory=list)  # what each token adds to the text
    cycles: int = 0
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    tau: float | None = None
    ended: str = ""
    wrong: str = ""

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.tokenizer)

    def add(self, ids: Sequence[int], receipts: Sequence[Receipt]) -> None:
        """What a cycle emitted."""
        self.tokens += [(self.growing.add(token), receipt) for token, receipt in zip(ids, receipts, strict=True)]
        self.cycles += bool(ids)
        self.seconds = time.perf_counter() - self.began

    def end(self, output: Output) -> None:
        """The answer is whole: what is left of its text, and the engine's own figures."""
        if self.tokens:
            text, receipt = self.tokens[-1]
            self.tokens[-1] = (text + self.growing.pending(), receipt)
        self.tau, self.ended = output.stats.mean_accepted_length, output.finish_reason

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.tokens)

    def html(self, differing: Sequence[tuple[int, int]] = ()) -> str:
        """The answer with its figures; `differing`: ranges of characters that are marked."""
        spans, at = [], 0
        for text, receipt in self.tokens:
            marked = any(start < at + len(text) and at < end for start, end in differing)
            spans.append(token_html(text, receipt, marked))
            at += len(text)
        body = "".join(spans) or (WAITING if not self.ended and not self.wrong else "")
        wrong = f'<p class="wrong" role="alert">{html.escape(self.wrong)}</p>' if self.wrong else ""
        return (f'<section class="answer" aria-label="{html.escape(self.title)}"><h3>{html.escape(self.title)}</h3>'
                f'<div class="text">{body}</div>{wrong}<p class="cost">{self.cost}</p></section>')

    @property
    def cost(self) -> str:
        """Speed, tau and the share of fuzzy tokens, so far."""
        count = len(self.tokens)
        if not count:
            return "&nbsp;"
        tau = self.tau if self.tau is not None else (count - 1) / (self.cycles - 1) if self.cycles > 1 else 1.0
        fuzzy = sum(receipt.source == "fuzzy" for _, receipt in self.tokens)
        speed = count / self.seconds if self.seconds else 0.0
        return (f"{speed:.1f} tokens/s · tau {tau:.2f} · {count} tokens · {fuzzy} fuzzy"
                + (f" · ended by {self.ended}" if self.ended else ""))


def token_html(text: str, receipt: Receipt, differs: bool) -> str:
    """A token in the colour of its source, with what is known of it."""
    if not text:
        return ""
    divergence = "" if receipt.divergence is None else f" · divergence {receipt.divergence:.3f}"
    tip = f"{text!r} · {receipt.source}{divergence} · probability {math.exp(receipt.logprob):.3f}"
    focus = 0 if receipt.source == "fuzzy" else -1
    kind = f"token {receipt.source}{' differs' if differs else ''}"
    return f'<span class="{kind}" tabindex="{focus}" data-tip="{html.escape(tip)}">{html.escape(text)}</span>'


def differences(one: str, other: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ranges of characters of the words that one text has and the other has not, in both."""
    words = [list(re.finditer(r"\S+", text)) for text in (one, other)]
    matcher = difflib.SequenceMatcher(None, *([word[0] for word in found] for found in words), autojunk=False)
    ranges: tuple[list, list] = ([], [])
    for kind, *bounds in matcher.get_opcodes():
        if kind != "equal":
            for mine, found, start, end in zip(ranges, words, bounds[::2], bounds[1::2], strict=True):
                mine += [word.span() for word in found[start:end]]
    return ranges


def turn_html(asked: str, answers: Sequence[Shown]) -> str:
    """A question with its answers; of two that have ended the differing words are marked."""
    marks: Sequence = [()] * len(answers)
    if len(answers) == 2 and all(answer.ended for answer in answers):
        marks = differences(answers[0].text, answers[1].text)
    shown = "".join(answer.html(mark) for answer, mark in zip(answers, marks, strict=True))
    return f'<div class="asked">{html.escape(asked)}</div><div class="answers">{shown}</div>'


def page_html(turns: Sequence[str]) -> str:
    inside = "".join(turns) or ('<p class="hint">Ask something. The threshold says how far the text may go from the '
                                "target’s own.</p>")
    return f'<div class="eagle" role="log" aria-label="Conversation">{inside}</div>'


class Page:
    """The handlers of the page."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def answer(
        self, asked: str, said: dict, rule: str, threshold: float, guard: float, temperature: float, length: int,
        beside: bool,
    ) -> AsyncIterator[tuple[str, str, dict]]:
        """The conversation as it grows: what stands in the field, the page, and the state.

        Args:
            said: messages and turns of the conversation so far.
            beside: answer with `exact` too.
        """
        if not asked.strip():
            yield asked, page_html(said["turns"]), said
            return
        messages = [*said["messages"], {"role": "user", "content": asked}]
        title = rule if rule == "exact" else f"{rule}, {threshold:g}"
        settings = [("exact", {"acceptance": "exact"})] if beside else []
        settings.append((title, self.chosen(rule, threshold, guard)))
        answers = [Shown(name, self.service.engine.model.tokenizer) for name, _ in settings]
        common = {"temperature": float(temperature), "max_new_tokens": int(length), "seed": time.time_ns() % 2**48}

        def state() -> tuple[str, str, dict]:
            """Also of an answer that is being made: it stays where it is stopped."""
            answered = [*messages, {"role": "assistant", "content": answers[-1].text}]
            kept = answered if answers[-1].text and not answers[-1].wrong else said["messages"]
            turns = [*said["turns"], turn_html(asked, answers)]
            return "", page_html(turns), {"messages": kept, "turns": turns}

        yield state()
        tickets: list[Ticket] = []
        try:
            self.service.check_open()
            for _, chosen in settings:
                options = options_over(self.service.defaults, {**common, **chosen})
                tickets.append(await asyncio.to_thread(self.service.engine.submit, messages, options))
            last = time.perf_counter()
            async for number, piece in interleaved(tickets):
                if piece is None:
                    answers[number].end(await tickets[number])
                else:
                    answers[number].add(piece.token_ids, piece.receipts)
                if time.perf_counter() - last > REFRESH:
                    yield state()
                    last = time.perf_counter()
        except Exception as error:
            told = isinstance(error, (ValueError, TypeError, QueueFull, EngineClosed, Refusal))
            if not told:
                log.error("an answer failed", exc_info=error)
            answers[-1].wrong = str(error) if told else "The answer failed; the server's log says why."
            for answer in answers[:-1]:
                answer.ended = answer.ended or "cancelled"
        finally:
            cancel(tickets)
        yield state()

    def chosen(self, rule: str, threshold: float, guard: float) -> dict[str, object]:
        """Options for a rule; the server's own rule keeps what else it was given."""
        if rule == "exact":
            return {"acceptance": rule}
        own = {} if rule == self.service.defaults.get("acceptance", "fsd") else {"acceptance": rule}
        return {**own, "threshold": float(threshold), **({"head_guard": float(guard)} if has_guard(rule) else {})}


def stopped(said: dict) -> tuple[str, dict]:
    """The page and the state after Stop: what had not begun to be answered waits for nothing."""
    said = {**said, "turns": [turn.replace(WAITING, STOPPED) for turn in said["turns"]]}
    return page_html(said["turns"]), said


def nothing_said() -> dict:
    return {"messages": [], "turns": []}


def has_guard(rule: str) -> bool:
    """Whether a rule takes `head_guard`."""
    return any(each.name == "head_guard" for each in fields(RULES[rule]))


def threshold_end(rule: str) -> float:
    """Where the slider of a rule's threshold ends."""
    limit, included = RULES[rule].threshold_limit
    return max(0.01, min(RULES[rule].threshold_scale, limit if included else limit - 0.01))


def settings_of(defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Value, range and choices of the page's settings: whatever the server was started with is among them. Without a
    threshold it starts at 0."""
    rule, threshold = str(defaults.get("acceptance", "fsd")), min(float(defaults.get("threshold") or 0.0), 1e6)
    guard = defaults.get("head_guard", "default")
    guard = {"default": USUAL_GUARD, None: 1.0}.get(guard, guard)
    heat, length = float(defaults.get("temperature", 0.0)), int(defaults.get("max_new_tokens", 256))
    return {
        "rule": {"value": rule, "choices": list(RULES)},
        "threshold": {"value": threshold, "minimum": 0, "maximum": max(threshold_end(rule), threshold), "step": 0.01},
        "guard": {"value": guard, "minimum": 0, "maximum": 1, "step": 0.05, "visible": has_guard(rule)},
        "temperature": {"value": heat, "minimum": 0, "maximum": max(1.5, heat), "step": 0.05},
        "length": {"value": length, "minimum": min(16, length), "maximum": max(LONGEST_ANSWER, length), "step": 1},
    }


def build(service: Service) -> gradio.Blocks:
    """The page's parts and what they do."""
    page, settings = Page(service), settings_of(service.defaults)
    with gradio.Blocks(title=f"eagle_fsd · {service.name}", analytics_enabled=False, fill_width=True) as blocks:
        said = gradio.State(nothing_said())
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
                rule = gradio.Dropdown(label="Rule", filterable=False, **settings["rule"])
                threshold = gradio.Slider(label="Threshold", **settings["threshold"],
                                          info="0: the target’s own text. More: more drafted tokens pass.")
                guard = gradio.Slider(label="Head guard", **settings["guard"],
                                      info="A fuzzy token needs 1 - this of the best one’s probability. 1: no guard.")
                temperature = gradio.Slider(label="Temperature", info="0: greedy", **settings["temperature"])
                length = gradio.Slider(label="Longest answer (tokens)", **settings["length"])
                beside = gradio.Checkbox(label="Side by side with exact",
                                         info="Both answer at once; words that differ are marked.")
                gradio.HTML(LEGEND)

        def of_rule(name: str) -> tuple[gradio.Slider, gradio.Slider]:
            """Another rule's threshold means another thing: it starts at 0 again, but for the server's own."""
            own = settings["threshold"] if name == settings["rule"]["value"] else {"value": 0}
            return gradio.Slider(**{"maximum": threshold_end(name), **own}), gradio.Slider(visible=has_guard(name))

        quiet = {"api_visibility": "private", "show_progress": "hidden"}
        rule.input(of_rule, rule, [threshold, guard], **quiet)
        inputs, outputs = [asked, said, rule, threshold, guard, temperature, length, beside], [asked, shown, said]
        running = gradio.on([send.click, asked.submit], page.answer, inputs, outputs, concurrency_limit=None, **quiet)
        stop.click(stopped, [said], [shown, said], cancels=[running], **quiet)
        clear.click(lambda: ("", page_html([]), nothing_said()), None, outputs, cancels=[running], **quiet)
    return blocks


class Policy:
    """The page's answers say that nothing may be fetched from elsewhere, and the framework's uploads are closed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(b"content-security-policy", POLICY.encode()), (b"referrer-policy", b"no-referrer")]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        ours = scope["type"] == "http" and scope["path"].startswith(PATH)
        if ours and "/upload" in scope["path"]:
            await Refusal(404, "the page takes no files").response()(scope, receive, send)
            return
        await self.app(scope, receive, with_policy if ours else send)


def mount_page(app: FastAPI, service: Service, key: str | None) -> None:
    """Adds the page at `PATH`; with a key, the page asks for it as a password."""
    login: dict[str, Any] = {} if key is None else {
        "auth": lambda user, password: hmac.compare_digest(password.encode(), key.encode()),
        "auth_message": "Any user name; the password is the server’s API key.",
    }
    app.add_middleware(Policy)
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gradio.mount_gradio_app(
        app, build(service).queue(default_concurrency_limit=None, max_size=64), PATH, theme=theme,
        css=Path(__file__).with_name("page.css").read_text(encoding="utf-8"), ssr_mode=False, footer_links=[],
        enable_monitoring=False, pwa=False, mcp_server=False, **login,
    )
