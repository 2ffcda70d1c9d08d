"""Which tokens of a conversation are learned, token by token, for the chat formats in use.

The templates are written here from the formats that their models' cards describe.
"""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_fsd.data.conversations import BadRow
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
IM, S = ["<|im_start|>", "<|im_end|>"], ["<s>", "</s>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# The second question repeats the first answer, so that a search for its text alone would go wrong.
CHAT = [("user", "hi"), ("assistant", "yes it is"), ("user", "yes it is"), ("assistant", "bye")]
IM_CHAT = ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{yes it is<|im_end|>}\n<|im_start|>user\n"
           "yes it is<|im_end|>\n<|im_start|>assistant\n")
VICUNA_CHAT = ["<s>USER: hi ASSISTANT:{ yes it is</s>}USER: yes it is ASSISTANT:{ bye</s>}"]

# name: template, special tokens, conversation, its documents with the learned parts in {braces}. The last two templates
# show earlier turns differently once they are answered: a document per answer.
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
}


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
