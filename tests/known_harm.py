"""A pair in which it is known what each substitution does: the next token is a function of the last one.

Token t's feature is one-hot, the target's logits behind it are a row of a table, and the head drafts by another table,
which at some tokens has a substitute in the place of the target's choice.
"""

import json

import torch
from tiny import SIZES, tiny_target, tiny_tokenizer
from transformers import LlamaConfig

from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.pair import EagleModel

LETTERS = "abcdefghijklmnopqrst01234567"
END = 1
NEXT = {  # a question that ends in a is answered efg1, one in b hi4, one in c no5
    "a": "e", "e": "f", "f": "g", "g": "1", "b": "h", "h": "i", "i": "4", "c": "n", "n": "o", "o": "5",
    "k": "g", "l": "m", "m": "3", "p": "5",
}
SUBSTITUTES = {"e": "k", "g": "2", "h": "l", "n": "p"}  # drafted in the place of NEXT
HARMFUL = {"k": False, "2": True, "l": True, "p": False}  # ekg1 and np5 end as before, efg2 and hlm3 do not
TREE = TreeConfig(6, 3, 2)


def known_pair() -> EagleModel:
    tokenizer = tiny_tokenizer(LETTERS)
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    number = tokenizer.convert_tokens_to_ids
    count = SIZES["vocab_size"]
    wanted = 0.3 * torch.randn(count, count, generator=torch.Generator().manual_seed(0)).double()  # [last, next]
    drafted = wanted.clone()
    for last in range(count):
        letter = tokenizer.convert_ids_to_tokens(last)
        own = number(NEXT[letter]) if letter in NEXT else END
        wanted[last, own] = drafted[last, own] = 12.0
        if letter in SUBSTITUTES:
            substitute = number(SUBSTITUTES[letter])
            wanted[last, substitute], drafted[last, substitute], drafted[last, own] = 11.0, 12.0, -12.0
    target = tiny_target(hidden_size=count)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()  # no layer adds anything
        target.model.embed_tokens.weight.copy_(torch.eye(count))
        target.lm_head.weight.copy_(wanted.T / count**0.5)  # the norm makes a one-hot vector sqrt(D) long
    target.generation_config.eos_token_id = END
    head = DraftHead(LlamaConfig(**SIZES | {"hidden_size": count, "num_hidden_layers": 1}))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                weight.zero_()
        head.embed_tokens.weight.copy_(torch.eye(count))
        head.fc.weight.zero_()
        head.fc.weight[:, :count] = torch.linalg.solve(target.lm_head.weight.double(), drafted.T).float()
    return EagleModel.from_parts(target, head.eval(), tokenizer)


def write_questions(path, count: int = 12):
    """Questions, all different, that end in a, a, b, b, c, c, a, ...: both modes get each."""
    answers = {"a": "1", "b": "4", "c": "7"}  # the last ones are answered wrongly
    lines = []
    for number in range(count):
        last = "abc"[number // 2 % 3]
        prefix = "".join("rst"[number // 3**place % 3] for place in range(5))  # nothing depends on it
        lines.append(json.dumps({"question_id": number, "question": prefix + last,
                                 "answer": f"#### {answers[last]}"}))
    path.write_text("\n".join(lines) + "\n")
    return path
