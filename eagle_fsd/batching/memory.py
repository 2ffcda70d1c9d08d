"""How many positions of caches fit into the free memory, within the control groups (cgroups) of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from ..drafting.tree import catch_up_in_parts
from ..loading.pair import EagleModel

# While a cache grows, the old and the new one exist at once. Prefixes and prompts in progress take memory as well.
USED = 1 / 4  # of the free memory
# By controller of /proc/self/cgroup, "" for version 2: the type of its mount; the files of a group's limit and of its
# usage, both including the groups in it; and the names in memory.stat of file pages in use or not, and mapped ones.
FILES = {
    "": ("cgroup2", "memory.max", "memory.current", "inactive_file", "active_file", "file_mapped"),
    "memory": ("cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file",
               "total_mapped_file"),
}


@torch.inference_mode()
def positions_in_memory(model: EagleModel, rows: int, nodes: int) -> int:
    """Positions of caches that fit into a quarter of the free memory, but no more than the rows can use."""
    target, drafter = model.target, model.draft
    cache, token = target.new_cache(1), torch.zeros(1, 1, dtype=torch.long, device=target.input_device)
    features = target.prefill(token, cache).to(target.output_device)
    size = cache.nbytes
    if drafter is not None:
        draft_cache = drafter.new_cache(1)
        own = features[0] if drafter.reads_features else None
        catch_up_in_parts(drafter, own, token[0].to(features.device), draft_cache)
        size += draft_cache.nbytes
    fitting = int(USED * free_bytes(target.output_device) / size)
    return fitting if target.max_positions is None else min(fitting, rows * (target.max_positions + nodes))


def free_bytes(device: torch.device) -> int:
    """The memory of the device that this process can still take, in bytes."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # free for new tensors
        return torch.cuda.mem_get_info(device)[0] + cached
    return max(0, min([psutil.virtual_memory().available, *free_in_groups()]))


def free_in_groups(process: Path = Path("/proc/self")) -> list[int]:
    """Bytes until the limit of the process's group and of each group around it that has one.

    File pages count as free unless they are mapped, as weights are: the system drops them when memory is needed.
    """
    free = []
    for controller, folder in groups(process):
        _, limit, usage, *pages = FILES[controller]
        with suppress(OSError):  # the outermost group has no limit; others may be hidden
            if (most := (folder / limit).read_text(encoding="utf-8").strip()) != "max":
                used = int((folder / usage).read_text(encoding="utf-8"))
                lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                stat = {name: int(number) for name, number in map(str.split, lines)}
                inactive, active, mapped = (stat.get(name, 0) for name in pages)
                free.append(int(most) - used + max(0, inactive + active - mapped))
    return free


def groups(process: Path) -> Iterator[tuple[str, Path]]:
    """The controllers and folders of the process's group for memory and of the groups around it, of both versions."""
    own: dict[str, str] = {}  # the group's path by controller
    mounts: list[str] = []
    with suppress(OSError):  # another system than Linux
        for line in (process / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
        mounts = (process / "mountinfo").read_text(encoding="utf-8").splitlines()
    for line in mounts:
        mount, _, system = line.partition(" - ")
        (root, point), (kind, *_, options) = mount.split(" ")[3:5], system.split(" ")
        for controller in own.keys() & FILES.keys():
            if kind == FILES[controller][0] and (not controller or controller in options.split(",")):
                below = os.path.relpath(own[controller], root)
                folder = Path(point) if below.startswith("..") else Path(point, below)  # `..`: only the mount is seen
                yield from ((controller, part) for part in (folder, *folder.parents) if part.is_relative_to(point))
