"""Targets in GGUF files: dequantised by `transformers` once, and kept in the user's cache as an ordinary directory."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import bytes_in, cache_directory, cache_limit, locked, remove_folder
from .sources import check_source, fetch

log = logging.getLogger(__name__)

# Newer versions of `transformers` keep weights packed otherwise.
packed = getattr(transformers, "GgufConfig", None)
UNPACKED = {} if packed is None else {"quantization_config": packed(dequantize=True)}
DTYPE = torch.bfloat16  # of the kept weights; 4-bit values are known no better than that
FORMAT = 2  # of what is kept; models of another one are made anew
ENDS = 1 << 20  # bytes
# Kinds of tokenizers for which llama.cpp begins a text with BOS where the file does not say whether to.
BEGINS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
# What llama.cpp takes as the end of an answer by its name (`special_eog_ids` of its vocabulary).
ENDS_OF_ANSWERS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|eos|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}


def target_source(source: object) -> str:
    """A target's directory or hub id; that of a GGUF file is where its weights are kept dequantised.

    Raises:
        TypeError, ValueError: see `check_source`; a file that `transformers` cannot read, or without a tokenizer.
        ImportError: the package gguf is missing.
        OSError: the cache cannot be written, or a hub id that cannot be found or fetched.
    """
    checked = check_target(source)
    if Path(checked).is_file():
        return str(dequantised(Path(checked)))
    fetch(checked, "config.json", needed=True)
    return checked


def check_target(source: object) -> str:
    """A target's directory, GGUF file or hub id as text; see `check_source` for what is raised besides.

    Raises:
        ValueError: a directory that holds no model.
    """
    if isinstance(source, (str, Path)) and Path(source).suffix == ".gguf" and Path(source).is_file():
        return str(source)
    checked = check_source("target", source)
    configs = (Path(checked, name) for name in ("config.json", "adapter_config.json"))
    if Path(checked).is_dir() and not any(map(Path.is_file, configs)):
        raise ValueError(f"target {checked!r} is a directory without config.json: no model of transformers")
    return checked


def dequantised(file: Path) -> Path:
    """The directory of a GGUF file's model, made where it is not there yet; complete, or not there at all."""
    with open(file, "rb") as content:
        if content.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it does not begin with the bytes GGUF")
    folder = cache_directory() / "gguf" / f"{file.stem}-{fingerprint(file)}"
    if folder.is_dir():
        with suppress(OSError):  # somebody else's cache
            os.utime(folder)  # when it was last used, see `make_room`
        return folder
    if find_spec("gguf") is None:
        raise ImportError(f"{file} needs the package gguf to be read: pip install eagle_fsd[gguf]")
    lock = folder.parent.with_name(f"{folder.name}.lock")
    with locked(lock, wait=True, remove=True):  # threads and processes wait for the first
        if folder.is_dir():
            return folder
        make_room(folder.parent, 4 * file.stat().st_size)
        log.warning("%s is dequantised once, to %s, which later starts read (eagle-fsd cache lists and clears it): "
                    "some 10 seconds for each GB of it", file, folder)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            _write(file, part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def fingerprint(file: Path) -> str:
    """What tells a file from others, and from what was at its place before: its size, when it was written, and its
    beginning and end. To read all of it would take seconds at every start."""
    about = file.stat()
    digest = hashlib.sha256(f"{FORMAT} {about.st_size} {about.st_mtime_ns}".encode())
    with open(file, "rb") as content:
        for start in (0, max(0, about.st_size - ENDS)):
            content.seek(start)
            digest.update(content.read(ENDS))
    return digest.hexdigest()[:16]


def make_room(models: Path, needed: int) -> None:
    """Remove models that were not used for the longest time, until so many bytes more are within the limit."""
    limit = cache_limit()
    kept = sorted((path for path in models.glob("*") if path.is_dir() and path.suffix != ".part"),
                  key=lambda path: path.stat().st_mtime)
    if needed > limit:
        return  # none of them would make room enough
    sizes = {path: bytes_in(path) for path in kept}
    for path in kept:
        if sum(sizes.values()) + needed <= limit:
            break
        log.warning("%s (%.1f GB) is removed, so that dequantised models take at most %.0f GB: EAGLE_FSD_CACHE_GB "
                    "sets another limit", path, sizes.pop(path) / 1e9, limit / 1e9)
        remove_folder(path)


def _write(file: Path, folder: Path) -> None:
    """Save what `transformers` makes of the file.

    Raises:
        ValueError: it can make nothing of it.
    """
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    what = "be read as a causal LM: it is no GGUF file, damaged, or of an architecture that transformers does not read"
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=DTYPE, **UNPACKED)
        fields = tokenizer_fields(file)
        asked = {"add_bos_token": True} if fields.get("pre") in BEGINS else {}
        asked |= {name: bool(fields[name]) for name in ("add_bos_token", "add_eos_token") if name in fields}
        what = "be used: it has no tokenizer that transformers can read"
        tokenizer = AutoTokenizer.from_pretrained(**where, **asked)  # 5.17 does not read them itself
    except Exception as error:  # the readers raise what a damaged file or an unknown architecture ends in
        raise ValueError(f"{file} cannot {what} ({type(error).__name__}: {error})") from error
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain now, and may be saved
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
    """What a file's metadata say of its tokenizer under `tokenizer.ggml`, without the lists of tokens."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    start = "tokenizer.ggml."
    return {name.removeprefix(start): field.contents() for name, field in fields.items()
            if name.startswith(start) and len(field.types) == 1}


def end_tokens(fields: Mapping[str, object], special: Mapping[str, int]) -> list[int]:
    """The tokens that end an answer, as llama.cpp takes them: the ends of text, turn and message that the file names,
    the first one first, and special tokens that are called what models call theirs.

    Args:
        special: tokens by their text.
    """
    named = [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    texts = ENDS_OF_ANSWERS - ({"<|end|>"} if "<|return|>" in special else set())  # gpt-oss: the end of its thoughts
    return list(dict.fromkeys([int(number) for number in named if number is not None]
                              + sorted(number for text, number in special.items() if text in texts)))
