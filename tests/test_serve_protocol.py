"""What applications send by the `openai` client: structured output, tools, log-probabilities, lists, penalties."""

import json
import socket
from pathlib import Path

import httpx
import openai
import pytest
import torch
from fastapi.testclient import TestClient
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel
from served import here
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import eagle_fsd
from eagle_fsd.batching.tickets import Piece
from eagle_fsd.inputs.prompts import render_chat
from eagle_fsd.serve.answers import by_text, speller
from eagle_fsd.serve.app import create_app
from eagle_fsd.serve.limits import ServeOptions
from eagle_fsd.serve.protocol import NEUTRAL
from eagle_fsd.serve.splitter import MOST_CALLS, Splitter, message_start, response_template
from eagle_fsd.serve.tools import call_schema, check_tools, chosen_tools

PAIRS = Path(__file__).parent / "pairs"
CHAT = [{"role": "user", "content": "Once upon a time"}]
OPTIONS = {"model": "tiny", "messages": CHAT, "max_tokens": 120}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}")


class Home(BaseModel):
    city: str
    rooms: int


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}}}


TOOLS = [tool("weather", city={"enum": ["Paris", "London"]}), tool("add", a={"type": "integer", "minimum": 0})]


@pytest.fixture(scope="module")
def server():
    pair = eagle_fsd.load(PAIRS / "small-target", PAIRS / "small-draft", dtype="float32", device="cpu", tree=None)
    pair.tokenizer.chat_template = TEMPLATE
    with here(pair, max_rows=2, max_waiting=16) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def collected(stream):
    """Text, tool calls and the reason of a stream of one choice."""
    text, calls, reason = "", {}, None
    for piece in stream:
        delta, reason = piece.choices[0].delta, piece.choices[0].finish_reason or reason
        text += delta.content or ""
        for call in delta.tool_calls or []:
            calls[call.index] = calls.get(call.index, "") + call.function.name + call.function.arguments
    return text, calls, reason


# Structure --------------------------------------------------------------------------------------------------------


def test_parse_with_a_pydantic_model(client):
    answer = client.chat.completions.parse(**OPTIONS, response_format=Home)
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Home) and choice.finish_reason == "stop"
    assert answer.usage.model_extra["accepted_by"]["grammar"] > 0
    plain = client.chat.completions.parse(**OPTIONS, response_format=Home, extra_body={"speculative": False})
    assert plain.choices[0].message.content == choice.message.content
    assert plain.usage.model_extra["target_forwards"] == plain.usage.completion_tokens - 1


def nested(depth):
    inside: dict = {"type": "string"}
    for _ in range(depth):
        inside = {"type": "object", "properties": {"a": inside}}
    return inside


@pytest.mark.parametrize(("form", "given", "status"), [
    ("json_schema", {"enum": []}, 400), ("json_schema", nested(200), 400), ("json_schema", {"$ref": "#"}, 400),
    ("json_schema", {"$ref": "file:///etc/passwd"}, 400), ("json_schema", {"type": "string", "pattern": "(?=a)b"}, 400),
    ("json_schema", {"allOf": [{"properties": {f"p{i}": {}}} for i in range(1000)]}, 400),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, 200),
    ("json_schema", {"enum": [f"value {i}" for i in range(2000)]}, 200),
    ("regex", "(x+x+)+y", 200), ("regex", "(.{1,500}){1,500}x", 400), ("grammar", "start: (", 400),
    ("grammar", 'start: e\ne: e e | "a"', 200), ("grammar", "start: start \"a\" | \"b\"", 200),
])
def test_hostile_structure(server, form, given, status):
    """Schemas that explode, expressions that backtrack: refused or answered, soon; the next request is served."""
    asked = {**OPTIONS, "max_tokens": 16, "response_format": {
        "type": form, form: {"name": "x", "schema": given} if form == "json_schema" else given}}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=20).status_code == status
    assert httpx.post(f"{server.url}/v1/chat/completions", json=OPTIONS | {"max_tokens": 2}).status_code == 200


def test_json_objects_and_text(client):
    answer = client.chat.completions.create(**OPTIONS, response_format={"type": "json_object"}, stop=["}"])
    assert answer.choices[0].message.content.startswith("{")
    free = client.chat.completions.create(**OPTIONS, response_format={"type": "text"})
    assert free.choices[0].message == client.chat.completions.create(**OPTIONS).choices[0].message
    with pytest.raises(openai.BadRequestError, match='needs a non-empty field "json_schema"') as found:
        client.chat.completions.create(**OPTIONS, response_format={"type": "json_schema"})
    assert found.value.param == "response_format"


# Tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "names"), [
    ("required", {"weather", "add"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})])
