"""Tensor parallelism of the target: processes that run the same loop, each with a shard of the target's weights.

All must take the same decisions, or they wait for each other for ever. The plans of `transformers` leave the same
features and logits in every process up to rounding: kernels and machines may differ in the last bit. So whatever is
chosen from them, or by a clock or by chance, is what the first process chose.

All contact with the distributed part of `transformers` is in this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

T = TypeVar("T")
RANK = int(os.environ.get("RANK", 0))  # of this process among those that torchrun has started


def loading_options(tp_plan: str | dict[str, str] | None) -> dict[str, object]:
    """What `from_pretrained` takes to shard a model over the processes of torchrun; nothing for one process.

    Args:
        tp_plan: "auto", the model's own; or rules on top of it, in the notation of `transformers`.

    Raises:
        ValueError: neither of them, or a process that torchrun has not started.
    """
    if tp_plan is None:
        return {}
    if tp_plan != "auto" and not (isinstance(tp_plan, dict) and tp_plan):
        raise ValueError(f'tp_plan must be "auto", rules by module name or None, got {tp_plan!r}')
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("tp_plan needs one process per device: torchrun --nproc-per-node N ... starts them")
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan)} if int(os.environ["WORLD_SIZE"]) > 1 else {}


def group_of(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The processes that share a model's weights; None where this one has them all."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    mesh = next((weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)), None)
    if mesh is None:
        raise ValueError(f"{type(model).__name__} has no plan for tensor parallelism: none of its weights is sharded")
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the one that the others follow."""
    return group is None or dist.get_rank(group) == 0


def of_first(group: dist.ProcessGroup | None, make: Callable[[], T]) -> T:
    """What `make` returns or raises in the first process; the others do not call it."""
    if group is None:
        return make()
    box = [None, None]
    if is_first(group):
        try:
            box[0] = make()
        except Exception as error:  # the others wait for an answer
            box[1] = error
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def of_all(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """The values of all processes."""
    if group is None:
        return [value]
    values: list = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def tensor_of_first(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    """The first process' values of a tensor that all have in the same shape."""
    if group is None:
        return value
    value = value.contiguous()
    dist.broadcast(value, group=group, group_src=0)
    return value


@contextmanager
def command() -> Iterator[None]:
    """Around a command of which torchrun starts several: only the first one writes, and all leave their group."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        out, err = (sys.stdout, sys.stderr) if RANK == 0 else (nothing, nothing)
        with redirect_stdout(out), redirect_stderr(err):
            yield
    if dist.is_initialized():
        dist.destroy_process_group()


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that make up a weight: a process' shard, or the numbers and scales of a quantised one."""
    if is_traceable_wrapper_subclass(weight):
        parts = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor's mesh is none
                yield from plain_parts(part)
    else:
        yield weight


def whole(weight: Tensor) -> Tensor:
    """A weight without the sharding; a collective operation where it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
