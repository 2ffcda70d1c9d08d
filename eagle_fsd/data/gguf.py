"""Targets in GGUF files: `transformers` dequantises them once, into an ordinary directory in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import bytes_in, cache_directory, cache_limit, locked, remove_folder
from .sources import check_source, fetch

if TYPE_CHECKING:
    from gguf import GGUFWriter, ReaderField

log = logging.getLogger(__name__)

# Without it, newer versions of `transformers` keep the weights packed.
packed = getattr(transformers, "GgufConfig", None)
UNPACKED = {} if packed is None else {"quantization_config": packed(dequantize=True)}
PART = 1 << 20  # bytes read at a time
DTYPE = torch.bfloat16  # of the cached weights; it is precise enough for 4-bit values
FORMAT = 3  # of the cache; models of another format are dequantised again
# Tokenizers for which llama.cpp adds BOS if the file does not specify it.
ADDS_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
# The names of tokens at which llama.cpp ends an answer (`special_eog_ids` of its vocabulary).
ENDS_OF_ANSWERS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|eos|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}


def target_source(source: object) -> str:
    """A target's directory or hub id; for a GGUF file the directory of its dequantised weights.

    Raises:
        TypeError, ValueError: see `check_source`; `transformers` cannot read the file, or it has no tokenizer.
        ImportError: the package gguf is missing.
        OSError: the cache cannot be written, or the hub id does not exist or cannot be downloaded.
    """
    checked = check_target(source)
    if Path(checked).is_file():
        return str(dequantised(Path(checked)))
    fetch(checked, "config.json", needed=True)
    return checked


def check_target(source: object) -> str:
    """A target's directory, GGUF file or hub id as a string.

    Raises:
        TypeError, ValueError: see `check_source`; a directory contains no model.
    """
    if isinstance(source, (str, Path)) and Path(source).suffix == ".gguf" and Path(source).is_file():
        return str(source)
    checked = check_source("target", source)
    configs = (Path(checked, name) for name in ("config.json", "adapter_config.json"))
    if Path(checked).is_dir() and not any(map(Path.is_file, configs)):
        raise ValueError(f"target {checked!r} is a directory without config.json: no model of transformers")
    return checked


def dequantised(file: Path) -> Path:
    """The directory of a GGUF file's dequantised model, created at the first call; it is never incomplete."""
    with open(file, "rb") as content:
        if content.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it does not begin with the bytes GGUF")
    folder = cache_directory() / "gguf" / f"{file.stem}-{fingerprint(file)}"
    if folder.is_dir():
        with suppress(OSError):  # another user's cache
            os.utime(folder)  # time of last use, see `make_room`
        return folder
    if find_spec("gguf") is None:
        raise ImportError(f"reading {file} needs the package gguf: pip install eagle_fsd[gguf]")
    lock = folder.parent.with_name(f"{folder.name}.lock")
    with locked(lock, wait=True, remove=True):  # threads and processes wait for the first
        if folder.is_dir():
            return folder
        make_room(folder.parent, 4 * file.stat().st_size)
        log.warning("dequantising %s to %s, up to two minutes per GB; later starts use the result (eagle-fsd cache "
                    "lists and clears it)", file, folder)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            _write(file, part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def fingerprint(file: Path) -> str:
    """An identifier of a file's content, so that copies share what was dequantised. Reading the whole file would take
    seconds at every start, or more: it is remembered by size, modification time, beginning and end."""
    info = file.stat()
    version, whole = hashlib.sha256(f"{info.st_size} {info.st_mtime_ns}".encode()), hashlib.sha256(f"{FORMAT}".encode())
    with open(file, "rb") as content:
        for start in (0, max(0, info.st_size - PART)):
            content.seek(start)
            version.update(content.read(PART))
        known, name = cache_directory() / "digests", version.hexdigest()[:16]
        for marker in known.glob(f"{name}-{FORMAT}-*"):
            return marker.name.rpartition("-")[2]
        content.seek(0)
        while part := content.read(PART):
            whole.update(part)
    found = whole.hexdigest()[:16]
    known.mkdir(parents=True, exist_ok=True)
    (known / f"{name}-{FORMAT}-{found}").touch()  # at once whole, also beside other threads and processes
    return found


def make_room(models: Path, needed: int) -> None:
    """Remove the least recently used models until `needed` more bytes are within the limit."""
    limit = cache_limit()
    cached = sorted((path for path in models.glob("*") if path.is_dir() and path.suffix != ".part"),
                    key=lambda path: path.stat().st_mtime)
    if needed > limit:
        return  # removing all of them would not suffice
    sizes = {path: bytes_in(path) for path in cached}
    for path in cached:
        if sum(sizes.values()) + needed <= limit:
            break
        log.warning("removing %s (%.1f GB), because dequantised models may take at most %.0f GB (EAGLE_FSD_CACHE_GB)",
                    path, sizes.pop(path) / 1e9, limit / 1e9)
        remove_folder(path)


def _write(file: Path, folder: Path) -> None:
    """Load the file by `transformers` and save the model in `folder`.

    Raises:
        ValueError: `transformers` cannot read it.
    """
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    problem = "be read as a causal LM: it is no GGUF file, damaged, or of an architecture unknown to transformers"
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=DTYPE, **UNPACKED)
        fields = tokenizer_fields(file)
        options = {"add_bos_token": True} if fields.get("pre") in ADDS_BOS else {}
        options |= {name: bool(fields[name]) for name in ("add_bos_token", "add_eos_token") if name in fields}
        problem = "be used: it has no tokenizer that transformers can read"
        tokenizer = AutoTokenizer.from_pretrained(**source, **options)  # 5.17 does not read these fields
    except Exception as error:  # a damaged file or an unknown architecture can raise any exception
        raise ValueError(f"{file} cannot {problem} ({type(error).__name__}: {error})") from error
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain, and can be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    rows = model.get_input_embeddings().weight.shape[0]
    ends = end_tokens(fields, {token: number for token, number in tokenizer.get_added_vocab().items() if number < rows})
    if ends:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_fields(file: Path) -> dict[str, object]:
    """The file's metadata under `tokenizer.ggml`, without the lists of tokens."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    start = "tokenizer.ggml."
    return {name.removeprefix(start): field.contents() for name, field in fields.items()
            if name.startswith(start) and len(field.types) == 1}


def end_tokens(fields: Mapping[str, object], special: Mapping[str, int]) -> list[int]:
    """The tokens that end an answer in llama.cpp: the file's ends of text, turn and message, in this order, then the
    special tokens with one of the names in ENDS_OF_ANSWERS.

    Args:
        special: token ids by their text.
    """
    named = [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    texts = ENDS_OF_ANSWERS - ({"<|end|>"} if "<|return|>" in special else set())  # gpt-oss: ends its reasoning
    return list(dict.fromkeys([int(number) for number in named if number is not None]
                              + sorted(number for text, number in special.items() if text in texts)))


def copy_field(writer: GGUFWriter, name: str, field: ReaderField) -> None:
    """Write a metadata field of one file to another."""
    first, *_, last = (*field.types, field.types[-1])
    writer.add_key_value(name, field.contents(), first, sub_type=last if len(field.types) > 1 else None)