def test_two_turns_with_a_tool(client, choice, names):
    asked = {**OPTIONS, "tools": TOOLS, "tool_choice": choice}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name in names and isinstance(json.loads(call.function.arguments), dict)
    assert collected(client.chat.completions.create(**asked, stream=True)) == (
        "", {0: call.function.name + call.function.arguments}, "tool_calls")
    turns = [*CHAT, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    again = client.chat.completions.create(model="tiny", messages=turns, max_tokens=8, tools=TOOLS)
    shorter = client.chat.completions.create(model="tiny", messages=turns, max_tokens=8, tools=TOOLS,
                                             tool_choice="none")
    assert again.usage.prompt_tokens > shorter.usage.prompt_tokens > client.chat.completions.create(
        **OPTIONS).usage.prompt_tokens


def test_references_of_two_tools_stay_their_own(client):
    tools = [{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "required": ["x"], "additionalProperties": False, "properties": {"x": {"$ref": "#/$defs/X"}},
        "$defs": {"X": {"const": value}}}}} for name, value in (("f", 1), ("g", 2))]
    for tool, value in zip(tools, (1, 2), strict=True):
        answer = client.chat.completions.create(**OPTIONS, tools=tools, tool_choice={
            "type": "function", "function": {"name": tool["function"]["name"]}})
        assert answer.choices[0].message.tool_calls[0].function.arguments == json.dumps({"x": value})


@pytest.mark.parametrize(("names", "place"), [
    ((None, None), "#/$defs/X"), (("https://a.example/s.json", None), "#/$defs/X"),
    (("https://a.example/s.json",) * 2, "#/$defs/X"), (("https://a.example/s.json", None), "s.json#/$defs/X")])
