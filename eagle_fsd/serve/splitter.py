"""Splits the answer to a chat, while it grows, into `content`, `reasoning_content` and `tool_calls`.

The response parser of transformers finds thoughts and calls between marks, as a response template says: that of the
tokenizer, or one made of the marks in the chat template (`response_template`). Calls without marks have no place in a
response template; `UnmarkedCalls` finds them in the content:

- `{"name": N, "arguments": {...}}` or `{"name": N, "parameters": {...}}`, or a list of these (Llama 3, Mistral; small
  models that forget the marks);
- `[N(K=V)]` as in Python (Llama 4), which the parser of transformers before 5.24 cannot read.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase

from ..batching.tickets import Piece
from ..utils.text import StreamedText
from .tools import arguments_text, tool_names

MOST_CALLS = 128  # in an answer
CHUNK = 1024  # characters: the parser takes time that grows with the square of what it gets at once
BEGINNING = r"\A"  # of the answer: the anchor of our templates
# What reading a call raises for text that is none.
NO_CALL = (ValueError, LookupError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError)
THOUGHTS = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"))  # the second: Gemma 4
NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
CALLS = {  # marks in a chat template: the field of a response template; NAMES are those of the tools
    "<tool_call>": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},  # JSON: Hermes, Qwen
    "<function=": {  # Qwen3-Coder, Qwen3.5; in some models with JSON inside
        "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>NAMES)>", "transform": NAMED,
        "close": "</function>", "content": "xml-inline", "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)"}},
    "<|tool_call>call:": {  # Gemma 4
        "open_pattern": r"\s*<\|tool_call>call:(?P<name>NAMES)(?=\{)", "close": "<tool_call|>", "transform": NAMED,
        "content": "json", "content_args": {"unquoted_keys": True, "allow_non_json": True,
                                            "string_delims": [['<|"|>', '<|"|>']]}},
}
TOKENS = {"<think>", "</think>", "<|channel>", "<channel|>", "<tool_call>", "</tool_call>", "<|tool_call>",
          "<tool_call|>", '<|"|>'}  # of these marks, where they are special tokens
REASONING = ("reasoning_content", "thinking")  # fields of response templates
KEYS = ("name", "arguments", "parameters", "type", "function", "id")  # of a call in JSON
# Strings, which may be unfinished, and brackets.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|\'(?:[^\'\\]|\\.)*(?:\'|\Z)|[\[\](){}]', re.DOTALL)


def response_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict]) -> dict[str, Any] | None:
    """The response template of a tokenizer, or one made of the marks in its chat template; None: there are neither
    marks nor tools, so the answer is text. By marks, a thought begins with the answer, since marks further on may be
    part of the text."""
    if own := getattr(tokenizer, "response_template", None):
        return own
    chat, names = tokenizer.get_chat_template(tools=tools or None), "|".join(map(re.escape, tool_names(tools)))
    fields = {mark: {**field, "open_pattern": field["open_pattern"].replace("NAMES", names), "repeats": True}
              for mark, field in CALLS.items() if tools and mark in chat}
    for begins, ends in THOUGHTS:
        if ends in chat:
            fields["reasoning_content"] = {"open_pattern": rf"{BEGINNING}\s*{re.escape(begins)}", "close": ends}
    fields["content"] = {"close_pattern": r"\s*</tool_call>"} if "<function=" in fields else {}
    return {"start_anchor_pattern": BEGINNING, "fields": fields} if tools or len(fields) > 1 else None


def message_start(template: Mapping[str, Any], rendered: str, continued: str, form: object) -> str:
    """What of the answer's message the parser reads before the answer, such as the mark of a thought.

    Args:
        rendered: the chat.
        continued: the text of the last message, if the answer continues it.
        form: `response_format`. If it does not name the mark that ends a thought, the answer cannot end one.
    """
    ends = next((field.get("close") for name in REASONING if (field := template["fields"].get(name))), None)
    if form is not None and not (ends and str(ends) in str(form)):
        return ""
    if template.get("start_anchor_pattern") != BEGINNING:  # of the tokenizer: it finds the message in the chat
        return rendered
    return continued or next((begins for begins, _ in THOUGHTS if rendered.rstrip().endswith(begins.rstrip())), "")


class Splitter:
    """Splits one answer. Spaces around calls and thoughts are left out. A call that is invalid, or names none of the
    tools, is content without its marks.

    Args:
        template: see `response_template`. start: see `message_start`.
        tools: those that the model may call.
        most: maximum number of calls; further ones are left out.
        stops: strings that end the answer.
        ends: tokens that end the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any], start: str, tools: Sequence[dict],
                 most: int, stops: Sequence[str], ends: Collection[int]) -> None:
        self.parser = tokenizer.get_response_parser(template, prefix=start, tools=list(tools))
        self.names, self.most, self.calls = tool_names(tools), most, 0
        self.unmarked = UnmarkedCalls(self.names) if tools else None
        special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        marks = special if template is tokenizer.response_template else {
            token for token, text in special.items() if text in TOKENS}
        self.hidden = {*ends, *(special.keys() - marks)}
        self.raw = StreamedText(tokenizer, stops, special=True) if marks else None  # else the pieces have the text
        self.delta: dict[str, Any] = {}  # what is new
        self.seen: set[str] = set()  # fields that are not empty
        self.space = {"content": "", "reasoning_content": ""}  # at the end of each field, withheld
        self.body = self.region = ""  # of a call so far; with what may be its end

    def add(self, piece: Piece) -> dict[str, Any]:
        """The new parts of the fields after a piece of the answer."""
        shown = [token for token in piece.token_ids if token not in self.hidden]
        text = piece.text if self.raw is None else self.raw.add(shown)
        for at in range(0, len(text), CHUNK):
            self._parse(text[at : at + CHUNK])
        return self._new()

    def end(self) -> dict[str, Any]:
        """The rest of the fields at the end of the answer. Spaces at the end of mere text are part of it."""
        self._parse(self.raw.withheld() if self.raw else "")
        self._parse("", ended=True)
        self._content("", ended=True)
        if self.seen <= {"content"} and (space := self.space["content"]):
            self.delta["content"] = self.delta.get("content", "") + space
        return self._new()

    def _new(self) -> dict[str, Any]:
        delta, self.delta = self.delta, {}
        return delta

    def _parse(self, text: str, ended: bool = False) -> None:
        """Parse more text. Text that the template does not fit is content."""
        if self.parser is None or not (text or ended):
            self._content(text)
            return
        self.region += text
        try:
            events = self.parser.finalize()[1] if ended else self.parser.feed(text)
            for event in events:
                self._take(event, ended)
            if any(event["type"] == "region_open" for event in events):
                self.region = self.body
        except NO_CALL:
            self.parser = None
            self._content(self.region)

    def _take(self, event: dict, ended: bool) -> None:
        """Add an event of the parser."""
        field, text = event["field"], event.get("text", "")
        if event["type"] == "region_open":
            self.body = ""
            if field != "content":
                self._content("", ended=True)
        elif event["type"] == "region_chunk":
            if field == "content":
                self._content(text)
            elif field in REASONING:
                self._say(text, "reasoning_content")
            else:
                self.body += text
        elif field == "tool_calls" or field in CALLS:
            try:
                self._call(checked(self._marked(field, event["value"], ended), self.names))
            except NO_CALL:
                self._content(self.body)
            self.body = ""

    def _marked(self, field: str, value: Any, ended: bool) -> list[tuple[str, str]]:
        """The calls in a field, see `calls_in`."""
        if field == "<tool_call>":
            return read_json(value, marked=True)
        if field == "<function=" and self.body.lstrip().startswith("{"):
            value = {"name": value["function"]["name"], "arguments": self.body}
        elif field == "<function=" and ended:
            raise ValueError("the call is cut off")
        return calls_in(value, marked=True)

    def _content(self, text: str, ended: bool = False) -> None:
        """Add text of the content, and calls without marks in it."""
        for part in [text] if self.unmarked is None else self.unmarked.read(text, ended):
            if isinstance(part, str):
                self._say(part)
            else:
                self._call(part)

    def _say(self, text: str, field: str = "content") -> None:
        """Add text to a field."""
        text = self.space[field] + text
        if field not in self.seen and (self.seen or field != "content"):
            text = text.lstrip()
        kept = text.rstrip()
        self.space[field] = text[len(kept) :]
        if kept:
            self.delta[field] = self.delta.get(field, "") + kept
            self.seen.add(field)

    def _call(self, calls: Sequence[tuple[str, str]]) -> None:
        """Add calls by names and arguments."""
        self.seen.add("tool_calls")
        self.space["content"] = ""
        for name, arguments in calls:
            if self.calls < self.most:
                self.delta.setdefault("tool_calls", []).append({
                    "index": self.calls, "id": uuid.uuid4().hex[:9], "type": "function",
                    "function": {"name": name, "arguments": arguments}})
            self.calls += 1


