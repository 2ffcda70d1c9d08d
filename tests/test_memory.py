"""The memory that an engine may take: limits of control groups, in files of the kernel's format."""

from pathlib import Path

import pytest
import torch

from eagle_fsd.batching import memory

GIB = 1 << 30
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "unlimited": "9223372036854771712",
      "stat": "cache 5\nmapped_file 5\ninactive_file 5\nactive_file 5\nhierarchical_memory_limit 5\ntotal_cache {}\n"
              "total_rss {}\ntotal_mapped_file {}\ntotal_inactive_file {}\ntotal_active_file {}\n"}
V2 = {"limit": "memory.max", "usage": "memory.current", "unlimited": "max",
      "stat": "file {}\nanon {}\nfile_mapped {}\ninactive_file {}\nactive_file {}\nworkingset_refault_file 5\n"}


def write_process(folder: Path, groups: str, mounts: str) -> Path:
    process = folder / "proc"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    (process / "mountinfo").write_text("23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n" + mounts)
    return process


def write_group(folder, version, limit=None, used=0.0, mapped=0.0, inactive=0.0, active=0.0):
    """GiB of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / version["limit"]).write_text((version["unlimited"] if limit is None else str(int(limit * GIB))) + "\n")
    (folder / version["usage"]).write_text(f"{int(used * GIB)}\n")
    pages = (inactive + active, used - inactive - active, mapped, inactive, active)
    (folder / "memory.stat").write_text(version["stat"].format(*(int(size * GIB) for size in pages)))


def both(folder: Path, root: str, path: str, version: dict) -> tuple[Path, Path]:
    """A process in the group `path`, of the hierarchy mounted from `root` on; the process and the mount."""
    if version is V2:
        return write_process(folder, f"0::{path}\n", f"35 23 0:28 {root} {folder}/group rw - cgroup2 cgroup2 rw\n"), (
            folder / "group")
    return write_process(
        folder, f"9:name=systemd:/\n4:cpu,memory:{path}\n1:cpuset:/elsewhere\n0::/\n",
        f"33 23 0:30 / {folder}/cpuset rw master:9 - cgroup cgroup rw,cpuset\n"
        f"35 23 0:32 {root} {folder}/group rw,relatime - cgroup cgroup rw,cpu,memory\n"), folder / "group"


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_file_pages_are_free_unless_they_are_mapped(version, tmp_path, monkeypatch):
    process, mount = both(tmp_path, "/", "/", version)
    write_group(mount, version, limit=8, used=7.75, mapped=0.5, inactive=6, active=1.5)
    free = memory.free_in_groups(process)
    assert free == [7.25 * GIB]
    monkeypatch.setattr(memory, "free_in_groups", lambda: free)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GIB}))
    assert memory.free_bytes(torch.device("cpu")) == 7.25 * GIB


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(("root", "path"), [("/", "/slice/job/step"), ("/pods/one", "/pods/one/slice/job/step")])
def test_groups_around_the_own_one_have_limits_too(version, root, path, tmp_path):
    """The outermost has no files, and one no limit."""
    process, mount = both(tmp_path, root, path, version)
    write_group(mount / "slice/job/step", version, limit=6, used=1)
    write_group(mount / "slice/job", version, used=2)
    write_group(mount / "slice", version, limit=8, used=5, inactive=1)
    free = memory.free_in_groups(process)
    assert min(free) == 4 * GIB and 5 * GIB in free


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_container_sees_its_group_as_the_mount(version, tmp_path):
    """Its path may be one on the host, and the mount that of a container's group."""
    process, mount = both(tmp_path, "/", "/../../pods/one", version)
    write_group(mount, version, limit=2, used=0.5)
    assert memory.free_in_groups(process) == [1.5 * GIB]


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert memory.free_in_groups(tmp_path / "missing") == []
    process, _ = both(tmp_path, "/", "/gone", V2)
    assert memory.free_in_groups(process) == []


def test_what_torch_has_cached_on_a_gpu_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    assert memory.free_bytes(torch.device("cuda")) == 62 * GIB
