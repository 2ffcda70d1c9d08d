"""Which tokens of a conversation are learned, token by token, for the chat formats in use.

The templates are written here from the formats that their models' cards describe.
"""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_fsd.data.conversations import BadRow
from train.data.chat_mask import answer_spans, encode_conversation

# name: (template, special tokens, end token, rendering of CHAT with the learned parts in {braces}).
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
MISTRAL = (  # has no generation prompt: the answer follows the instruction
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no system turn') }}"
    "{% endif %}{% endfor %}"
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
IM = ["<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

TEMPLATES = {
    "llama-3": (LLAMA_3, HEADERS, "<|eot_id|>",
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
                "<|end_header_id|>\n\n{yes it is<|eot_id|>}<|start_header_id|>user<|end_header_id|>\n\nyes it is"
                "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{bye<|eot_id|>}"),
    "chatml": (CHATML, IM, "<|im_end|>",
               "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{yes it is<|im_end|>}\n<|im_start|>user\n"
               "yes it is<|im_end|>\n<|im_start|>assistant\n{bye<|im_end|>}\n"),
    "qwen-3": (QWEN_3, IM, "<|im_end|>",
               "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{yes it is<|im_end|>}\n<|im_start|>user\n"
               "yes it is<|im_end|>\n<|im_start|>assistant\n{<think>\n\n</think>\n\nbye<|im_end|>}\n"),
    "mistral": (MISTRAL, ["<s>", "</s>"], "</s>",
                "<s>[INST] hi [/INST]{ yes it is</s>}[INST] yes it is [/INST]{ bye</s>}"),
    "vicuna": (VICUNA, ["<s>", "</s>"], "</s>",
               "<s>USER: hi ASSISTANT:{ yes it is</s>}USER: yes it is ASSISTANT:{ bye</s>}"),
    "vicuna, no prompt": (VICUNA_NO_PROMPT, ["<s>", "</s>"], "</s>",
                          "<s>USER: hi ASSISTANT:{ yes it is</s>}USER: yes it is ASSISTANT:{ bye</s>}"),
    "generation marks": (MARKED, IM, "<|im_end|>",
                         "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{yes it is<|im_end|>}\n<|im_start|>"
                         "user\nyes it is<|im_end|>\n<|im_start|>assistant\n{bye<|im_end|>}\n"),
}
# The second question repeats the first answer, so that a search for its text alone would go wrong.
CHAT = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes it is"},
    {"role": "user", "content": "yes it is"}, {"role": "assistant", "content": "bye"},
]


def word_tokenizer(template: str, special: list[str], eos: str) -> PreTrainedTokenizerFast:
    """One token per word with the space before it, per line break and per special token."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\n| ?[^A-Za-z\s]|\s"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=eos, additional_special_tokens=special,
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_their_end_marks_are_learned_and_nothing_else(name):
    template, special, eos, expected = TEMPLATES[name]
    tokenizer = word_tokenizer(template, special, eos)
    ((ids, learned),) = encode_conversation(tokenizer, CHAT)
    text = expected.replace("{", "").replace("}", "")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert drawn(tokenizer, text, learned) == expected


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
SPLIT = {
    "mistral, system turn": (
        MISTRAL_SYSTEM, ["<s>", "</s>"], "</s>", [{"role": "system", "content": "be kind"}, *CHAT],
        ["<s>[INST] be kind hi[/INST]{ yes it is</s>}",
         "<s>[INST] hi[/INST] yes it is</s>[INST] be kind yes it is[/INST]{ bye</s>}"],
    ),
    "thoughts": (
        THOUGHTS, IM, "<|im_end|>",
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"},
         {"role": "user", "content": "d"}, {"role": "assistant", "content": "<think>e</think>f"}],
        ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think>b</think>c<|im_end|>}\n",
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
         "<|im_start|>assistant\n{<think>e</think>f<|im_end|>}\n"],
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_templates_that_show_earlier_turns_differently_give_one_document_per_answer(name):
    template, special, eos, chat, expected = SPLIT[name]
    tokenizer = word_tokenizer(template, special, eos)
    encoded = encode_conversation(tokenizer, chat)
    texts = [line.replace("{", "").replace("}", "") for line in expected]
    assert [ids for ids, _ in encoded] == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [drawn(tokenizer, t, learned) for t, (_, learned) in zip(texts, encoded, strict=True)] == expected


def test_an_answer_inside_the_header_of_answers_is_not_mistaken_for_it():
    tokenizer = word_tokenizer(*TEMPLATES["vicuna, no prompt"][:3])
    text, spans = answer_spans(tokenizer, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "A"}])
    assert text == "<s>USER: hi ASSISTANT: A</s>" and [text[a:b] for a, b in spans] == [" A</s>"]


def test_content_that_the_template_trims_is_found():
    tokenizer = word_tokenizer(*TEMPLATES["llama-3"][:3])
    text, spans = answer_spans(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b \n"}])
    assert [text[a:b] for a, b in spans] == ["b<|eot_id|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no') }}", "refused"),
        ("{% for m in messages %}{{ m.role }}{{ m.content | upper }}{% endfor %}", "does not show an answer"),
        ("{% set n = messages | length %}{{ n }}{% for m in messages %}{{ m.content }}{{ n }}{% endfor %}", "not show"),
    ],
)
def test_templates_that_hide_the_answers_make_bad_rows(template, reason):
    with pytest.raises(BadRow, match=reason):
        encode_conversation(word_tokenizer(template, ["<s>", "</s>"], "</s>"), CHAT)


def test_a_tokenizer_without_template_is_an_error():
    tokenizer = word_tokenizer(CHATML, IM, "<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_conversation(tokenizer, CHAT)