class UnmarkedCalls:
    """Finds calls without marks in a text that grows, see the module.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.attempts = names, MOST_CALLS
        self.text = ""  # what may still begin a call
        self.after = False  # the last thing was a call
        self.waiting = False  # for the end of a call
        name = "|".join(map(regex.escape, names))
        first = (rf'\{{\s*(?:"name"\s*:\s*"(?:{name})"|"type"\s*:\s*"function"'
                 r'|"(?:arguments|parameters|function|id)"\s*:)')
        self.beginning = regex.compile(rf";\s*(?={first})|{first}|\[\s*{first}|\[\s*(?:{name})\s*\(")

    def read(self, text: str, ended: bool = False) -> Iterator[str | list[tuple[str, str]]]:
        """The text up to where a call may begin, and complete calls by names and arguments, in order."""
        self.text += text
        if self.waiting and not ended and not any(end in text for end in "}])"):
            return
        self.waiting = False
        while self.text:
            match = self.beginning.search(self.text, partial=not ended) if self.attempts else None
            yield self._release(len(self.text) if match is None else match.start())
            if match is None or match.partial:
                return
            if match[0][0] == ";":  # between calls
                between = self._release(len(match[0]), self.after)
                yield "" if self.after else between
                continue
            length, calls = self._call()
            if length is None and not ended:
                self.waiting = True
                return
            self.attempts -= 1
            yield calls or self._release(1)
            if calls:
                self.text, self.after = self.text[length:], True

    def _release(self, length: int, after: bool = False) -> str:
        """Release so many characters."""
        text, self.text = self.text[:length], self.text[length:]
        self.after = after or self.after and not text.strip()
        return text

    def _call(self) -> tuple[int | None, list[tuple[str, str]]]:
        """The length of what may be a call at the beginning of the text, None if its end is missing; and the names and
        arguments of its calls, none if it is no call."""
        end = closing(self.text)
        for read in (read_json, read_python) if end else ():
            with suppress(*NO_CALL):
                return end, checked(read(self.text[:end]), self.names)
        return end, []


def checked(calls: list[tuple[str, str]], names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls. Raise ValueError if there are none, or one is of no tool."""
    if not calls or any(name not in names for name, _ in calls):
        raise ValueError(f"no calls of {', '.join(names)}")
    return calls


