"""Functions that a model may call: the API's `tools`, the schema that forces a call, and the calls in the model's text.

A tokenizer with a `response_template` says how its model writes calls. Otherwise calls are recognised in these forms,
with or without <tool_call> tags, and anywhere but in a thought:

- `{"name": N, "arguments": {...}}` or `{"name": N, "parameters": {...}}`, or a list of these (Hermes, Qwen, Mistral,
  Llama 3);
- `<function=N><parameter=K>V</parameter></function>`, or `<function=N>{...}</function>` (Qwen3-Coder, Llama 3.1);
- `[N(K=V)]` as in Python (Llama 4).
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase

from ..batching.tickets import Piece
from ..inputs.prompts import as_mapping
from ..utils.checks import OptionError
from ..utils.text import StreamedText

MOST_TOOLS = 128
MOST_CALLS = 128  # in an answer
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# What reading a call raises for text that is none.
NO_CALL = (ValueError, LookupError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError)
UNSAFE = re.compile("[\ud800-\udfff\x85\u2028\u2029]")
THOUGHT = ("<think>", "</think>")
THOUGHT_END = regex.compile(THOUGHT[1])
REASONING = ("reasoning_content", "thinking")  # fields of response templates
KEYS = ("name", "arguments", "parameters", "type", "function", "id")  # of a call in JSON
TAG = regex.compile(r"(?:<tool_call>\s*)?")
PYTHON_LIST = re.compile(r"\[\s*[^\s{]")
PARAMETER = regex.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", regex.DOTALL)
# Strings, which may be unfinished, and brackets.
JSON = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{}]', re.DOTALL)
PYTHON = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|\'(?:[^\'\\]|\\.)*(?:\'|\Z)|[\[\](){}]', re.DOTALL)


def check_tools(tools: Any) -> list[dict]:
    """Validate the tools of a request and drop their null fields.

    Raises:
        ValueError: the tools are not a list of functions with names and schemas.
    """
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        got = f"{len(tools)} functions" if isinstance(tools, list) else repr(tools)
        raise OptionError("tools", problem=f"must be a list of at most {MOST_TOOLS} functions, got {got}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise OptionError("tools", problem='must hold {"type": "function", "function": {"name": N, "parameters": '
                              f"S}}}}, where N has 1 to 64 letters, digits, _ or -, got {tool!r}")
        parameters = {} if function.get("parameters") is None else function["parameters"]
        kinds = parameters.get("type", "object") if isinstance(parameters, dict) else None
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise OptionError("tools", problem="must have a JSON schema of an object as parameters, got "
                              f"{parameters!r} of {name}")
        try:
            json.dumps(function)
        except RecursionError as error:
            raise OptionError("tools", problem=f"must be nested less deeply, got {name}") from error
    names = tool_names(tools)
    if len(set(names)) < len(names):
        raise OptionError("tools", problem=f"must have different names, got {', '.join(names)}")
    return [{**tool, "function": {name: value for name, value in tool["function"].items() if value is not None}}
            for tool in tools]


def tool_names(tools: Sequence[dict]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def chosen_tools(tools: Sequence[dict], choice: Any) -> tuple[list[dict], bool]:
    """The tools that the model may call, and whether it must call one.

    Args:
        choice: the API's `tool_choice`; None: "auto".

    Raises:
        ValueError: `choice` is invalid, or names a tool that `tools` lacks.
    """
    if choice == "none" or not tools and choice in (None, "auto"):
        return [], False
    if choice in (None, "auto", "required") and tools:
        return list(tools), choice == "required"
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) and isinstance(
        choice.get("function"), dict) else None
    if (named := [tool for tool in tools if tool["function"]["name"] == name]):
        return named, True
    names = ", ".join(tool_names(tools)) or "tools, but there are none"
    raise OptionError("tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": {"name": '
                      f"N}}}} with N of {names}")


def call_schema(tools: Sequence[dict]) -> dict:
    """The JSON schema of a call to one of the tools. The arguments are an object even if the tool's schema has no type.
    Each tool's schema keeps or gets an `$id`, so that the references in it resolve to itself."""
    schemas: dict[str, dict] = {}
    calls, ids = [], set()
    for number, tool in enumerate(tools):
        own = tool["function"].get("parameters", {"additionalProperties": False}) | {"type": "object"}
        if own.get("$id") in (None, *ids):
            own["$id"] = f"tool:{number}"
        ids.add(own["$id"])
        schemas[f"tool{number}"] = own
        calls.append({"type": "object", "additionalProperties": False, "required": ["name", "arguments"],
                      "properties": {"name": {"const": tool["function"]["name"]},
                                     "arguments": {"$ref": f"#/$defs/tool{number}"}}})
    return {"$defs": schemas, "anyOf": calls}


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as in the API: a JSON object as text.

    Raises:
        ValueError: the arguments are not an object, or contain infinity or NaN.
    """
    arguments = as_mapping(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, got {arguments!r}")
    return json_text(arguments)


def json_text(value: Any) -> str:
    """Serialise as JSON without escapes; in ASCII if the value contains half of a surrogate pair, which UTF-8 cannot
    encode, or a character at which some clients break lines."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not UNSAFE.search(text) else json.dumps(value)


