"""Targets in GGUF files: dequantised by `transformers` once, and kept in the user's cache as an ordinary directory."""

from __future__ import annotations

import hashlib
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import cache_directory, locked
from .sources import check_source, fetch

log = logging.getLogger(__name__)

# Newer versions of `transformers` keep weights packed otherwise.
packed = getattr(transformers, "GgufConfig", None)
UNPACKED = {} if packed is None else {"quantization_config": packed(dequantize=True)}
DTYPE = torch.bfloat16  # of the kept weights; 4-bit values are known no better than that


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
    folder = cache_directory() / "gguf" / f"{file.stem}-{digest_of(file)[:16]}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise ImportError(f"{file} needs the package gguf to be read: pip install eagle_fsd[gguf]")
    with locked(folder.parent.with_name(f"{folder.name}.lock"), wait=True):  # threads and processes wait for the first
        if folder.is_dir():
            return folder
        log.warning("%s is dequantised once, to %s: half a minute, which the next start does not take", file, folder)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            _write(file, part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _write(file: Path, folder: Path) -> None:
    """Save what `transformers` makes of the file.

    Raises:
        ValueError: it can make nothing of it.
    """
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    what = "be read as a causal LM: it is no GGUF file, damaged, or of an architecture that transformers does not read"
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=DTYPE, **UNPACKED)
        what = "be used: it has no tokenizer that transformers can read"
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # the readers raise what a damaged file or an unknown architecture ends in
        raise ValueError(f"{file} cannot {what} ({type(error).__name__}: {error})") from error
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain now, and may be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while piece := content.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
