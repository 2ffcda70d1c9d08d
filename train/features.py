"""Where a training step's target features come from: computed on the spot, or read from shards on disk.

    python -m train.features --target T --data data/chat --out data/chat-features

writes the shards. An interrupted run continues; the disk space needed is said, and checked, first.

B batch, T tokens of a row, D hidden size, F width of the features: D, and with `--layers`, for EAGLE-3 heads, D more
for each (see `TargetModel`).
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data.documents import Documents, split_rows
from eagle_fsd.data.files import save_atomically
from eagle_fsd.heads.eagle3 import check_layers
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.output import output_logits
from eagle_fsd.models.placement import copy_to
from eagle_fsd.models.target import TargetModel

log = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30
DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


class TargetEnds(nn.Module):
    """The two parts of a target that head training needs beside its features: embeddings and output layer."""

    def __init__(self, embed_tokens: nn.Module, lm_head: nn.Module, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head, self.scale, self.softcap = embed_tokens, lm_head, scale, softcap
        self.requires_grad_(False)

    @classmethod
    def of(cls, target: TargetModel, device: torch.device) -> TargetEnds:
        """Those of a target, shared with it; copies where they live on another device than the head."""
        output = target.lm_head if target.output_device == device else copy_to(target.lm_head, device)
        return cls(target.embeddings_on(device), output, target.scale, target.softcap)

    def logits(self, features: Tensor) -> Tensor:
        """As `TargetModel.logits`: [..., F] or [..., D] -> [..., V] float32."""
        last = features[..., -self.lm_head.weight.shape[1] :]
        return output_logits(self.lm_head, last.to(self.lm_head.weight.dtype), self.scale, self.softcap)


class OnlineFeatures:
    """The frozen target's own forward, in each step."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    @torch.no_grad()
    def __call__(self, indices: np.ndarray, tokens: Tensor) -> Tensor:
        """Features [B, T, F] of a padded batch [B, T]; what stands at padding is not to be read."""
        return self.target.features(tokens.to(self.target.device), use_cache=False)


