"""Compute the target's features of a dataset, and write them to disk for training.

    python -m train.features --target T --data data/chat --out data/chat-features

The command logs and checks the required disk space first. An interrupted run loses at most one shard, and continues.
F width of the features (`train.teacher`).
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.heads.eagle3 import check_layers
from eagle_fsd.models.linear import packed_form
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.files import check_same, only_writer, save_atomically
from eagle_fsd.utils.progress import Progress

from .teacher import BATCH_TOKENS, OnlineFeatures, load_quantized, read_index, shard_path, target_digest

log = logging.getLogger("train.features")

SHARD_TOKENS = 65_536  # most that an interrupted run loses: 0.5 GB in bf16 at a hidden size of 4,096


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute the target's features of a dataset, and write them to disk for training.

    Args:
        target: directory, Hub ID or GGUF file of the target. If omitted: SmolLM2-135M-Instruct, as in eagle_fsd.load.
        data: dataset from prepare_data.
        out: folder of the features; an interrupted run continues there.
        layers: target layers whose inputs are stored too. EAGLE-3 heads read 2, the middle one and the third from the
            end.
        dtype: dtype of the target and the features.
        quantization: int8: compute with 8-bit weights on a CPU, as in eagle_fsd.load; for a target that will run so.
        device: device of the target. If omitted: CUDA if available, else the CPU.
        device_map: how accelerate places a large target, for example auto.
        batch_tokens: tokens in one forward pass, including padding. If omitted: 16,384 on a GPU, and 1,024 on a CPU for
            its caches (SmolLM2 on two cores: 1,135 tokens/s, not 623).
        trust_remote_code: run code from the target's repository.
    """

    target: str | None = None
    data: Path
    out: Path
    layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: Literal["int8"] | None = None
    device: str | None = None
    device_map: str | None = None
    batch_tokens: int | None = None
    trust_remote_code: bool = False


def write_features(
    target: TargetModel, documents: Documents, directory: Path, *, batch_tokens: int = BATCH_TOKENS["cuda"],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write the features of every document, except the shards that exist.

    Raises:
        ValueError: too little disk space (checked first), or the folder belongs to another dataset or target, or
            another process writes it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory):
        stored = read_index(directory) if (directory / "index.json").exists() else None
        bounds = stored["first_documents"] if stored else shard_starts(documents.ends, shard_tokens)
        index = {
            "dataset": documents.digest(), "target": target_digest(target), "dtype": str(target.dtype),
            "feature_size": target.feature_size, "layers": list(target.feature_layers), "scale": target.scale,
            "softcap": target.softcap, "first_documents": bounds,
        }
        if packed_form(target.model) is not None:
            index["weights"] = packed_form(target.model)
        if stored:
            check_same(directory, stored, index)
        bounds = [*bounds, len(documents)]
        todo = [n for n in range(len(bounds) - 1) if not shard_path(directory, n).is_file()]
        missing = sum(int(documents.lengths[bounds[n] : bounds[n + 1]].sum()) for n in todo)
        needed, free = bytes_needed(missing, target) if todo else 0, shutil.disk_usage(directory).free
        log.info("the features need %.2f GB more in %s, which has %.2f GB free", needed / 1e9, directory, free / 1e9)
        if needed > free:
            raise ValueError(f"the features need {needed / 1e9:.2f} GB more: {directory} has {free / 1e9:.2f} GB free")
        save_atomically(directory / "index.json", lambda path: path.write_text(json.dumps(index), encoding="utf-8"))
        write_ends(target, directory)
        total, online = len(documents.tokens), OnlineFeatures(target, documents, batch_tokens)
        with Progress(desc="features", unit="token", total=total, done=total - missing) as progress:
            for number in todo:
                rows = np.arange(bounds[number], bounds[number + 1])
                tensors = {"features": online(rows, progress.update)}
                save_atomically(shard_path(directory, number), lambda path, tensors=tensors: save_file(tensors, path))


def bytes_needed(tokens: int, target: TargetModel) -> int:
    """Disk space for the features of `tokens` tokens, and for the target's embeddings and output layer."""
    width = torch.empty(0, dtype=target.dtype).element_size()
    return (tokens * target.feature_size + 2 * target.vocab_size * target.hidden_size) * width


def write_ends(target: TargetModel, directory: Path) -> None:
    """Write the target's embeddings and output layer, which head training needs too."""
    every = torch.arange(len(target.embed_tokens.weight), device=target.input_device)
    # The output of the module, not its weight: Gemma scales embeddings in its forward.
    ends = {"embed_tokens": target.embed_tokens(every), "lm_head": target.lm_head.weight}
    if target.lm_head.bias is not None:
        ends["lm_head_bias"] = target.lm_head.bias
    save_atomically(directory / "target_ends.safetensors", lambda path: save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in ends.items()}, path
    ))


def shard_starts(ends: np.ndarray, per_shard: int) -> list[int]:
    """The first document of each shard. A shard has at most `per_shard` tokens, or one longer document."""
    first = [0]
    while True:
        start = ends[first[-1] - 1] if first[-1] else 0
        following = max(first[-1] + 1, int(np.searchsorted(ends, start + per_shard, side="right")))
        if following >= len(ends):
            return first
        first.append(following)


def run(arguments: Arguments, answered_by: str | None = None) -> None:
    """Load the target and write the features.

    Args:
        answered_by: digest that the target must have; None: any.

    Raises:
        ValueError: an option is out of range, or it is another target; see also `write_features`.
    """
    check_counts(arguments, "batch_tokens")
    documents = Documents.load(arguments.data)
    name = arguments.target or default_target()
    options = {"dtype": arguments.dtype, "trust_remote_code": arguments.trust_remote_code}
    if arguments.quantization is not None:
        if arguments.device not in (None, "cpu") or arguments.device_map is not None:
            raise ValueError("--quantization needs a target on the CPU: leave out --device and --device-map")
        target = load_quantized(name, arguments.quantization, **options)
    else:
        model, _ = load_target(name, device=arguments.device, device_map=arguments.device_map, **options)
        target = TargetModel(model, check=False)
    if answered_by is not None:
        check_same(arguments.data, {"target": answered_by}, {"target": target_digest(target)})
    target.feature_layers = check_layers(arguments.layers, len(target.decoder_layers))
    write_features(target, documents, arguments.out, batch_tokens=arguments.batch_tokens or BATCH_TOKENS.get(
        target.input_device.type, BATCH_TOKENS["cuda"]))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status(
        __spec__.name, lambda: run(parse_options(Arguments, program=f"python -m {__spec__.name}")),
        stopped="stopped; the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())
