"""The demo pair's text: task conversations and the Python source of this interpreter's standard library.

Both come from the machine itself, so nothing is downloaded. The token stream is written once as uint16 rows of
a fixed length, with a second array that says which tokens are learned (assistant turns and Python source).
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from train.tasks import Task, tasks

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% elif message['role'] in ['system', 'user'] %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def python_files(split: str) -> list[Path]:
    """Source files of the running interpreter's standard library; one in 32, by name, is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.parts]
    heldout = [zlib.crc32(str(f.relative_to(root)).encode()) % 32 == 0 for f in files]
    return [f for f, held in zip(files, heldout, strict=True) if held == (split == "heldout")]


def python_texts(split: str) -> Iterator[str]:
    """The readable, mostly ASCII files of a split."""
    for file in python_files(split):
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 200 < len(text) < 400_000 and sum(map(ord, text)) < 128 * len(text) and text.isascii():
            yield text


def python_prefixes(count: int, *, characters: int = 300) -> list[str]:
    """`count` beginnings of held-out source, each cut at a line end: prompts for continuation."""
    prefixes = []
    for text in python_texts("heldout"):
        for start in range(0, len(text) - 2 * characters, 6000):
            begin = text.rfind("\n", 0, start) + 1 if start else 0
            end = text.rfind("\n", begin, begin + characters) + 1
            if end - begin > characters // 2:
                prefixes.append(text[begin:end])
    random.Random(0).shuffle(prefixes)
    return prefixes[:count]


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on training tasks and source; every digit is a token of its own."""
    def texts() -> Iterator[str]:
        for task in tasks("train", seed=-1, count=20_000):
            yield from (m["content"] for m in task.messages)
            yield task.answer
        for i, text in enumerate(python_texts("train")):
            if i % 8 == 0:
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE, model_max_length=4096, clean_up_tokenization_spaces=False,
    )


def encode_tasks(tokenizer: PreTrainedTokenizerFast, batch: list[Task]) -> list[tuple[list[int], int]]:
    """Token ids of each whole conversation and the position where its last answer starts."""
    prompts = [tokenizer.apply_chat_template(t.messages, tokenize=False, add_generation_prompt=True) for t in batch]
    return encode_answers(tokenizer, prompts, [t.answer + "<|end|>" for t in batch])


def encode_answers(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[str]
) -> list[tuple[list[int], int]]:
    """As `encode_tasks`, for rendered prompts and answers. The parts are encoded apart, as in generation."""
    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    return [(p + a, len(p)) for p, a in zip(encode(prompts), encode(answers), strict=True)]


def pack(
    tokenizer: PreTrainedTokenizerFast,
    rows: int,
    length: int,
    *,
    python_share: float,
    seed: int,
    conversations: Iterator[tuple[list[int], int]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of training text: whole conversations, the rest of each row and `python_share` of the rows source.

    Conversations are never cut: of a pool of waiting ones the longest that fits is placed.

    Args:
        conversations: endless token ids, each with the position where its answer starts; None: training tasks.

    Returns:
        tokens [rows, length] uint16, learned [rows, length] bool (whether the token is a training target:
        answers and source).
    """
    rng = random.Random(seed)
    source = _source_stream(tokenizer, rng)
    conversations = task_conversations(tokenizer, seed, length) if conversations is None else conversations
    pool = [next(conversations) for _ in range(64)]
    tokens = np.zeros((rows, length), np.uint16)
    learned = np.zeros((rows, length), bool)
    for row in tqdm(range(rows), desc="text", unit="row", disable=None):
        column = 0
        while rng.random() >= python_share if column == 0 else True:
            fitting = [i for i, (ids, _) in enumerate(pool) if len(ids) <= length - column]
            if not fitting:
                break
            # The first of a row is any, so that long ones do not gather at the start of the rows.
            chosen = fitting[0] if column == 0 else max(fitting, key=lambda i: len(pool[i][0]))
            ids, start = pool[chosen]
            pool[chosen] = next(conversations)
            tokens[row, column : column + len(ids)] = ids
            learned[row, column + start : column + len(ids)] = True
            column += len(ids)
        if column < length:
            tokens[row, column] = tokenizer.bos_token_id
            tokens[row, column + 1 :] = source(length - column - 1)
            learned[row, column + 1 :] = True
    return tokens, learned


def task_conversations(tokenizer: PreTrainedTokenizerFast, seed: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """Endless training tasks of at most `longest` tokens."""
    chunk = seed * 1_000_000
    while True:
        batch = list(tasks("train", seed=chunk, count=512))
        random.Random(chunk).shuffle(batch)
        yield from (doc for doc in encode_tasks(tokenizer, batch) if len(doc[0]) <= longest)
        chunk += 1


def _source_stream(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Callable[[int], np.ndarray]:
    """A function that returns the next n tokens of the training source, its files in random order, again and again."""
    files = list(python_texts("train"))
    rng.shuffle(files)
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in files]
    stream = np.concatenate([np.asarray(ids, np.uint16) for ids in encoded])
    position = 0

    def take(count: int) -> np.ndarray:
        nonlocal position
        piece = stream.take(range(position, position + count), mode="wrap")
        position += count
        return piece

    return take