def test_references_in_schemas_with_an_id(names, place):
    """Two of one id, too."""
    tools = [{"type": "function", "function": {"name": f"f{value}", "parameters": {
        "type": "object", "required": ["x"], "properties": {"x": {"$ref": place if name else "#/$defs/X"}},
        "$defs": {"X": {"const": value}}, **({"$id": name} if name else {})}}} for value, name in enumerate(names)]
    given = json.dumps(tools)
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(call_schema(tools)))
    assert json.dumps(tools) == given
    for value in (0, 1):
        text = json.dumps({"name": f"f{value}", "arguments": {"x": value}}).encode()
        assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
        matcher.rollback(len(text))
        assert matcher.try_consume_tokens(list(text.replace(b"%d}}" % value, b"7}}"))) < len(text)
        matcher.reset()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_a_call_in_the_middle_of_an_answer(client, stream, parallel, count):
    """And no more than one where no more is wanted."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    asked = {**OPTIONS, "tools": TOOLS, "stream": stream, "extra_body": {"parallel_tool_calls": parallel},
             "response_format": {"type": "choice", "choice": [f"Once [1] {{2}}. {call} {call} So."]}}
    answer = client.chat.completions.create(**asked)
    if stream:
        expected = "Once [1] {2}. So.", dict.fromkeys(range(count), 'add{"a": 1}'), "tool_calls"
        assert collected(answer) == expected
    else:
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == ("Once [1] {2}. So.", "tool_calls")
        assert [each.function.arguments for each in message.tool_calls] == ['{"a": 1}'] * count


@pytest.mark.parametrize(("parameters", "arguments"), [
    ({"properties": {"city": {"const": "Zoë"}}, "required": ["city"], "additionalProperties": False},
     '{"city": "Zoë"}'),  # in characters of their own
    ({"type": ["object", "null"], "properties": {}, "additionalProperties": False}, "{}"),
    ({"$ref": "#/$defs/X", "$defs": {"X": {"enum": [5, {"a": 1}]}}}, '{"a": 1}'),
    ({"anyOf": [{"type": "array"}, {"const": {"b": 2}}]}, '{"b": 2}'),
    (None, "{}"),
])
def test_arguments_are_an_object_whatever_the_schema_leaves_out(client, parameters, arguments):
    tools = [{"type": "function", "function": {"name": "f", "description": None, "parameters": parameters}}]
    answer = client.chat.completions.create(**OPTIONS, tools=tools, tool_choice="required").choices[0]
    assert answer.message.tool_calls[0].function.arguments == arguments


@pytest.mark.parametrize("arguments", ["'Paris'", "null", "[1]", '{"x": NaN}', "5", "", None, {"a": 1}, [], '{"cut o'])
def test_calls_come_back_whatever_their_arguments(client, arguments):
    """Of models served elsewhere: the conversation goes on."""
    turns = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=2)
    assert answer.usage.completion_tokens == 2


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(("text", "said", "calls"), [
    (f"Let me see. {HERMES}", "Let me see.", [("weather", {"city": "Paris"})]),
    (f'{HERMES}\n<tool_call>{{"name": "add", "arguments": {{"a": 1}}}}</tool_call>', "",
     [("weather", {"city": "Paris"}), ("add", {"a": 1})]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ('{"type": "function", "function": {"name": "add", "arguments": {}}}', "", [("add", {})]),
    ('[{"name": "add", "arguments": {"a": 1}}]', "", [("add", {"a": 1})]),
    ("[weather(city='Paris'), add(a=1)]", "", [("weather", {"city": "Paris"}), ("add", {"a": 1})]),
    ('{"name": "rm", "arguments": {}}', None, []),
    ("[system('rm')]", None, []),
    ('I would say {"name": "add", "arg', None, []),
    ("[__import__('os')]", None, []),
    ('{"name": "add", "arguments": null}', "", [("add", {})]),
    ('{"name": "add", "arguments": ""}', "", [("add", {})]),
    (r'{"name": "add", "arguments": "{\"a\": \"é\"}"}', "", [("add", {"a": "é"})]),
    (r'{"name": "add", "arguments": {"a": "\ud800"}}', "", [("add", {"a": "\ud800"})]),
    ('{"name": "add", "arguments": "\'Paris\'"}', None, []),
    ('{"name": "add", "arguments": [1]}', None, []),
    ('{"name": "add", "arguments": 5}', None, []),
    ('{"name": "add", "arguments": {"x": NaN}}', None, []),
    ('{"name": "add", "arguments": {"x": 1e999}}', None, []),
    ('{"name": "add", "arguments": 0} {"name": "add", "arguments": {}}', '{"name": "add", "arguments": 0}',
     [("add", {})]),
    # text after a call, several with what is between them
    (f"See. {HERMES}\n\nThere it is.", "See.\n\nThere it is.", [("weather", {"city": "Paris"})]),
    (f"{HERMES} Done.", "Done.", [("weather", {"city": "Paris"})]),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', "",
     [("add", {"a": 1}), ("add", {"a": 2})]),
    ('[{"name": "add", "arguments": {"a": 1}}, {"name": "weather", "arguments": {"city": "[}"}}]', "",
     [("add", {"a": 1}), ("weather", {"city": "[}"})]),
    # nothing in a thought is a call, and further on its marks are text
    (f"<think>I could {HERMES}, or not.</think> Paris.", "Paris.", []),
    (f"<think>[add(a=1)]</think>{HERMES}", "", [("weather", {"city": "Paris"})]),
    (f"The marks <think> and </think>. {HERMES}", "The marks <think> and </think>.", [("weather", {"city": "Paris"})]),
    # JSON that is no call
    ('Use {"name": "add", "size": 3} here.', None, []),
    ('The tool {"name": "add", "description": "x", "parameters": {"type": "object"}} adds.', None, []),
    ('{"name": "add"}', None, []),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("A set {1, 2}, a list [1, 2], a <tag> and a; semicolon.", None, []),
    # what models do to JSON
    ('{"name": "weather", "arguments": {"city": "Pa\n\tris"}}', "", [("weather", {"city": "Pa\n\tris"})]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
    ('{"id": "x", "type": "function", "name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '{"name": "add", "arguments": {"a": 1}', []),
    ('<tool_call>{"name": "rm"}</tool_call> No.', '{"name": "rm"} No.', []),
    ("<tool_call>[1]</tool_call><tool_call></tool_call>{}", "[1]{}", []),
    (f"<tool_call>oops</tool_call>{HERMES}", "oops", [("weather", {"city": "Paris"})]),
    ('{"name": "add", "arguments": {"a": 1}} {"name": "weather", "arguments": {"city": "a', '{"name": "weather", '
     '"arguments": {"city": "a', [("add", {"a": 1})]),
    ('One; {"name": "add", "arguments": {"a": 1}}', "One;", [("add", {"a": 1})]),
    # Qwen3-Coder, with values as the schema wants them; with JSON inside
    ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", {"city": "Paris"})]),
    ("I add.\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>", "I add.",
     [("add", {"a": 7})]),
    ('<function=add>{"a": 1}</function>', "", [("add", {"a": 1})]),
    ("<function=rm><parameter=a>1</parameter></function>", None, []),
    ("<function=add>\n<parameter=a>\n7", "\n<parameter=a>\n7", []),
    ("<function=add>\n<parameter=a>7</function>", "", [("add", {"a": 7})]),
    ('<function=add>{"a": 1</function>', '{"a": 1', []),
    # Gemma 4
    ('<|channel>thought\nHm.<channel|>So. <|tool_call>call:weather{city:<|"|>Pa"ris<|"|>}<tool_call|>', "So.",
     [("weather", {"city": 'Pa"ris'})]),
    ("<|tool_call>call:rm{}<tool_call|><|tool_call>call:add{a:<tool_call|>", "<|tool_call>call:rm{}<tool_call|>{a:",
     []),
    ("[add(a=1e999)]", None, []),
    ("[add(**{'a': 1})]", None, []),
])
def test_calls_in_texts(text, said, calls):
    for size in (len(text), 1, 3):
        gemma = "<|" in text
        assert split(splitter(marks=GEMMA if gemma else MARKS), text, size) == (text if said is None else said, calls)


MARKS, GEMMA = "<think></think><tool_call><function=", "<|channel>thought\n<channel|><|tool_call>call:"


def splitter(tools=TOOLS, marks=MARKS, most=MOST_CALLS, rendered="", form=None):
    """A splitter for a model whose chat template has these marks."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = marks
    template = response_template(tokenizer, tools)
    return Splitter(tokenizer, template, message_start(template, rendered, "", form), tools, most, [], [])


