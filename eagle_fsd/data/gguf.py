"""Targets in GGUF files: `transformers` dequantises them once, into an ordinary directory in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..utils.files import bytes_in, cache_directory, cache_limit, locked, remove_folder
from ..utils.installation import install_command
from .gguf_config import ROPE_TENSORS, gguf_config
from .sources import check_source, fetch, is_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter, ReaderField

log = logging.getLogger(__name__)

# Without it, newer versions of `transformers` keep the weights packed.
packed = getattr(transformers, "GgufConfig", None)
UNPACKED = {} if packed is None else {"quantization_config": packed(dequantize=True)}
PART = 1 << 20  # bytes read at a time
DTYPE = torch.bfloat16  # of the cached weights; it is precise enough for 4-bit values
FORMAT = 4  # of the cache; models of another format are dequantised again
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
    if is_gguf(source):
        return str(source)
    checked = check_source("target", source)
    configs = (Path(checked, name) for name in ("config.json", "adapter_config.json"))
    if Path(checked).is_dir() and not any(map(Path.is_file, configs)):
        raise ValueError(f"target {checked!r} is a directory without config.json: no model of transformers")
    return checked


def dequantised(file: Path) -> Path:
    """The directory of a GGUF file's dequantised model, created at the first call; it is never incomplete.

    Args:
        file: a whole model, or any shard of a split one beside the others.
    """
    files = shards(file)
    prints = "-".join(map(fingerprint, files))
    name = prints if len(files) == 1 else hashlib.sha256(prints.encode()).hexdigest()[:16]
    folder = cache_directory() / "gguf" / f"{files[0].stem}-{name}"
    if folder.is_dir():
        with suppress(OSError):  # another user's cache
            os.utime(folder)  # time of last use, see `make_room`
        return folder
    if find_spec("gguf") is None:
        raise ImportError(f"reading {file} needs the package gguf: {install_command('gguf')}")
    lock = folder.parent.with_name(f"{folder.name}.lock")
    with locked(lock, wait=True):  # threads and processes wait for the first
        if folder.is_dir():
            return folder
        make_room(folder.parent, 4 * sum(part.stat().st_size for part in files))
        log.warning("dequantising %s to %s, up to two minutes per GB; later starts use the result (eagle-fsd cache "
                    "lists and clears it)", file, folder)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            part.mkdir(parents=True)
            whole = file if len(files) == 1 else join(files, part / "whole.gguf")
            _write(whole, part)
            if whole != file:
                whole.unlink()
            part.rename(folder)
        except ValueError as error:
            raise ValueError(f"{file} cannot be loaded: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def shards(file: Path) -> list[Path]:
    """The files of a model that llama.cpp's `gguf-split` has split, in order, by their names; else the file alone.

    Raises:
        ValueError: some are not there.
    """
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})", file.stem)
    if found is None:
        return [file]
    name, count = found.groups()
    files = [file.with_name(f"{name}-{number:05d}-of-{count}{file.suffix}") for number in range(1, int(count) + 1)]
    if lacking := [part.name for part in files if not part.is_file()]:
        raise ValueError(f"{file} is one of {int(count)} shards, and beside it are not: {', '.join(lacking)}")
    return files


def join(files: Sequence[Path], whole: Path) -> Path:
    """Write the shards of a model as one file, without reading their tensors into memory."""
    from gguf import GGUFWriter

    readers = [opened(file) for file in files]
    fields = readers[0].fields
    writer = GGUFWriter(whole, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "split.")) and name not in ("general.architecture", "general.alignment"):
            copy_field(writer, name, field)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


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
        ValueError: the file is damaged or incomplete, or its model or tokenizer cannot be expressed.
    """
    metadata, tensors, rope = read(file)
    if metadata.get("split.count", 0) > 1:
        raise ValueError(f"it is shard {metadata['split.no'] + 1} of {metadata['split.count']}, but its name does not "
                         "end in -00001-of-00002.gguf or the like, by which the others are found")
    config, source = gguf_config(metadata, tensors, rope), {"pretrained_model_name_or_path": file.parent}
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    options = {"add_bos_token": True} if fields.get("pre") in ADDS_BOS else {}
    options |= {name: bool(fields[name]) for name in ("add_bos_token", "add_eos_token") if name in fields}
    try:
        problem = "transformers cannot read it"
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **source, gguf_file=file.name, config=config, dtype=DTYPE, output_loading_info=True, **UNPACKED)
        problem = "it has no tokenizer that transformers can read"
        tokenizer = AutoTokenizer.from_pretrained(**source, gguf_file=file.name, **options)  # 5.17 reads no options
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"{problem} ({type(error).__name__}: {error})") from error
    check_tensors(model, tensors, loaded["missing_keys"])
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain, and can be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    rows = model.get_input_embeddings().weight.shape[0]
    ends = end_tokens(fields, {token: number for token, number in tokenizer.get_added_vocab().items() if number < rows})
    if ends:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def opened(file: Path) -> GGUFReader:
    """A reader of the file.

    Raises:
        ValueError: it is damaged.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"{file.name} is damaged ({type(error).__name__}: {error})") from error


def read(file: Path) -> tuple[dict[str, object], dict[str, list[int]], dict[str, torch.Tensor]]:
    """A file's metadata without lists of tokens, the shapes of its tensors, and those of ROPE_TENSORS.

    Raises:
        ValueError: it is damaged.
    """
    reader = opened(file)
    metadata = {key: field.contents() for key, field in reader.fields.items()
                if len(field.types) == 1 or not key.startswith("tokenizer.")}
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    return metadata, shapes, {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors
                              if tensor.name in ROPE_TENSORS}


def check_tensors(model: PreTrainedModel, tensors: Mapping[str, list[int]], missing: Collection[str]) -> None:
    """Raise ValueError unless each tensor of a file is in the model, and each weight of the model in the file."""
    if missing:  # transformers would leave these weights random
        raise ValueError(f"it lacks weights: {', '.join(sorted(missing))}")
    held = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    stored = sum(prod(shape) for name, shape in tensors.items() if name not in ROPE_TENSORS)
    if stored != held:
        raise ValueError(f"it has {stored:,} weights, and {type(model).__name__} {held:,}")


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