# Answers -------------------------------------------------------------------------------------------------------------


class Splitter:
    """Splits an answer, while it grows, into the fields of a message: `content`, `reasoning_content`, `tool_calls`.

    Spaces around calls and thoughts are left out.

    Args:
        tools: those that the model may call.
        most: maximum number of calls; further ones are left out.
    """

    def __init__(self, tools: Sequence[dict], most: int) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.most, self.calls = most, 0
        self.delta: dict[str, Any] = {}  # what is new
        self.seen: set[str] = set()  # fields that are not empty
        self.space = {"content": "", "reasoning_content": ""}  # at the end of each field, withheld

    def add(self, piece: Piece) -> dict[str, Any]:
        """The new parts of the fields after a piece of the answer."""
        raise NotImplementedError

    def end(self) -> dict[str, Any]:
        """The rest of the fields at the end of the answer."""
        raise NotImplementedError

    def take(self) -> dict[str, Any]:
        """What is new since the last call."""
        delta, self.delta = self.delta, {}
        return delta

    def say(self, text: str, field: str = "content") -> None:
        """Add text to a field."""
        text = self.space[field] + text
        if field not in self.seen and (self.seen or field != "content"):
            text = text.lstrip()
        kept = text.rstrip()
        self.space[field] = text[len(kept) :]
        if kept:
            self.delta[field] = self.delta.get(field, "") + kept
            self.seen.add(field)

    def call(self, name: str, arguments: str) -> None:
        """Add a call."""
        self.seen.add("tool_calls")
        self.space["content"] = ""
        if self.calls < self.most:
            self.delta.setdefault("tool_calls", []).append({
                "index": self.calls, "id": uuid.uuid4().hex[:9], "type": "function",
                "function": {"name": name, "arguments": arguments}})
        self.calls += 1

    def close(self) -> dict[str, Any]:
        """What is new at the end. Spaces at the end of an answer that is only text are part of it."""
        if self.seen <= {"content"} and (space := self.space["content"]):
            self.delta["content"] = self.delta.get("content", "") + space
        return self.take()