def split(splitter, text, size=1):
    """Text and calls of an answer that comes in pieces of so many characters."""
    deltas = [splitter.add(Piece([], [], text[at : at + size])) for at in range(0, len(text), size)] + [splitter.end()]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    return ("".join(delta.get("content", "") for delta in deltas),
            [(call["name"], json.loads(call["arguments"])) for call in calls])


def test_a_thought_that_the_prompt_opened():
    assert split(splitter(rendered="[assistant] <think>\n"), f"or {HERMES}</think>{HERMES}") == (
        "", [("weather", {"city": "Paris"})])
    assert split(splitter(rendered="<think>\n\n</think>\n\n"), "So.</think>") == ("So.</think>", [])


def test_one_call_where_no_more_are_wanted():
    found = split(splitter(most=1), f"{HERMES}{HERMES} Done.")
    assert found == ("Done.", [("weather", {"city": "Paris"})])


def test_beginnings_of_calls_without_end():
    """Text, and soon."""
    text = '{"name": "add", "arguments": ' * 20_000
    assert split(splitter(), text, len(text)) == (text, [])


@pytest.mark.parametrize(("kind", "value"), [
    ({"type": "string"}, "7"), ({"type": "integer"}, 7), ({"type": ["number", "null"]}, 7), ({}, "7"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
    ({"anyOf": [{"type": "integer", "description": "no string"}, True]}, 7),
])
def test_values_have_the_type_of_the_schema(kind, value):
    text = "<function=f><parameter=x>7</parameter></function>"
    assert split(splitter([tool("f", x=kind)]), text) == ("", [("f", {"x": value})])


def test_a_boolean_as_python_writes_it():
    text = "<function=f><parameter=x>\nTrue\n</parameter></function>"
    assert split(splitter([tool("f", x={"type": "boolean"})]), text) == ("", [("f", {"x": True})])


def test_a_stream_shows_all_text_that_is_no_call(client):
    whole = client.chat.completions.create(**OPTIONS, tools=TOOLS).choices[0]
    assert collected(client.chat.completions.create(**OPTIONS, tools=TOOLS, stream=True)) == (
        whole.message.content, {}, whole.finish_reason)
    held = splitter()
    pieces = ("a <", "b> <too", "th> c", " {", 'd} [{"name": ', '"x"}] [ad', "d(", "a=1)]")
    assert [held.add(Piece([], [], text)).get("content", "") for text in pieces] == [
        "a", " <b>", " <tooth> c", "", ' {d}', ' [{"name": "x"}]', "", ""]
    assert held.calls == 1


RESPONSE = {  # as Qwen 3's
    "defaults": {"role": "assistant"}, "start_anchor": "[assistant] ", "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
                       "transform": {"type": "function", "function": "{content}"}},
        "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"}}}
CALL = '<call>{"name": "add", "arguments": {"a": 1}}</call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "opened", "thought", "said", "calls"), [
    ("Just text. ", False, None, "Just text. ", 0),
    (f"<think> Hm {{.\n</think>\n\nSo: {CALL}\n{CALL} Done.", False, "Hm {.", "So: Done.", 2),
    (f"Hm.</think> {CALL}", True, "Hm.", None, 1),
    (CALL.replace("add", "rm"), False, None, '{"name": "rm", "arguments": {"a": 1}}', 0),  # it is not offered
    ('<call>{"name": 5}</call> Sorry.', False, None, '{"name": 5} Sorry.', 0),
    ('<call>{"name": "add"</call> Sorry.', False, None, '<call>{"name": "add"</call> Sorry.', 0),  # it is broken
    ('<call>{"name": "add", "arg', False, None, '{"name": "add", "arg', 0),  # it is cut off
])
def test_a_response_template_is_followed(client, server, monkeypatch, stream, text, opened, thought, said, calls):
    monkeypatch.setattr(server.pair.tokenizer, "response_template", RESPONSE)
    if opened:
        thinking = TEMPLATE.replace("[assistant] ", "[assistant] <think>")
        monkeypatch.setattr(server.pair.tokenizer, "chat_template", thinking)
    asked = {**OPTIONS, "tools": TOOLS, "response_format": {"type": "choice", "choice": [text]}}
    if stream:
        deltas = [piece.choices[0].delta for piece in client.chat.completions.create(**asked, stream=True)]
        for name, expected in (("reasoning_content", thought), ("content", said)):
            assert "".join(getattr(each, name, None) or "" for each in deltas) == (expected or "")
        assert sum(len(each.tool_calls or []) for each in deltas) == calls
    else:
        message = client.chat.completions.create(**asked).choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (thought, said)
        assert [json.loads(each.function.arguments) for each in message.tool_calls or []] == [{"a": 1}] * calls


