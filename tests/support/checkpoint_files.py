"""Looks at checkpoints of a checkpointer without the code that loads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tensorferry.storage.folder import read_index


def tensors_of(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    """The plain tensors of a rank's file, by name."""
    name, _ = read_index(folder).files[rank]
    with safe_open(folder / name, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys() if not key.startswith("__")}  # noqa: SIM118


def is_whole(folder: Path, value: float) -> bool:
    """Whether all elements of the tensor ``w`` are ``value``."""
    return bool((tensors_of(folder)["w"] == value).all())


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def resources() -> dict[str, Any]:
    """What a process has: descriptors, mappings of shared memory, and resident memory in MiB."""
    maps = Path("/proc/self/maps").read_text().count("memfd:tensorferry")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024
    return {"descriptors": len(os.listdir("/proc/self/fd")), "mappings": maps, "resident": resident}


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started and that are running."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
