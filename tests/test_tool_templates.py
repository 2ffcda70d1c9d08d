"""Calls in chats, by the notations of chat templates: what each is given of arguments and ids."""

import json

import pytest
from tiny import tiny_pair, tiny_tokenizer

from eagle_fsd.batching.tickets import Piece
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.serve.splitter import Splitter, response_template

CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool>ARGUMENTS</tool>{% endfor %}"
    "{% endfor %}"
)
MISTRAL = (  # as in the templates of Mistral 7B v0.3, Nemo and Small
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.arguments | tojson }} {{ c.id }}{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}[TOOL_RESULTS]{{ m.tool_call_id }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ARGUMENTS = {"city": "Köln", "days": [1, 2]}


@pytest.fixture
def model():
    return tiny_pair(tokenizer=tiny_tokenizer())


def rendered(model, template: str, arguments: object, call_id: str = "call_1") -> str:
    """What the template makes of a question, a call and its result."""
    model.tokenizer.chat_template = template
    texts, apply = [], model.tokenizer.apply_chat_template
    model.tokenizer.apply_chat_template = lambda *given, **named: texts.append(apply(*given, **named)) or texts[-1]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": call_id, "content": "b"}]
    before = json.dumps(messages)
    encode_prompt(messages, model)
    assert json.dumps(messages) == before
    return texts[-1]


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["mapping", "text"])
@pytest.mark.parametrize("notation", [
    "{{ c.function.arguments | tojson }}",  # Qwen, Hermes, Llama 3
    "{{ '```json\n' + c.function.arguments + '\n```' }}",  # DeepSeek V3 and R1
    "{{ c.function.arguments + '' }}", "{{ '' ~ c.function.arguments }}", "{{ c.function.arguments }}",  # DeepSeek V3.1
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}",
])
def test_templates_get_arguments_as_they_want_them(model, notation, arguments):
    text = rendered(model, CALLS.replace("ARGUMENTS", notation), arguments)
    shown = text.partition("<tool>")[2].partition("</tool>")[0].removeprefix("```json\n").removesuffix("\n```")
    assert json.loads(shown) == ARGUMENTS


def test_templates_may_read_single_arguments_and_broken_ones_stay_text(model):
    items = "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}"
    assert "<tool>city=Köln;days=[1, 2];</tool>" in rendered(model, CALLS.replace("ARGUMENTS", items), ARGUMENTS)
    printed = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
    assert "<tool>{broken</tool>" in rendered(model, printed, "{broken")
    for missing in ("", None, "{}"):
        assert "<tool>{}</tool>" in rendered(model, printed, missing)
        assert "<tool></tool>" in rendered(model, CALLS.replace("ARGUMENTS", items), missing)


def test_ids_fit_templates_that_want_nine_letters_and_digits(model):
    tools, wanted = [{"type": "function", "function": {"name": "f"}}], "abcDEF123"
    model.tokenizer.chat_template = MISTRAL
    splitter = Splitter(model.tokenizer, response_template(model.tokenizer, tools), "", tools, 1, [], [])
    (call,) = splitter.add(Piece([], [], '{"name": "f", "arguments": {}}'))["tool_calls"]
    assert call["id"].isalnum() and len(call["id"]) == 9
    for call_id, kept in ((call["id"], True), (wanted, True), ("call_34cb7a9f0e1d2c3b4a5f6e7d", False)):
        shown, _, result = rendered(model, MISTRAL, ARGUMENTS, call_id).partition("[TOOL_RESULTS]")
        assert shown.endswith(f" {result}") and len(result) == 9 and (result == call_id) == kept
    kept = rendered(model, CALLS.replace("ARGUMENTS", "{{ c.id }}"), ARGUMENTS, "call_34cb")
    assert "<tool>call_34cb</tool>" in kept  # others get ids as they are