THINKING = TEMPLATE.replace("[assistant] ", "[assistant] <think>\n")
QWEN3 = TEMPLATE.replace("[{{ m.role }}] {{ m.content }}", "[{{ m.role }}] {{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "form", "thought", "said"), [
    (QWEN3, {"type": "choice", "choice": ["<think>\nHm. {HERMES}\n</think>\n\nSo."]}, "Hm. {HERMES}", "So."),
    (QWEN3, {"type": "choice", "choice": ["So <think> it </think> is."]}, None, "So <think> it </think> is."),
    (THINKING + "{# </think> #}", {"type": "choice", "choice": ["Hm.</think>So."]}, "Hm.", "So."),
    (THINKING + "{# </think> #}", {"type": "choice", "choice": ["So."]}, None, "So."),
    (THINKING + "{# </think> #}", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"a": 1}}}},
     None, '{"a": 1}'),
    (TEMPLATE, {"type": "choice", "choice": ["<think>x</think>y"]}, None, "<think>x</think>y"),
])
def test_thoughts_are_split_off_by_the_marks_of_the_chat_template(
        client, server, monkeypatch, stream, template, form, thought, said):
    """Without a setting; a format that cannot end a thought has none, so that its JSON is the content."""
    monkeypatch.setattr(server.pair.tokenizer, "chat_template", template)
    answer = client.chat.completions.create(**OPTIONS, stream=stream, response_format=form)
    deltas = [piece.choices[0].delta for piece in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == (thought or "")
    assert "".join(each.content or "" for each in deltas) == said


def test_a_thought_that_a_message_began_goes_on(client, server, monkeypatch):
    monkeypatch.setattr(server.pair.tokenizer, "chat_template", TEMPLATE + "{# </think> #}")
    for begun, thought in (("<think>Hm", "m.</think>S"), ("<think>Hm.</think>", None), ("Hm", None)):
        message = client.chat.completions.create(
            model="tiny", messages=[*CHAT, {"role": "assistant", "content": begun}], max_tokens=40,
            extra_body={"continue_final_message": True}, response_format={"type": "choice", "choice": [
                "m.</think>So."]}).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == (
            ("So.", "m.") if thought else ("m.</think>So.", None))


def test_marks_that_are_special_tokens_are_read_and_others_hidden():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|end|>", "<|x|>"]})
    tokenizer.chat_template = MARKS
    template = response_template(tokenizer, TOOLS)
    made = Splitter(tokenizer, template, "", TOOLS, 1, [], [tokenizer.convert_tokens_to_ids("<|end|>")])
    marks = tokenizer.convert_tokens_to_ids(["<|x|>", "<tool_call>", "</tool_call>", "<|end|>"])
    assert made.add(Piece([marks[0], 5, *marks[1:]], [], "")) | made.end() == {"content": tokenizer.decode([5])}
    assert "tool_calls" in template["fields"] or "<tool_call>" in template["fields"]


def test_a_response_template_does_not_read_a_forced_call_nor_past_a_stop(client, server, monkeypatch):
    monkeypatch.setattr(server.pair.tokenizer, "response_template", RESPONSE)
    answer = client.chat.completions.create(**OPTIONS, tools=TOOLS, tool_choice="required").choices[0]
    assert len(answer.message.tool_calls) == 1
    answer = client.chat.completions.create(**OPTIONS, stop=["b"], response_format={
        "type": "choice", "choice": ["<think>x</think>a b c"]}).choices[0]
    assert (answer.message.content, answer.message.reasoning_content, answer.finish_reason) == ("a", "x", "stop")


@pytest.mark.parametrize("tools", [
    [1], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}], [TOOLS[0]] * 2,
    [TOOLS[0]] * 10_000,
    [{"type": "function", "function": {"name": "f", "parameters": []}}], {}, "x",
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": ["string", "null"]}}}]])
def test_bad_tools(tools):
    with pytest.raises(ValueError, match="tool"):
        check_tools(tools)


@pytest.mark.parametrize("choice", ["any", {"type": "function", "function": {"name": "nothing"}}, {"function": 1}, 5])
def test_bad_choices(choice):
    with pytest.raises(ValueError, match="tool_choice must be"):
        chosen_tools(TOOLS, choice)


# The rest of the protocol -----------------------------------------------------------------------------------------


def test_top_logprobs_are_those_of_a_forward(client, server):
    answer = client.chat.completions.create(**OPTIONS | {"max_tokens": 24}, logprobs=True, top_logprobs=5)
    listed = answer.choices[0].logprobs.content
    assert answer.usage.model_extra["accepted_tokens"] > 0  # trees
    model, tokenizer = server.pair.target.model, server.pair.tokenizer
    output = eagle_fsd.generate(CHAT, server.pair, max_new_tokens=24, top_logprobs=5)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = torch.cat([prompt["input_ids"][0], torch.tensor(output.token_ids)])
    logprobs = model(ids[None]).logits[0, -25:-1].log_softmax(-1)
    for place, each in enumerate(listed):
        values, tokens = logprobs[place].topk(5)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(values.tolist(), abs=1e-3)
        assert [top.token for top in each.top_logprobs] == [tokenizer.decode([token]) for token in tokens]
        assert [token for token, _ in output.receipts[place].top] == tokens.tolist()
    old = client.completions.create(model="tiny", prompt="Once", max_tokens=4, logprobs=3)
    assert [len(top) for top in old.choices[0].logprobs.top_logprobs] == [3] * 4


def test_bytes_of_tokens_are_those_of_the_text(client):
    """Of parts of a character too, by which alternatives are told apart; an end token has none."""
    text = "😀🔥 naïve 你好"
    choice = {"type": "choice", "choice": [text]}
    chat = client.chat.completions.create(**OPTIONS, logprobs=True, top_logprobs=20, response_format=choice).choices[0]
    listed = chat.logprobs.content
    assert chat.message.content == text and listed[-1].bytes is None and listed[-1].token == "<|end|>"
    assert b"".join(bytes(each.bytes) for each in listed[:-1]) == text.encode()
    assert listed[0].token == r"bytes:\xf0" and all(len(each.top_logprobs) == 20 for each in listed)
    old = client.completions.create(model="tiny", prompt=CHAT[0]["content"], max_tokens=40, logprobs=20,
                                    extra_body={"response_format": choice}).choices[0].logprobs
    assert {len(top) for top in old.top_logprobs} <= {20, 21}
    assert old.tokens == [each.token for each in listed]
    offsets = [len(b"".join(bytes(each.bytes or []) for each in listed[:at]).decode(errors="ignore"))
               for at in range(len(listed))]
    assert old.text_offset == offsets and offsets[:5] == [0, 0, 0, 0, 1]
    streamed = client.completions.create(model="tiny", prompt=CHAT[0]["content"], max_tokens=40, logprobs=1, n=2,
                                         stream=True, extra_body={"response_format": choice})
    by_choice = {0: [], 1: []}
    for piece in streamed:
        by_choice[piece.choices[0].index] += piece.choices[0].logprobs.text_offset if piece.choices[0].logprobs else []
    assert by_choice == {0: offsets, 1: offsets}
    forced = [token for token, top in zip(old.tokens, old.top_logprobs, strict=True) if token in top]
    assert forced == old.tokens  # however unlikely


def test_bytes_of_a_tokenizer_of_pieces():
    """With blanks and bytes as SentencePiece has them; one of words, which llguidance does not know, has text alone."""
    names = ["<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), "▁", "a", "▁a"]
    backend = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    pieces = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    spell = speller(pieces, len(names), (1,))
    assert [spell(token) for token in pieces("a a")["input_ids"]] == [("a", [97]), (" a", [32, 97])]
    assert [spell(2 + each)[0] for each in "é".encode()] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert spell(1) == ("</s>", None)
    words = tiny_tokenizer()
    assert speller(words, 32, ())(7) == (words.decode([7]), list(words.decode([7]).encode()))


def test_a_text_that_two_tokens_have_is_told_once_by_each():
    spell = {5: ("a", None), 6: ("a", None), 7: ("b", None)}
    assert by_text({7: -3.0, 5: -1.0, 6: -2.0}, spell.get) == {"a": -1.0, "token_id:6": -2.0, "b": -3.0}


def test_penalties_and_bias(client):
    def text(**more):
        return client.chat.completions.create(**OPTIONS | {"max_tokens": 40}, logprobs=True, **more).choices[0]

    def most(choice):
        tokens = [each.token for each in choice.logprobs.content]
        return max(map(tokens.count, tokens))

    assert most(text(frequency_penalty=2, presence_penalty=2)) < most(text())
    plain = text(frequency_penalty=1, presence_penalty=0.5, extra_body={"speculative": False})
    assert text(frequency_penalty=1, presence_penalty=0.5).message == plain.message
    biased = text(logit_bias={"300": 100})
    assert {each.token for each in biased.logprobs.content} == {biased.logprobs.content[0].token}


def test_lists_of_prompts(client):
    alone = [client.completions.create(model="tiny", prompt=prompt, max_tokens=6).choices[0].text
             for prompt in ("Once upon", "There was a")]
    both = client.completions.create(model="tiny", prompt=["Once upon", "There was a"], n=2, max_tokens=6)
    assert [choice.text for choice in both.choices] == [alone[0]] * 2 + [alone[1]] * 2
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3] and both.usage.completion_tokens == 24
    ids = client.completions.create(model="tiny", prompt=[[5, 6, 7], [8, 9]], max_tokens=3)
    assert len(ids.choices) == 2 and ids.usage.prompt_tokens == 5


def test_a_request_may_switch_drafting(client):
    plain, whole = [client.chat.completions.create(**OPTIONS, extra_body=body) for body in (
        {"speculative": False}, {"tree": {"total_tokens": 8, "depth": 3, "top_k": 2}, "text_drafts": "off"})]
    assert plain.choices[0].message == whole.choices[0].message
    assert not any(plain.usage.model_extra["proposed_by"].values())
    used = whole.usage.model_extra
    assert used["proposed_by"] == {"head": 7 * used["target_forwards"], "text": 0, "grammar": 0}
    fuzzy = client.chat.completions.create(**OPTIONS, extra_body={"threshold": 0.9, "head_guard": None})
    assert fuzzy.usage.model_extra["regret"] > 0 < fuzzy.usage.model_extra["fuzzy_tokens"]


@pytest.mark.parametrize(("changed", "said", "param"), [
    ({"n": 0}, "n must be at least 1, got 0", "n"),
    ({"n": 9}, "n must be at most 8, got 9", "n"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most 20, got 21", "top_logprobs"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages must have one of the roles system, ",
     "messages"),
    ({"messages": [{"role": "user", "content": None}]}, 'messages need "role" and "content", both text', "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls must each be ",
     "messages.0.tool_calls"),
    ({"logit_bias": {"x": 1}}, "logit_bias must be", "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "outside the vocabulary", "logit_bias"),
    ({"echo": True}, "not supported here: echo=True", "echo"),
    ({"best_of": 2}, "not supported here: best_of=2", "best_of"),
    ({"skip_special_tokens": False}, "not supported here: skip_special_tokens=False", "skip_special_tokens"),
    ({"tools": [1]}, "tools must hold", "tools"),
    ({"tool_choice": "required"}, "tool_choice must be", "tool_choice"),
    ({"tree": 5}, "tree must be", "tree"),
    ({"tree": {"total_tokens": 4000}}, "tree is too large here", "tree"),
    ({"speculative": 1}, "speculative must be", "speculative"),
    ({"tree": {"depth": 0}}, "(TreeConfig.depth must be at least 1, got 0)", "tree"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0", "max_tokens"),
    ({"threshold": -1}, "threshold of rule 'fsd' must lie in [0, inf], got -1", "threshold"),
    ({"divergence": "euclid"}, "unknown divergence 'euclid'", "divergence"),
    ({"acceptance": "tpyical"}, "unknown rule 'tpyical'; accepted: exact, fsd, ", "acceptance"),
    ({"text_drafts": 3}, 'text_drafts must be "auto", "off" or a TextDrafts, got 3', "text_drafts"),
    ({"threshold": 0.3, "tree": {"total_tokens": 4, "depth": 2, "top_k": 2}}, "of a fuzzy request must be the", "tree"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options need stream=true", "stream_options"),
    ({"response_format": {"type": "xml"}}, "of type 'xml' is not known; accepted: json_object, ", "response_format"),
    ({"response_format": {"type": ["object", "nul"]}}, "response_format ", "response_format"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "enum": [5]}}}]}, "tools cannot be used: Unsatisfiable schema", "tools"),
    ({"guided_json": {}}, 'use response_format={"type": "json_schema", ', "guided_json"),
    ({"structured_outputs": {"json": {}}}, "use response_format=", "structured_outputs"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages.0.audio is not supported",
     "messages.0.audio"),
    ({"seed": -2}, "seed must be at least 0, got -2", "seed"),
    ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs must not have chat_template",
     "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True, "messages": []}}, "must not have tokenize", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "rejects the chat", None),
    ({"continue_final_message": True, "add_generation_prompt": True}, "rejects the chat", None),
    ({"treshold": 0.3}, "unknown field 'treshold'; did you mean 'threshold'?", "treshold"),
    ({"head_gaurd": 1}, "did you mean 'head_guard'?", "head_gaurd"),
    ({"maxTokens": 1}, "did you mean 'max_tokens'?", "maxTokens"),
    ({"topk": 1}, "did you mean 'top_k'?", "topk"),
    ({"guided_regex": "x"}, 'use response_format={"type": "regex", "regex": R}', "guided_regex"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools must have a JSON schema of an object as parameters, got {'type': 'array'} of f", "tools"),
])
def test_errors_are_in_our_words(server, changed, said, param):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**OPTIONS, **changed})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["param"] == param
    assert "Input should" not in error["message"] and "Value error" not in error["message"]


