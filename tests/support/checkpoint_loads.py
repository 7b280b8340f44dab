"""Saves the states of one rank as checkpoints, and loads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tensorferry.checkpointing import SyncCheckpointer, loading
from tensorferry.storage.folder import read_index
from thread_ranks import checkpointers_of, on_all


def save_state(folder: Path, state: object, **options: Any) -> Path:
    """Saves the state of a job of one rank, and returns the folder."""
    writer = SyncCheckpointer(rank=0, world_size=1, **options)
    writer.save(str(folder), state)
    writer.close()
    return folder


def save_by(writer: str, folder: Path, state: object) -> None:
    """Saves a state by a checkpointer, or as torch's does."""
    if writer == "ours":
        save_state(folder, state)
    else:
        folder.mkdir()
        torch.save(state, folder / "checkpoint_0.pt")


def save_states(folder: Path, states: Sequence[Any]) -> Path:
    """Saves the states of the ranks of a job, each from a thread."""
    writers = checkpointers_of(len(states))
    outcomes = on_all(len(states), lambda rank: writers[rank].save(folder, states[rank]))
    assert outcomes == [None] * len(states), outcomes
    return folder


def rank_file(folder: Path, rank: int = 0) -> Path:
    """The file of a rank's part."""
    return folder / read_index(folder).files[rank][0]


def load_state(path: Path, state_dict: Any = None, **options: Any) -> Any:
    """The state alone, without what it lacks."""
    return loading.read(path, state_dict, **options)[0]
