"""Saves the states of one rank as checkpoints, and loads them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorferry.checkpointing import SyncCheckpointer, loading
from tensorferry.storage.folder import read_index


def save_state(folder: Path, state: object, **options: Any) -> Path:
    """Saves the state of a job of one rank, and returns the folder."""
    writer = SyncCheckpointer(rank=0, world_size=1, **options)
    writer.save(str(folder), state)
    writer.close()
    return folder


def save_states(folder: Path, states: Sequence[Any]) -> Path:
    """Saves the states of the ranks of a job, each from a thread."""
    said: queue.Queue = queue.Queue()
    wrong: list[BaseException] = []

    def say(value):
        for _ in states[1:]:
            said.put(value)
        return value

    def work(rank):
        agree = say if rank == 0 else lambda _: said.get(timeout=60)
        try:
            SyncCheckpointer(rank=rank, world_size=len(states), agree=agree).save(folder, states[rank])
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    return folder


def rank_file(folder: Path, rank: int = 0) -> Path:
    """The file of a rank's part."""
    return folder / read_index(folder).files[rank][0]


def load_state(path: Path, state_dict: Any = None, **options: Any) -> Any:
    """The state alone, without what it lacks."""
    return loading.read(path, state_dict, **options)[0]
