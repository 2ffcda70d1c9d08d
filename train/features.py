"""Write the target's features of a dataset to disk, for trainings that read them.

    python -m train.features --target T --data data/chat --out data/chat-features

An interrupted run loses at most the shard that was being made, and continues. The disk space needed is said, and
checked, first. F width of the features (`train.teacher`).
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.files import only_writer, save_atomically
from eagle_fsd.data.progress import Progress
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.heads.eagle3 import check_layers
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from train.documents import Documents, split_rows
from train.teacher import OnlineFeatures, read_index, shard_path

log = logging.getLogger("train.features")

BATCH_TOKENS = {"cpu": 1024, "cuda": 16_384}  # of one forward
SHARD_TOKENS = 65_536  # what an interrupted run loses at most: 0.5 GB in bf16 at a hidden size of 4,096


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write the target's features of a dataset to disk, for trainings that read them.

    Args:
        target: directory, hub id or GGUF file; without it SmolLM2-135M-Instruct, as of eagle_fsd.load.
        data: dataset of train.prepare_data.
        out: folder of the features; an interrupted run continues there.
        layers: whose entering states are kept too; EAGLE-3 heads read 2, half, third from the end.
        dtype: of target and features.
        device: where the target goes; default CUDA where available, else the CPU.
        device_map: placement of a large target by accelerate, such as auto.
        batch_tokens: of one forward, padding included; without it 16,384 on a GPU, and 1,024 on a CPU, whose caches
            hold no more (SmolLM2 on two cores: 1,135 tokens/s against 623).
        trust_remote_code: allow a target to run code from its repository.
    """

    target: str | None = None
    data: Path
    out: Path
    layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    device: str | None = None
    device_map: str | None = None
    batch_tokens: int | None = None
    trust_remote_code: bool = False


def write_features(
    target: TargetModel, documents: Documents, directory: Path, *, batch_tokens: int = BATCH_TOKENS["cuda"],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write the features of every document; shards that are already there are kept.

    Raises:
        ValueError: not enough room on the disk (said before anything is written), or a folder that was begun for
            another dataset or target, or that another process is writing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory):
        bounds = [*shard_starts(documents.ends, shard_tokens), len(documents)]
        index = {
            "dataset": documents.digest(), "target": target.digest(), "dtype": str(target.dtype),
            "feature_size": target.feature_size, "layers": list(target.layers), "scale": target.scale,
            "softcap": target.softcap, "first_documents": bounds[:-1],
        }
        if (directory / "index.json").exists() and read_index(directory) != index:
            raise ValueError(f"{directory} was begun for another dataset, target or dtype; choose another folder")
        todo = [n for n in range(len(bounds) - 1) if not shard_path(directory, n).is_file()]
        missing = sum(int(documents.lengths[bounds[n] : bounds[n + 1]].sum()) for n in todo)
        needed, free = bytes_needed(missing, target) if todo else 0, shutil.disk_usage(directory).free
        log.info("features need %.2f GB more in %s, where %.2f GB are free", needed / 1e9, directory, free / 1e9)
        if needed > free:
            raise ValueError(f"features need {needed / 1e9:.2f} GB more, {directory} has {free / 1e9:.2f} GB free")
        save_atomically(directory / "index.json", lambda path: path.write_text(json.dumps(index), encoding="utf-8"))
        write_ends(target, directory)
        total = len(documents.tokens)
        with Progress(desc="features", unit="token", total=total, done=total - missing) as progress:
            for number in todo:
                rows = np.arange(bounds[number], bounds[number + 1])
                made = {"features": shard_features(target, documents, rows, batch_tokens, progress.update)}
                save_atomically(shard_path(directory, number), lambda path, made=made: save_file(made, path))


def bytes_needed(tokens: int, target: TargetModel) -> int:
    """Disk space of so many tokens' features, and of the target's two ends."""
    width = torch.empty(0, dtype=target.dtype).element_size()
    return (tokens * target.feature_size + 2 * target.vocab_size * target.hidden_size) * width


def write_ends(target: TargetModel, directory: Path) -> None:
    """Write what head training needs of the target beside its features."""
    every = torch.arange(len(target.embed_tokens.weight), device=target.device)
    # As the module gives them: Gemma scales them there.
    ends = {"embed_tokens": target.embed_tokens(every), "lm_head": target.lm_head.weight}
    if target.lm_head.bias is not None:
        ends["lm_head_bias"] = target.lm_head.bias
    save_atomically(directory / "target_ends.safetensors", lambda path: save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in ends.items()}, path
    ))


def shard_starts(ends: np.ndarray, per_shard: int) -> list[int]:
    """The first document of each shard of at most `per_shard` tokens, or of one longer document."""
    first = [0]
    while True:
        start = ends[first[-1] - 1] if first[-1] else 0
        following = max(first[-1] + 1, int(np.searchsorted(ends, start + per_shard, side="right")))
        if following >= len(ends):
            return first
        first.append(following)


def shard_features(
    target: TargetModel, documents: Documents, rows: np.ndarray, batch_tokens: int, advance: Callable[[int], None]
) -> Tensor:
    """[tokens, F] features of consecutive documents, computed in batches of documents of like length.

    Args:
        advance: told the tokens of each batch when it is done.
    """
    online, lengths = OnlineFeatures(target), documents.lengths
    start = int(documents.ends[rows[0]] - lengths[rows[0]])
    features = torch.empty(int(documents.ends[rows[-1]]) - start, target.feature_size, dtype=target.dtype)
    order = rows[np.argsort(lengths[rows], kind="stable")]
    for batch in split_rows(order, lengths, batch_tokens):
        tokens, _ = documents.collate(batch)
        computed = online(batch, torch.from_numpy(tokens)).to("cpu")
        for row, document in enumerate(batch):
            end = int(documents.ends[document]) - start
            features[end - lengths[document] : end] = computed[row, : lengths[document]]
        advance(int(lengths[batch].sum()))
    return features


def run(arguments: Arguments) -> None:
    """Load the target and write the features.

    Raises:
        ValueError: an option out of range; see `write_features`.
    """
    check_counts(arguments, "batch_tokens")
    documents = Documents.load(arguments.data)
    model, _ = load_target(
        arguments.target or default_target(), dtype=arguments.dtype, device=arguments.device,
        device_map=arguments.device_map, trust_remote_code=arguments.trust_remote_code,
    )
    target = TargetModel(model, check=False)
    target.layers = check_layers(arguments.layers, len(target.decoder_layers))
    write_features(target, documents, arguments.out, batch_tokens=arguments.batch_tokens or BATCH_TOKENS.get(
        target.device.type, BATCH_TOKENS["cuda"]))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status(
        "train.features", lambda: run(parse_options(Arguments, program="python -m train.features")),
        stopped="stopped; the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())