class CallSplitter(Splitter):
    """Finds calls in the notations of several families of models, see the module. Thoughts between <think> and </think>
    stay in the text, and nothing in them is a call.

    Args:
        thinking: the answer begins inside a thought.
    """

    def __init__(self, tools: Sequence[dict], most: int = MOST_CALLS, thinking: bool = False) -> None:
        super().__init__(tools, most)
        self.text = ""  # what may still begin a call
        self.thinking, self.attempts = thinking, MOST_CALLS
        self.after = False  # the last thing was a call
        self.waiting = False  # for the end of a call
        names = "|".join(map(regex.escape, self.tools))
        first = (rf'\{{\s*(?:"name"\s*:\s*"(?:{names})"|"type"\s*:\s*"function"'
                 r'|"(?:arguments|parameters|function|id)"\s*:)')
        self.beginning = regex.compile(
            rf"<think>|</tool_call>|;\s*(?={first})|(?:<tool_call>\s*)?"
            rf"(?:{first}|\[\s*{first}|\[\s*(?:{names})\s*\(|<function=(?:{names})>)")

    def add(self, piece: Piece) -> dict[str, Any]:
        self.text += piece.text
        if not self.waiting or any(end in piece.text for end in "}]>"):
            self._advance(ended=False)
        return self.take()

    def end(self) -> dict[str, Any]:
        self._advance(ended=True)
        return self.close()

    def _advance(self, ended: bool) -> None:
        """Release the text up to where a call may begin, and all complete calls."""
        self.waiting = False
        while self.text:
            if not self.attempts:
                self._release(len(self.text))
                return
            pattern = THOUGHT_END if self.thinking else self.beginning
            match = pattern.search(self.text, partial=not ended)
            self._release(len(self.text) if match is None else match.start())
            if match is None or match.partial:
                return
            if match[0] in THOUGHT:
                self.thinking = not self.thinking
                self._release(len(match[0]))
            elif match[0][0] == ";" or match[0] == "</tool_call>":  # between calls, and after one
                if self.after:
                    self.text, self.space["content"] = self.text[len(match[0]) :], ""
                else:
                    self._release(len(match[0]))
            else:
                length, calls = self._read()
                if length is None and not ended:
                    self.waiting = True
                    return
                self.attempts -= 1
                if calls:
                    for name, arguments in calls:
                        self.call(name, arguments)
                    self.text, self.after = self.text[length:], True
                else:
                    self._release(1)

    def _release(self, length: int) -> None:
        """Release so many characters."""
        text, self.text = self.text[:length], self.text[length:]
        self.say(text)
        self.after = self.after and not text.strip()

    def _read(self) -> tuple[int | None, list[tuple[str, str]]]:
        """The length of what may be a call at the beginning of the text, None if its end is missing; and the names and
        arguments of its calls, none if it is no call."""
        at = TAG.match(self.text).end()
        python = PYTHON_LIST.match(self.text, at) is not None
        end = closing(self.text, at, PYTHON if python else JSON)
        if end is None:
            return None, []
        source = self.text[at:end]
        try:
            if python:
                calls = python_calls(source)
            elif source.startswith("<"):
                calls = [self._xml_call(source)]
            else:
                value = json.loads(source, strict=False)  # models write line breaks in strings
                calls = [json_call(call, at > 0) for call in (value if isinstance(value, list) else [value])]
        except NO_CALL:
            calls = []
        return end, calls if all(name in self.tools for name, _ in calls) else []

    def _xml_call(self, source: str) -> tuple[str, str]:
        """A call as `<function=NAME><parameter=KEY>VALUE</parameter></function>`, or with JSON inside. A value has the
        type that the tool's schema names."""
        name, _, body = source.removeprefix("<function=").removesuffix("</function>").partition(">")
        if body.strip().startswith("{"):
            return name, arguments_text(body)
        properties = self.tools.get(name, {}).get("parameters", {}).get("properties", {})
        return name, json_text({key: typed(value, properties.get(key)) for key, value in PARAMETER.findall(body)})