@dataclass
class OfflineFeatures:
    """Features of every document of a dataset, in memory-mapped safetensors shards of at most about 1 GiB.

    Args:
        directory: written by `write_features`.
        documents: the dataset that the features were made of.

    Raises:
        ValueError: the folder is incomplete or was made of something else.
    """

    directory: Path
    documents: Documents

    def __post_init__(self) -> None:
        index = read_index(self.directory)
        if index["dataset"] != self.documents.digest():
            raise ValueError(f"{self.directory} holds features of another dataset than the one given")
        self.first = np.asarray(index["first_documents"])  # [shards] first document of each
        missing = [n for n in range(len(self.first)) if not shard_path(self.directory, n).is_file()]
        if missing:
            raise ValueError(
                f"{self.directory} is incomplete: {len(missing)} of {len(self.first)} shards are missing; run "
                "python -m train.features again to finish it"
            )
        self.index = index
        self._open: dict[int, object] = {}

    def ends(self) -> TargetEnds:
        """The target's embeddings and output layer, stored beside the features."""
        with safe_open(self.directory / "target_ends.safetensors", "pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}
        embed, output = nn.Embedding.from_pretrained(stored["embed_tokens"]), stored["lm_head"]
        head = nn.Linear(output.shape[1], output.shape[0], bias="lm_head_bias" in stored, dtype=output.dtype)
        head.weight = nn.Parameter(output, requires_grad=False)
        if head.bias is not None:
            head.bias = nn.Parameter(stored["lm_head_bias"], requires_grad=False)
        return TargetEnds(embed, head, self.index["scale"], self.index["softcap"])

    def __call__(self, indices: np.ndarray, tokens: Tensor) -> Tensor:
        """Features [B, T, F] of a padded batch [B, T], 0 at padding."""
        rows = torch.zeros(*tokens.shape, self.index["feature_size"], dtype=DTYPES[self.index["dtype"]])
        for row, document in enumerate(indices):
            shard = int(np.searchsorted(self.first, document, side="right")) - 1
            if shard not in self._open:
                self._open[shard] = safe_open(shard_path(self.directory, shard), "pt").__enter__()
            # Offsets within a shard follow from the documents' ends.
            start_of_shard = int(self.documents.ends[self.first[shard] - 1]) if self.first[shard] else 0
            end = int(self.documents.ends[document]) - start_of_shard
            length = int(self.documents.lengths_of(np.asarray([document]))[0])
            rows[row, :length] = self._open[shard].get_slice("features")[end - length : end]
        return rows.to(tokens.device)


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"features-{number:05d}.safetensors"


def read_index(directory: Path) -> dict:
    try:
        return json.loads((directory / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no features of train.features: {error}") from error


def bytes_needed(documents: Documents, target: TargetModel) -> int:
    """Disk space of all shards: tokens x F x bytes per value (and the target's two ends)."""
    width = torch.empty(0, dtype=target.dtype).element_size()
    return (len(documents.tokens) * target.feature_size + 2 * target.vocab_size * target.hidden_size) * width


def write_features(
    target: TargetModel, documents: Documents, directory: Path, *, batch_tokens: int = 16_384,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the features of every document; shards that are already there are kept.

    Raises:
        ValueError: not enough room on the disk (said before anything is written), or a folder that was begun for
            another dataset or target.
    """
    row_bytes = target.feature_size * torch.empty(0, dtype=target.dtype).element_size()
    first = shard_starts(documents.ends, max(1, shard_bytes // row_bytes))
    index = {
        "dataset": documents.digest(), "target": target.digest(), "dtype": str(target.dtype),
        "feature_size": target.feature_size, "layers": list(target.layers), "scale": target.scale,
        "softcap": target.softcap, "first_documents": first,
    }
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "index.json").exists() and read_index(directory) != index:
        raise ValueError(f"{directory} was begun for another dataset, target or dtype; choose another folder")
    todo = [n for n in range(len(first)) if not shard_path(directory, n).is_file()]
    needed, free = bytes_needed(documents, target) * len(todo) // len(first), shutil.disk_usage(directory).free
    log.info("features need %.2f GB more in %s, where %.2f GB are free", needed / 1e9, directory, free / 1e9)
    if needed > free:
        raise ValueError(f"features need {needed / 1e9:.2f} GB more, {directory} has {free / 1e9:.2f} GB free")
    save_atomically(directory / "index.json", lambda path: path.write_text(json.dumps(index), encoding="utf-8"))
    every = torch.arange(len(target.embed_tokens.weight), device=target.device)
    # As the module gives them: Gemma scales them there.
    ends_state = {"embed_tokens": target.embed_tokens(every), "lm_head": target.lm_head.weight}
    if target.lm_head.bias is not None:
        ends_state["lm_head_bias"] = target.lm_head.bias
    save_atomically(directory / "target_ends.safetensors", lambda path: save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in ends_state.items()}, path
    ))
    online, bounds = OnlineFeatures(target), [*first, len(documents)]
    for number in tqdm(todo, desc="features", unit="shard", disable=None):
        rows = np.arange(bounds[number], bounds[number + 1])
        save_atomically(shard_path(directory, number), lambda path, rows=rows: save_file(
            {"features": shard_features(online, documents, rows, batch_tokens)}, path
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


def shard_features(online: OnlineFeatures, documents: Documents, rows: np.ndarray, batch_tokens: int) -> Tensor:
    """[tokens, F] features of consecutive documents, computed in batches of documents of like length."""
    lengths = documents.lengths
    start = int(documents.ends[rows[0]] - lengths[rows[0]])
    total = int(documents.ends[rows[-1]]) - start
    features = torch.empty(total, online.target.feature_size, dtype=online.target.dtype)
    order = rows[np.argsort(lengths[rows], kind="stable")]
    for batch in split_rows(order, lengths, batch_tokens):
        tokens, _ = documents.collate(batch)
        computed = online(batch, torch.from_numpy(tokens)).to("cpu")
        for row, document in enumerate(batch):
            end = int(documents.ends[document]) - start
            features[end - lengths[document] : end] = computed[row, : lengths[document]]
    return features


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or hub id")
    parser.add_argument("--data", required=True, type=Path, help="dataset of train.prepare_data")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--layers", type=int, nargs="*", default=[],
                        help="whose entering states are kept too; EAGLE-3 heads read 2, half, third from the end")
    parser.add_argument("--dtype", default="bfloat16", help="of target and features (default: %(default)s)")
    parser.add_argument("--device")
    parser.add_argument("--device-map", help="placement of a large target by accelerate, such as auto")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")

    def work() -> None:
        documents = Documents.load(args.data)
        model, _ = load_target(args.target, dtype=args.dtype, device=args.device, device_map=args.device_map,
                               trust_remote_code=args.trust_remote_code)
        target = TargetModel(model, check=False)
        target.layers = check_layers(args.layers, len(target.decoder_layers))
        write_features(target, documents, args.out, batch_tokens=args.batch_tokens)

    return exit_status("train.features", work, (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
