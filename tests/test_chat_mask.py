"""Which tokens of a conversation are learned, token by token, for the chat formats in use.

The templates are written here from the formats that their models' cards describe.
"""

import json

import pytest
from tiny import tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_fsd.data.conversations import BadRow, read_records
from eagle_fsd.data.encoding import answer_spans, encode_conversation

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3 = (  # puts an empty block of thoughts before the last answer only, and none into earlier ones
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}"
    "ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
VICUNA_NO_PROMPT = VICUNA.split("{% if add_generation_prompt %}")[0]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_SYSTEM = (  # puts the system turn into the last question, and only while it waits for its answer
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last and system is defined %}[INST] {{ system }} {{ m.content }}[/INST]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THOUGHTS = (  # shows the thoughts of the last answer only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (  # opens a thought, and shows no thoughts of answers
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|bot|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|><think>\n{% endif %}"
)
QWEN_3_THINKING = (  # QWEN_3, with the thought of a last answer that has one
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}<|im_start|>assistant\n"
    "{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM, S = ["<|im_start|>", "<|im_end|>"], ["<s>", "</s>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# The second question repeats the first answer, so that a search for its text alone would go wrong.
CHAT = [("user", "hi"), ("assistant", "yes it is"), ("user", "yes it is"), ("assistant", "bye")]
IM_CHAT = ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{yes it is<|im_end|>}\n<|im_start|>user\n"
           "yes it is<|im_end|>\n<|im_start|>assistant\n")
VICUNA_CHAT = ["<s>USER: hi ASSISTANT:{ yes it is</s>}USER: yes it is ASSISTANT:{ bye</s>}"]

# name: template, special tokens, conversation, its documents with the learned parts in {braces}. Where there is
# one per answer, the template shows earlier turns differently once they are answered.
CASES = {
    "llama-3": (LLAMA_3, HEADERS, CHAT, [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n{yes it is<|eot_id|>}<|start_header_id|>user<|end_header_id|>\n\nyes it is"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{bye<|eot_id|>}"]),
    "chatml": (CHATML, IM, CHAT, [IM_CHAT + "{bye<|im_end|>}\n"]),
    "qwen-3": (QWEN_3, IM, CHAT, [IM_CHAT + "{<think>\n\n</think>\n\nbye<|im_end|>}\n"]),
    "generation marks": (MARKED, IM, CHAT, [IM_CHAT + "{bye<|im_end|>}\n"]),
    "vicuna": (VICUNA, S, CHAT, VICUNA_CHAT),
    "vicuna, no prompt": (VICUNA_NO_PROMPT, S, CHAT, VICUNA_CHAT),
    "mistral, system turn": (MISTRAL_SYSTEM, S, [("system", "be kind"), *CHAT], [
        "<s>[INST] be kind hi[/INST]{ yes it is</s>}",
        "<s>[INST] hi[/INST] yes it is</s>[INST] be kind yes it is[/INST]{ bye</s>}"]),
    "thoughts": (THOUGHTS, IM, [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d"),
                                ("assistant", "<think>e</think>f")], [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think>b</think>c<|im_end|>}\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n{<think>e</think>f<|im_end|>}\n"]),
    "r1": (R1, S, [("user", "a"), ("assistant", "<think>\nb\n</think>c"), ("user", "d"), ("assistant", "e</think>f")], [
        "<s><|user|>a<|bot|><think>\n{b\n</think>c</s>}",
        "<s><|user|>a<|bot|>c</s><|user|>d<|bot|><think>\n{e</think>f</s>}"]),
    "r1, without thoughts": (R1, S, CHAT, [
        "<s><|user|>hi<|bot|>{yes it is</s>}", "<s><|user|>hi<|bot|>yes it is</s><|user|>yes it is<|bot|>{bye</s>}"]),
    "qwen-3, one thought": (QWEN_3_THINKING, IM, [
        ("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d"), ("assistant", "e")], [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think>b</think>c<|im_end|>}\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n{<think>\n\n</think>\n\ne<|im_end|>}\n"]),
}


# The tokens that the target wrote: an answer that ends, and one that was cut off. Documents by template.
WRITTEN = ["b</think> c</s>", "e</think> f"]
RECORDED = {
    "opens a thought": (R1, ["<s><|user|>a<|bot|><think>\n{b</think> c</s>}",
                             "<s><|user|>a<|bot|> c</s><|user|>d<|bot|><think>\n{e</think> f}"]),
    "drops earlier thoughts": (R1.replace("<think>\n", ""), [
        "<s><|user|>a<|bot|>{b</think> c</s>}", "<s><|user|>a<|bot|> c</s><|user|>d<|bot|>{e</think> f}"]),
    "drops no thought": (R1.replace("<think>\n", "").replace(".split('</think>')[-1]", ""), [
        "<s><|user|>a<|bot|>{b</think> c</s>}<|user|>d<|bot|>{e</think> f}</s>"]),
    "ends with another token": (R1.replace("<think>\n", "").replace("eos_token", "'<|user|>'"), [
        "<s><|user|>a<|bot|>{b</think> c</s>}", "<s><|user|>a<|bot|> c<|user|><|user|>d<|bot|>{e</think> f}"]),
    "marks answers": (R1.replace("<think>\n", "").replace("{{ m.content.", "{% generation %}{{ m.content.").replace(
        "{{ eos_token }}", "{{ eos_token }}{% endgeneration %}"), [
        "<s><|user|>a<|bot|>{b</think> c</s>}", "<s><|user|>a<|bot|> c</s><|user|>d<|bot|>{e</think> f}"]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_recorded_is_learned_after_the_prompt_that_the_target_saw(name):
    """Each document with its learned tokens in braces; the end of a truncated answer is not learned."""
    template, expected = RECORDED[name]
    tokenizer = tiny_tokenizer("abcdefhiknt <>/\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|bot|>"]})
    tokenizer.chat_template = template
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in WRITTEN]
    messages = chat([("user", "a"), ("assistant", WRITTEN[0][:-4]), ("user", "d"), ("assistant", WRITTEN[1])])
    messages[1]["token_ids"], messages[3]["token_ids"] = answers
    found = []
    for ids, learned in encode_conversation(tokenizer, messages):
        pieces = [(tokenizer.decode(token), mark) for token, mark in zip(ids, learned, strict=True)]
        pieces = [("{" * (mark and not before) + "}" * (before and not mark) + text) for (text, mark), before in zip(
            pieces, [False, *learned], strict=False)]
        found.append("".join(pieces) + "}" * learned[-1])
    assert found == expected


def chat(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def word_tokenizer(template: str, special: list[str]) -> PreTrainedTokenizerFast:
    """One token per word with the space before it, per line break and per special token."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\n| ?[^A-Za-z\s]|\s"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[-1], additional_special_tokens=special,
        chat_template=template, unk_token="?",
    )


def drawn(tokenizer: PreTrainedTokenizerFast, text: str, learned: list[bool]) -> str:
    """The text with runs of learned tokens in braces."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    pieces, inside = [], False
    for (start, end), mark in zip(offsets, learned, strict=True):
        pieces += ["{" if mark else "}"] * (mark != inside) + [text[start:end]]
        inside = mark
    return "".join(pieces) + "}" * inside


@pytest.mark.parametrize("name", CASES)
def test_answers_and_their_end_marks_are_learned_and_nothing_else(name):
    template, special, turns, expected = CASES[name]
    tokenizer = word_tokenizer(template, special)
    encoded = encode_conversation(tokenizer, chat(turns))
    texts = [line.replace("{", "").replace("}", "") for line in expected]
    assert [ids for ids, _ in encoded] == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [drawn(tokenizer, t, learned) for t, (_, learned) in zip(texts, encoded, strict=True)] == expected


THINKS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if SHOWN %}<think>\n{{ m.reasoning_content }}\n</think>"
          "\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
FIRST, SECOND = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in "ad")