def closing(text: str) -> int | None:
    """The end of the object or list at the beginning of a text; None if it is missing."""
    depth = 0
    for match in TOKEN.finditer(text):
        depth += (match[0] in "[{(") - (match[0] in "]})")
        if depth == 0:
            return match.end()
    return None


def calls_in(value: Any, marked: bool = False) -> list[tuple[str, str]]:
    """Names and arguments of a call, or of those in a list.

    Args:
        marked: it is marked as a call, so that it may lack arguments.

    Raises:
        one of NO_CALL: it is no call. A tool's own schema is none, for example.
    """
    if isinstance(value, list):
        return [call for item in value for call in calls_in(item, marked)]
    call = value["function"] if isinstance(value.get("function"), dict) else value
    given = call.keys() & {"arguments", "parameters"}
    if not {*value, *call} <= {*KEYS} or not isinstance(call["name"], str) or len(given) > 1 or not (given or marked):
        raise ValueError(f"not a call: {value!r}")
    return [(call["name"], arguments_text(call[given.pop()] if given else None))]


def read_json(source: str, marked: bool = False) -> list[tuple[str, str]]:
    """The calls in JSON, see `calls_in`; its strings may have line breaks, which models write."""
    return calls_in(json.loads(source, strict=False), marked)


def read_python(source: str) -> list[tuple[str, str]]:
    """The calls in a Python list of calls with keyword arguments; raises one of NO_CALL if it is none."""
    calls = ast.parse(source, mode="eval").body.elts
    if any(call.args or not all(keyword.arg for keyword in call.keywords) for call in calls):
        raise ValueError("calls need keyword arguments")
    return [(call.func.id, arguments_text({keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}))
            for call in calls]