@pytest.mark.parametrize(("changed", "ignored"), [
    ({"reasoning_effort": "low", "metadata": {"a": 1}}, "metadata, reasoning_effort"),
    (dict.fromkeys(("top_a", "temperature_last", "repetition_penalty_range", "prompt_logprobs", "xtc_threshold"), 1),
     "prompt_logprobs, repetition_penalty_range, temperature_last, top_a, xtc_threshold"),  # of other servers
    ({"user": None, "seed": -1, "min_tokens": 2, "stop": []}, None),  # null; those that we know
    ({"messages": [CHAT[0] | {"type": "text"}]}, "messages.type"),  # as lm-eval's
    ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": CHAT[0]["content"], "cache_control": {"type": "ephemeral"}}]}]},
     "messages.content.cache_control"),
    ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction.more"),
    ({"a\r\nX-Evil: 1": 1, "é": 1}, "%C3%A9, a%0D%0AX-Evil%3A%201"),
    ({"x" * 10_000: 1}, "x" * 64),
])
def test_unknown_fields_are_ignored_and_named(server, client, changed, ignored, caplog):
    plain = client.chat.completions.create(**OPTIONS).choices[0].message.content
    for stream in (False, True, False):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**OPTIONS, **changed, "stream": stream})
        assert answer.status_code == 200 and answer.headers.get("x-eagle-fsd-ignored") == ignored
    assert answer.json()["choices"][0]["message"]["content"] == plain
    for name in ignored.split(", ") if ignored else []:
        assert sum(f"the field {name} of" in record.getMessage() for record in caplog.records) <= 1


