"""The target's side of head training: its features, computed or read from disk, its embeddings and output layer.

B batch, T tokens of a row, D hidden size, V vocabulary, F width of the features: D, plus D for each layer that an
EAGLE-3 head reads (see `TargetModel`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn

from eagle_fsd.data.documents import Documents, split_by_size
from eagle_fsd.heads.eagle import OutputRows
from eagle_fsd.loading.load import load_model
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.digest import config_digest
from eagle_fsd.models.linear import CLASSES, check_quantization
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel, copy_to, output_logits
from eagle_fsd.utils.files import check_same

from .config import TrainingConfig

BATCH_TOKENS = {"cpu": 1024, "cuda": 16_384}  # of one forward pass


def target_digest(target: TargetModel) -> str:
    """The digest of a target's weights and of its config."""
    return f"{target.digest()}/{config_digest(target.model.config)}"


def form_name(quantization: str | None) -> str | None:
    """The form of a quantisation, for the keys of what is stored about it; None: there is none."""
    return None if quantization is None else CLASSES[quantization].NAME


class TargetEnds(nn.Module):
    """The two parts of the target that head training needs besides features: embeddings and output layer."""

    def __init__(self, embed_tokens: nn.Module, lm_head: nn.Module, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head, self.scale, self.softcap = embed_tokens, lm_head, scale, softcap
        self.requires_grad_(False)

    @classmethod
    def of(cls, target: TargetModel, device: torch.device) -> TargetEnds:
        """Share the target's layers; copy those that are on another device than the head."""
        output = target.lm_head if target.output_device == device else copy_to(target.lm_head, device)
        return cls(target.embeddings_on(device), output, target.scale, target.softcap)

    def logits(self, features: Tensor) -> Tensor:
        """Like `TargetModel.logits`: [..., F] or [..., D] -> [..., V] float32."""
        last = features[..., -self.lm_head.weight.shape[1] :]
        return output_logits(self.lm_head, last.to(self.lm_head.weight.dtype), self.scale, self.softcap)

    def rows(self, tokens: Tensor) -> OutputRows:
        """The output layer of the tokens [R] only, with a copy of their rows."""
        return OutputRows.of(self.lm_head, tokens.to(self.lm_head.weight.device), self.scale, self.softcap)


class OnlineFeatures:
    """Features of documents, computed by the frozen target.

    Args:
        batch_tokens: most tokens of a forward pass, padding included, unless a document is longer.
        device: of the features; the target computes on its own.
    """

    kind = "computed in each step"

    def __init__(
        self, target: TargetModel, documents: Documents, batch_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.target, self.documents, self.batch_tokens, self.device = target, documents, batch_tokens, device

    @torch.no_grad()
    def __call__(self, indices: np.ndarray, advance: Callable[[int], None] = lambda tokens: None) -> Tensor:
        """Features [T, F] of documents, one after the other; computed in batches of similar length.

        Args:
            advance: called with the number of tokens after each batch.
        """
        lengths, target = self.documents.lengths[indices], self.target
        ends = np.cumsum(lengths)
        features = torch.empty(ends[-1], target.feature_size, dtype=target.dtype, device=self.device)
        for batch in split_by_size(np.argsort(lengths, kind="stable"), lengths, self.batch_tokens):
            tokens = torch.from_numpy(self.documents.collate(indices[batch])[0])
            computed = self._forward(tokens.to(target.input_device))
            for row, place in enumerate(batch):
                features[ends[place] - lengths[place] : ends[place]] = computed[row, : lengths[place]]
            advance(int(lengths[batch].sum()))
        return features

    def _forward(self, tokens: Tensor) -> Tensor:
        """Features [B, T, F] of a padded batch [B, T]; those of padding are meaningless."""
        if self.target.fused is not None:
            batch, length = tokens.shape
            return self.target.forward(tokens, None, None, self.target.new_cache(length, batch))
        return self.target.features(tokens, use_cache=False)


@dataclass
class OfflineFeatures:
    """Features of every document of a dataset, in memory-mapped safetensors shards.

    Args:
        directory: folder from `train.features.write_features`.
        documents: the dataset of the features.

    Raises:
        ValueError: the folder is incomplete, or has the features of another dataset.
    """

    directory: Path
    documents: Documents

    def __post_init__(self) -> None:
        self.index = index = read_index(self.directory)
        if index["dataset"] != self.documents.digest():
            raise ValueError(f"{self.directory} has the features of another dataset")
        self.first = np.asarray(index["first_documents"])  # [shards] first document of each
        missing = [n for n in range(len(self.first)) if not shard_path(self.directory, n).is_file()]
        if missing:
            raise ValueError(
                f"{self.directory} is incomplete: {len(missing)} of {len(self.first)} shards are missing; run "
                f"python -m {__package__}.features again to write them"
            )
        self.dtype = getattr(torch, index["dtype"].removeprefix("torch."))
        self._open: dict[int, object] = {}

    @property
    def kind(self) -> str:
        """The features in words, for records."""
        return f"stored, {self.index['dtype']}, {self.index.get('weights', 'plain')} weights"

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

    def __call__(self, indices: np.ndarray) -> Tensor:
        """Features [T, F] of documents, one after the other."""
        parts = []
        for document in indices:
            shard = int(np.searchsorted(self.first, document, side="right")) - 1
            if shard not in self._open:
                self._open[shard] = safe_open(shard_path(self.directory, shard), "pt").__enter__()
            start_of_shard = int(self.documents.ends[self.first[shard] - 1]) if self.first[shard] else 0
            end = int(self.documents.ends[document]) - start_of_shard
            length = int(self.documents.lengths[document])
            parts.append(self._open[shard].get_slice("features")[end - length : end])
        return torch.cat(parts)


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"features-{number:05d}.safetensors"


def read_index(directory: Path) -> dict:
    try:
        return json.loads((directory / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no features from {__package__}.features: {error}") from error


@dataclass(frozen=True)
class Teacher:
    """The frozen parts of a run; `target` is None if the features are stored and nothing is evaluated."""

    target: TargetModel | None
    features: OnlineFeatures | OfflineFeatures
    ends: TargetEnds

    @property
    def digest(self) -> str:
        """The digest of the target."""
        return self.features.index["target"] if self.target is None else target_digest(self.target)

    @classmethod
    def of(
        cls, config: TrainingConfig, accelerator: Accelerator, documents: Documents, layers: tuple[int, ...]
    ) -> Teacher:
        """Every process loads the target, unless the features are stored and nothing is evaluated.

        Args:
            layers: target layers whose inputs the head reads.

        Raises:
            ValueError: the features belong to another dataset, other layers or another target, or were computed in
                another dtype or quantisation.
        """
        if config.features is None:
            target = open_target(config, accelerator, layers)
            most = BATCH_TOKENS.get(target.input_device.type, BATCH_TOKENS["cuda"])
            features = OnlineFeatures(target, documents, most, accelerator.device)
            return cls(target, features, TargetEnds.of(target, accelerator.device))
        features = OfflineFeatures(config.features, documents)
        check_same(config.features, {"dtype": features.index["dtype"], "quantization": features.index.get("weights")},
                   {"dtype": f"torch.{config.target_dtype}", "quantization": form_name(config.quantization)},
                   "pass --target-dtype and --quantization as for the features")
        if tuple(features.index["layers"]) != layers:
            raise ValueError(f"the head reads the inputs of layers {list(layers)}, and {config.features} has those of "
                             f"{features.index['layers']}: pass --layers to {__package__}.features")
        target = open_target(config, accelerator, layers) if config.evaluate else None
        if target is not None and features.index["target"] != target_digest(target):
            raise ValueError(f"{config.features} has the features of another target than {config.target}")
        return cls(target, features, features.ends().to(accelerator.device))


def open_target(config: TrainingConfig, accelerator: Accelerator, layers: tuple[int, ...]) -> TargetModel:
    """Load the frozen target, whose features include the inputs of `layers`."""
    options = {"dtype": config.target_dtype, "trust_remote_code": config.trust_remote_code}
    if config.quantization is not None:
        target = load_quantized(config.target, config.quantization, **options)
    else:
        model, _ = load_target(config.target, device=None if config.device_map else accelerator.device,
                               device_map=config.device_map, **options)
        target = TargetModel(model.requires_grad_(False))
    target.feature_layers = layers
    return target


def load_quantized(name: str, quantization: str, *, dtype: str, trust_remote_code: bool) -> TargetModel:
    """Load a target with int8 weights on a CPU. `FusedDecoder` computes it where it serves the model: stock modules
    would compute layers that are packed together once for each of them."""
    check_quantization(quantization)
    placement = {"device": "cpu", "trust_remote_code": trust_remote_code}
    model, _ = load_model(name, dtype, placement, quantization=quantization)
    return EagleModel.from_parts(model.requires_grad_(False), None).target
