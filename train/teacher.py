"""The frozen side of a run: the target where it is needed, its features, its embeddings and output layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from eagle_fsd.data.documents import Documents
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from train.config import TrainingConfig
from train.feature_sources import OfflineFeatures, OnlineFeatures, TargetEnds


@dataclass(frozen=True)
class Teacher:
    """What a head learns from; `target` is None on processes that neither make features nor evaluate."""

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
        features = OfflineFeatures(Path(config.features), documents)
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