def test_what_agents_send_back_is_rendered(client, server):
    """Whatever an earlier answer had, here or elsewhere."""
    turns = [*CHAT, {"role": "assistant", "reasoning_content": "", "provider_specific_fields": {"refusal": None},
                     "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
             {"role": "tool", "tool_call_id": "c", "content": "3"},
             {"role": "assistant", "content": None, "annotations": []}, *CHAT]
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=2).usage.completion_tokens == 2


def test_the_chat_template_gets_what_it_reads(client, server, monkeypatch):
    """Also through `generate`."""
    shown = ("{% for m in messages %}{{ m.role }}: {{ m.name }}{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
             "{% if add_generation_prompt %}assistant: {% endif %}{{ enable_thinking }}")
    monkeypatch.setattr(server.pair.tokenizer, "chat_template", shown)
    chat = [{"role": "user", "content": "{{ 7 * 7 }}"},
            {"role": "assistant", "content": "S", "reasoning_content": "R", "name": "N"}]
    for given, prompt in (
            ({}, "user: {{ 7 * 7 }};assistant: NRS;assistant: "),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "user: {{ 7 * 7 }};assistant: NRS;assistant: False"),
            ({"add_generation_prompt": False}, "user: {{ 7 * 7 }};assistant: NRS;"),
            ({"continue_final_message": True}, "user: {{ 7 * 7 }};assistant: NRS")):
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=9, extra_body=given)
        ours = given.get("chat_template_kwargs", given)
        assert render_chat(chat, server.pair, ours) == prompt
        assert answer.choices[0].message.content == eagle_fsd.generate(
            chat, server.pair, max_new_tokens=9, chat_template_kwargs=ours).text


