"""Functions that a model may call: the API's `tools`, the schema that forces a call, and the calls in the model's text.

Calls are recognised by their JSON, whatever surrounds it: `{"name", "arguments"}` in <tool_call> tags (Hermes,
Qwen) or without (Mistral), `{"name", "parameters"}` (Llama 3), or `[name(key=value)]` as in Python (Llama 4).
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from ..checks import OptionError

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_BEGINNING = re.compile(r'\{\s*"(?:name|type|function)"')
UNSAFE = re.compile("[\ud800-\udfff\x85\u2028\u2029]")
TAG = "<tool_call>"
MARK = re.compile(r"<tool_call>|<[a-z_]{0,9}\Z|[\[{]")  # possible beginning of a call


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
    References inside a tool's schema still resolve to that schema."""
    schemas, calls = {}, []
    for number, tool in enumerate(tools):
        own = tool["function"].get("parameters", {"additionalProperties": False}) | {"type": "object"}
        place = f"#/$defs/tool{number}"
        schemas[f"tool{number}"] = json.loads(json.dumps(own).replace('"$ref": "#', f'"$ref": "{place}'))
        calls.append({"type": "object", "additionalProperties": False, "required": ["name", "arguments"],
                      "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": place}}})
    return {"$defs": schemas, "anyOf": calls}


def find_calls(text: str, names: Collection[str]) -> tuple[str, list[dict]]:
    """Split an answer into the text before the first call and the API's `tool_calls`."""
    calls, begins, at = [], len(text), 0
    for _ in range(MOST_TOOLS):  # attempts to parse
        if (match := CALL_BEGINNING.search(text, at)) is None:
            break
        try:
            call, end = json.JSONDecoder().raw_decode(text, match.start())
            call = call["function"] if isinstance(call.get("function"), dict) else call
            arguments = arguments_text(call.get("arguments", call.get("parameters")))
        except (ValueError, RecursionError):
            at = match.end()
            continue
        at = end
        if call.get("name") in names:
            begins = min(begins, match.start())
            calls.append((call["name"], arguments))
    if not calls:
        calls, begins = _python_calls(text.strip(), names), 0
    if not calls:
        return text, []
    return text[:begins].rstrip(" \n[").removesuffix(TAG).rstrip(), [
        {"id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls]


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as in the API: a JSON object as text.

    Raises:
        ValueError: the arguments are not an object, or contain infinity or NaN.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, got {arguments!r}")
    return json_text(arguments)


def json_text(value: Any) -> str:
    """Serialise as JSON without escapes; in ASCII if the value contains half of a surrogate pair, which UTF-8 cannot
    encode, or a character at which some clients break lines."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not UNSAFE.search(text) else json.dumps(value)


def _python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The calls of a text that consists of a Python list of calls with keyword arguments."""
    if not (text.startswith("[") and text.endswith(")]")):
        return []
    try:
        calls = ast.parse(text, mode="eval").body.elts
        named = [(call.func.id, arguments_text({each.arg: ast.literal_eval(each.value) for each in call.keywords}))
                 for call in calls if not call.args and all(each.arg for each in call.keywords)]
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, MemoryError):
        return []
    return named if len(named) == len(calls) and all(name in names for name, _ in named) else []


class TextBeforeCalls:
    """Releases the text of a stream up to where a call may begin; the rest waits for the end of the answer.

    Attributes:
        length: characters released.
    """

    def __init__(self) -> None:
        self._text, self.length = "", 0

    def add(self, text: str) -> str:
        """Add text and return the part of all text so far that is newly released."""
        self._text += text
        match = MARK.search(self._text, self.length)
        before, self.length = self.length, match.start() if match else len(self._text)
        return self._text[before : self.length]
