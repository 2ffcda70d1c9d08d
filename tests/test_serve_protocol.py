"""What applications send by the `openai` client: structured output, tools, log-probabilities, lists, penalties."""

import json
from pathlib import Path

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel
from served import here
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import eagle_fsd
from eagle_fsd.serve.answers import by_text, speller
from eagle_fsd.serve.protocol import NEUTRAL
from eagle_fsd.serve.tools import TextBeforeCalls, check_tools, chosen_tools, find_calls

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
    ("[add(a=1e999)]", None, []),
    ("[add(**{'a': 1})]", None, []),
])
def test_calls_in_texts(text, said, calls):
    found = find_calls(text, ["weather", "add"])
    assert found[0] == (text if said is None else said)
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found[1]] == calls
    held = TextBeforeCalls()
    shown = "".join(map(held.add, text))
    assert found[0].startswith(shown.rstrip()) and len(shown) == held.length


def test_a_stream_shows_all_text_that_is_no_call(client):
    whole = client.chat.completions.create(**OPTIONS, tools=TOOLS).choices[0]
    assert collected(client.chat.completions.create(**OPTIONS, tools=TOOLS, stream=True)) == (
        whole.message.content, {}, whole.finish_reason)
    held = TextBeforeCalls()
    assert [held.add(text) for text in ("a <", "b> <too", "th> c", " {", "d")] == ["a ", "<b> ", "<tooth> c", " ", ""]


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
    assert [len(top) for top in old.top_logprobs] == [20] * len(listed)
    assert old.tokens == [each.token for each in listed]


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
    assert by_text([(5, -1.0), (6, -2.0), (7, -3.0)], spell.get) == {"a": -1.0, "token_id:6": -2.0, "b": -3.0}


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
    ({"loudness": 1}, "accepted: max_new_tokens, temperature, ", "loudness"),
    ({"response_format": {"type": ["object", "nul"]}}, "response_format ", "response_format"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "enum": [5]}}}]}, "tools cannot be used: Unsatisfiable schema", "tools"),
    ({"stop_sequence": "x"}, "accepted: max_new_tokens, temperature, ", "stop_sequence"),
    ({"guided_json": {}}, 'option \'guided_json\'; use response_format={"type": "json_schema", ', "guided_json"),
    ({"guided_regex": "x"}, 'use response_format={"type": "regex", "regex": R}', "guided_regex"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools must have a JSON schema of an object as parameters, got {'type': 'array'} of f", "tools"),
    ({"strem": True}, "unknown option 'strem'; did you mean 'stream'?", "strem"),
    ({"messages": [CHAT[0] | {"contents": "ho"}]}, "contents", "messages.0.contents"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "txt": "ho"}]}]}, "txt",
     "messages.0.content.list[Part].0.txt"),
    ({"stream_options": {"include_usge": True}}, "include_usge", "stream_options.include_usge"),
])
def test_errors_are_in_our_words(server, changed, said, param):
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**OPTIONS, **changed})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["param"] == param
    assert "Input should" not in error["message"] and "Value error" not in error["message"]


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