def test_values_of_other_servers_that_change_nothing_are_accepted(server):
    neutral = {**NEUTRAL, "user": "me", "top_k": -1, "min_p": None}
    plain, answer = (httpx.post(f"{server.url}/v1/chat/completions", json={**OPTIONS, **more}).json()["choices"]
                     for more in ({}, neutral))
    assert answer[0]["message"] == plain[0]["message"]


def test_a_body_that_is_no_json_says_where(server):
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=b"{]",
                        headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["message"].startswith("the body is not JSON: ") and answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("at character 1") and answer.json()["error"]["param"] is None


def test_a_template_without_tools_says_so():
    with here() as bare:
        answer = httpx.post(f"{bare.url}/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS})
    assert answer.status_code == 400 and "chat template does not render them" in answer.json()["error"]["message"]


# Pages from elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"Origin": "{url}"}, 200), ({"Host": "localhost"}, 200), ({"Host": "[::1]:80"}, 200),
    ({"Origin": "http://elsewhere.example"}, 403), ({"Origin": "null"}, 403), ({"Host": "elsewhere.example"}, 403),
    ({"Host": "127.0.0.1.elsewhere.example:8000"}, 403), ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({"Host": "[::1"}, 403)])
def test_a_page_from_elsewhere_is_refused(server, headers, status):
    headers = {"Content-Type": "application/json"} | {name: value.format(url=server.url)
                                                      for name, value in headers.items()}
    body = json.dumps({"messages": CHAT, "max_tokens": 1})
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(("host", "origin", "status"), [
    ("192.168.1.5:8000", None, 200), ("192.168.1.5:8000", "http://192.168.1.5:8000", 200),
    ("eagle:8000", None, 200), (f"{socket.gethostname()}:8000", f"http://{socket.gethostname()}:8000", 200),
    ("evil.example:8000", "http://evil.example:8000", 403), ("192.168.1.5:8000", "http://evil.example:8000", 403)])
def test_a_page_of_a_name_that_resolves_to_this_machine_is_refused(server, host, origin, status):
    """Though its Host is its Origin."""
    app = create_app(server.engine, "tiny", ServeOptions(host="0.0.0.0"), {})
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    answer = TestClient(app).post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1}, headers=headers)
    assert answer.status_code == status


def test_a_page_with_the_key_may_use_the_server(server):
    app = TestClient(create_app(server.engine, "tiny", ServeOptions(), {}, key="k"))
    page = {"Origin": "http://elsewhere.example"}
    asked = app.options("/v1/chat/completions", headers=page | {
        "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "*"
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    for key, status in (("k", 200), ("j", 401)):
        answer = app.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, "mood": 1},
                          headers=page | {"Authorization": f"Bearer {key}"})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == "*"
    assert "x-eagle-fsd-ignored" in asked.headers.get("access-control-expose-headers", "").lower() + answer.headers[
        "access-control-expose-headers"].lower()
