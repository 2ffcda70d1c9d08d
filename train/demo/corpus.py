"""The demo pair's text: task conversations and the Python source of this interpreter's standard library.

Both come from the machine itself, so nothing is downloaded.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from eagle_fsd.data.documents import Documents
from train.demo.families import FAMILIES
from train.demo.tasks import Task, tasks

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


def installed_files() -> list[Path]:
    """Source files of the installed packages, for training only."""
    return sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))


def python_texts(split: str, *, installed: bool = False) -> Iterator[str]:
    """The readable, mostly ASCII files of a split; `installed`: of the installed packages too."""
    for file in [*python_files(split), *(installed_files() if installed else [])]:
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


def train_tokenizer(vocab_size: int, questions: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE on so many training tasks and source; every digit is a token of its own."""
    def texts() -> Iterator[str]:
        for task in tasks("train", seed=-1, count=questions):
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


def encode_tasks(tokenizer: PreTrainedTokenizerFast, batch: list[Task]) -> list[tuple[list[int], list[bool]]]:
    """Token ids of each whole conversation, and for each whether it is of the last answer."""
    prompts = [tokenizer.apply_chat_template(t.messages, tokenize=False, add_generation_prompt=True) for t in batch]
    return encode_answers(tokenizer, prompts, [t.answer + "<|end|>" for t in batch])


def encode_answers(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[str]
) -> list[tuple[list[int], list[bool]]]:
    """As `encode_tasks`, for rendered prompts and answers. The parts are encoded apart, as in generation."""
    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    pairs = zip(encode(prompts), encode(answers), strict=True)
    return [(p + a, [False] * len(p) + [True] * len(a)) for p, a in pairs]


def training_documents(
    tokenizer: PreTrainedTokenizerFast, count: int, *, python_share: float, seed: int, practice: Sequence[str] = (),
    installed: bool = False,
) -> Documents:
    """`count` documents: task conversations, and pieces of source as `python_share` of the documents.

    Args:
        practice: task families that get further turns beside the one that each family has.
        installed: take source of the installed packages too.
    """
    pieces = source_pieces(tokenizer, round(count * python_share), seed, installed=installed)
    questions = tasks("train", seed=seed, count=count - len(pieces), families=(*FAMILIES, *practice))
    documents = pieces
    with tqdm(total=count, initial=len(pieces), desc="text", unit="document", disable=None) as bar:
        while batch := list(itertools.islice(questions, 512)):
            documents += encode_tasks(tokenizer, batch)
            bar.update(len(batch))
    return Documents.of(documents)


def source_pieces(
    tokenizer: PreTrainedTokenizerFast, count: int, seed: int, length: int = 256, *, installed: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """`count` random pieces of the training source, each of at most `length` tokens, learned from the first on."""
    files = list(python_texts("train", installed=installed))
    rng = random.Random(seed)
    rng.shuffle(files)
    pieces: list[tuple[list[int], list[bool]]] = []
    endless = itertools.cycle(files)
    while len(pieces) < count:
        for ids in tokenizer(list(itertools.islice(endless, 64)), add_special_tokens=False)["input_ids"]:
            if len(pieces) >= count:
                break
            ids = [*ids, tokenizer.eos_token_id]
            body = length - 1
            cut = [ids[i : i + body] for i in range(0, len(ids), body)]
            pieces += [([tokenizer.bos_token_id, *piece], [False] + [True] * len(piece)) for piece in cut]
    rng.shuffle(pieces)
    return pieces[:count]