@pytest.mark.parametrize(("template", "expected"), [
    (THINKS.replace("SHOWN", "m.reasoning_content and loop.last"), [  # Qwen3
        FIRST + "{<think>\nb\n</think>\n\nc<|im_end|>}\n",
        FIRST + "c<|im_end|>\n" + SECOND + "{<think>\ne\n</think>\n\nc<|im_end|>}\n"]),
    (THINKS.replace("SHOWN", "m.reasoning_content"), [
        FIRST + "{<think>\nb\n</think>\n\nc<|im_end|>}\n" + SECOND + "{<think>\ne\n</think>\n\nc<|im_end|>}\n"]),
    (THINKS.replace("SHOWN", "m.reasoning_content and loop.last").replace(
        "<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%"), [  # its prompt opens the thought
        FIRST + "<think>\n{b\n</think>\n\nc<|im_end|>}\n",
        FIRST + "c<|im_end|>\n" + SECOND + "<think>\n{e\n</think>\n\nc<|im_end|>}\n"]),
    (CHATML, [FIRST + "{c<|im_end|>}\n" + SECOND + "{c<|im_end|>}\n"]),  # knows no thoughts
], ids=["of the last answer", "of all answers", "opened", "none"])
def test_thoughts_beside_the_content_are_learned_where_the_template_shows_them(tmp_path, template, expected):
    messages = chat([("user", "a"), ("assistant", "c"), ("user", "d"), ("assistant", "c")])
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "b", "e"
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    (record,) = read_records(str(tmp_path / "chats.jsonl"))
    tokenizer = word_tokenizer(template, IM)
    encoded = encode_conversation(tokenizer, record.messages)
    texts = [line.replace("{", "").replace("}", "") for line in expected]
    assert [drawn(tokenizer, t, learned) for t, (_, learned) in zip(texts, encoded, strict=True)] == expected


@pytest.mark.parametrize(("name", "answer", "span"), [
    ("vicuna, no prompt", "A", " A</s>"),  # is inside the header of answers, and not to be mistaken for it
    ("llama-3", " b \n", "b<|eot_id|>"),  # the template trims it
])
def test_the_answer_is_found_where_it_is_shown(name, answer, span):
    text, spans = answer_spans(word_tokenizer(*CASES[name][:2]), chat([("user", "hi"), ("assistant", answer)]))
    assert [text[a:b] for a, b in spans] == [span]


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ raise_exception('no') }}", "rejected"),
    ("{% for m in messages %}{{ m.role }}{{ m.content | upper }}{% endfor %}", "changes the text of an answer"),
])
def test_templates_that_hide_the_answers_make_bad_rows(template, reason):
    with pytest.raises(BadRow, match=reason):
        encode_conversation(word_tokenizer(template, S), chat(CHAT))