class TemplateSplitter(Splitter):
    """Splits an answer as the tokenizer's `response_template` says.

    Args:
        tokenizer: with a response template.
        stops: strings that end the answer.
        ends: tokens that end the answer.
        prompt: the rendered chat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], ends: Collection[int], prompt: str,
                 tools: Sequence[dict], most: int) -> None:
        super().__init__(tools, most)
        self.raw, self.ends = StreamedText(tokenizer, stops, special=True), ends
        self.parser = tokenizer.get_response_parser(prefix=prompt, tools=list(tools))
        self.body = self.region = ""  # of a call so far; with what may be its end

    def add(self, piece: Piece) -> dict[str, Any]:
        for token in piece.token_ids:
            if token not in self.ends:
                self._parse(self.raw.add([token]))
        return self.take()

    def end(self) -> dict[str, Any]:
        self._parse(self.raw.withheld())
        self._parse("", ended=True)
        return self.close()

    def _parse(self, text: str, ended: bool = False) -> None:
        """Parse more text. Text that the template does not fit is `content`."""
        if self.parser is None or not (text or ended):
            self.say(text)
            return
        self.region += text
        try:
            events = self.parser.finalize()[1] if ended else self.parser.feed(text)
            for event in events:
                self._take(event)
            if any(event["type"] == "region_open" for event in events):
                self.region = self.body
        except NO_CALL:
            self.parser = None
            self.say(self.region)

    def _take(self, event: dict) -> None:
        """Add an event of the parser."""
        field, text = event["field"], event.get("text", "")
        if event["type"] == "region_open":
            self.body = ""
        elif event["type"] == "region_chunk" and field in ("content", *REASONING):
            self.say(text, "content" if field == "content" else "reasoning_content")
        elif event["type"] == "region_chunk":
            self.body += text
        elif field == "tool_calls":
            value = event["value"]
            calls = [json_call(call, True) for call in (value if isinstance(value, list) else [value])]
            if all(name in self.tools for name, _ in calls):
                for name, arguments in calls:
                    self.call(name, arguments)
            else:
                self.say(self.body)
            self.body = ""


def closing(text: str, at: int, tokens: re.Pattern) -> int | None:
    """The end of the object, list or element at a place of a text; None if it is missing."""
    if text.startswith("<", at):
        end = text.find("</function>", at)
        return None if end < 0 else end + len("</function>")
    depth = 0
    for match in tokens.finditer(text, at):
        if match[0] in "[{(":
            depth += 1
        elif match[0] in "]})":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def json_call(value: Any, tagged: bool) -> tuple[str, str]:
    """Name and arguments of a call in JSON.

    Args:
        tagged: it is marked as a call, so that it may lack arguments.

    Raises:
        ValueError, LookupError, AttributeError, TypeError: it is no call. A tool's own schema is none, for example.
    """
    call = value["function"] if isinstance(value.get("function"), dict) else value
    given = call.keys() & {"arguments", "parameters"}
    if not {*value, *call} <= {*KEYS} or not isinstance(call["name"], str) or len(given) > 1 or not (given or tagged):
        raise ValueError(f"not a call: {value!r}")
    return call["name"], arguments_text(call[given.pop()] if given else None)


def python_calls(source: str) -> list[tuple[str, str]]:
    """The calls in a Python list of calls with keyword arguments.

    Raises:
        ValueError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError: it is none.
    """
    calls = ast.parse(source, mode="eval").body.elts
    if any(call.args or not all(keyword.arg for keyword in call.keywords) for call in calls):
        raise ValueError("calls need keyword arguments")
    return [(call.func.id, arguments_text({keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}))
            for call in calls]


def typed(text: str, schema: Any) -> Any:
    """A value written as text, as its JSON schema wants it; the text if this is impossible or the schema is silent."""
    schema = schema if isinstance(schema, dict) else {}
    parts = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    kinds = str([part.get("type") for part in parts if isinstance(part, dict)])
    if "string" in kinds or not any(kind in kinds for kind in ("integer", "number", "boolean", "object", "array")):
        return text
    for read in (json.loads, ast.literal_eval):  # models write True, too
        with suppress(*NO_CALL):
            return read(text)
    return text
