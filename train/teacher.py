"""What a head learns from: the target's features, computed on the spot or read from shards on disk, and its two ends.

B batch, T tokens of a row, D hidden size, V vocabulary, F width of the features: D, and with layers chosen, for EAGLE-3
heads, D more for each (see `TargetModel`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import OutputRows, TargetModel, copy_to, output_logits
from train.config import TrainingConfig
from train.documents import Documents

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

    def rows(self, tokens: Tensor) -> OutputRows:
        """`logits` of some tokens [R] only, from a copy of their rows."""
        return OutputRows.of(self.lm_head, tokens.to(self.lm_head.weight.device), self.scale, self.softcap)


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
    """Features of every document of a dataset, in memory-mapped safetensors shards.

    Args:
        directory: written by `train.features.write_features`.
        documents: the dataset that the features were made of.

    Raises:
        ValueError: the folder is incomplete or was made of something else.
    """

    directory: Path
    documents: Documents

    def __post_init__(self) -> None:
        self.index = index = read_index(self.directory)
        if index["dataset"] != self.documents.digest():
            raise ValueError(f"{self.directory} holds features of another dataset than the one given")
        self.first = np.asarray(index["first_documents"])  # [shards] first document of each
        missing = [n for n in range(len(self.first)) if not shard_path(self.directory, n).is_file()]
        if missing:
            raise ValueError(
                f"{self.directory} is incomplete: {len(missing)} of {len(self.first)} shards are missing; run "
                "python -m train.features again to finish it"
            )
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


@dataclass(frozen=True)
class Teacher:
    """The frozen side of a run; `target` is None on processes that neither make features nor evaluate."""

    target: TargetModel | None
    features: OnlineFeatures | OfflineFeatures
    ends: TargetEnds

    @classmethod
    def of(
        cls, config: TrainingConfig, accelerator: Accelerator, documents: Documents, layers: tuple[int, ...]
    ) -> Teacher:
        """As the settings say. The target is loaded by every process online, else by the main one for evaluations.

        Args:
            layers: those whose entering states the head reads.

        Raises:
            ValueError: features of other documents, of other layers, or of another target.
        """
        if config.features is None:
            target = open_target(config, accelerator, layers)
            return cls(target, OnlineFeatures(target), TargetEnds.of(target, accelerator.device))
        features = OfflineFeatures(config.features, documents)
        if tuple(features.index["layers"]) != layers:
            raise ValueError(f"the head reads what enters layers {list(layers)}, {config.features} holds "
                             f"{features.index['layers']} (--layers of train.features)")
        target = open_target(config, accelerator, layers) if config.evaluate and accelerator.is_main_process else None
        if target is not None and features.index["target"] != target.digest():
            raise ValueError(f"{config.features} holds features of another target than {config.target}")
        return cls(target, features, features.ends().to(accelerator.device))


def open_target(config: TrainingConfig, accelerator: Accelerator, layers: tuple[int, ...]) -> TargetModel:
    """The frozen target, which hands out the states that enter `layers` too."""
    model, _ = load_target(
        config.target, dtype=config.target_dtype, device=None if config.device_map else accelerator.device,
        device_map=config.device_map, trust_remote_code=config.trust_remote_code,
    )
    model.requires_grad_(False)
    target = TargetModel(model)
    target.layers = layers
    return target
