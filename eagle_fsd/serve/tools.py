"""Functions that a model may call: the API's `tools`, and the schema that forces a call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..inputs.prompts import as_mapping
from ..utils.checks import OptionError

MOST_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
UNSAFE = re.compile("[\ud800-\udfff\x85\u2028\u2029]")


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
