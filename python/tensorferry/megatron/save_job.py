"""A save in another process: what is passed to it, and how its results come back."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..dcp.file_writer import RankFile
from ..dcp.index import RankPart
from ..storage.places import begun
from ..storage.whole_files import INDEX_BYTES, read_whole, write_whole
from .release import (
    CheckpointingException,
)
from .save_plan import SaveData

logger = logging.getLogger("tensorferry")


@dataclasses.dataclass(frozen=True)
class FileJob:
    """What another process needs to write this rank's file, and how its results come back.

    Attributes:
        file: the file
        plan: the items
        folder: a folder of this process alone, in which the results appear
    """

    file: RankFile
    plan: SavePlan
    folder: str

    def results(self) -> list[WriteResult]:
        """Returns the results of :func:`write`, and removes the folder.

        Raises:
            CheckpointingException: the other process has not written the file, or this save has been finished before
        """
        if not Path(self.folder).is_dir():
            raise CheckpointingException(
                f"the save that was to write {self.file.path} has been finished before: each request is carried out "
                "once. Save again"
            )
        try:
            told = json.loads(read_whole(Path(self.folder) / "results.json", INDEX_BYTES))
        except FileNotFoundError:
            raise CheckpointingException(
                f"the process that was to write {self.file.path} has ended without writing it: its own messages say "
                "why. Save again"
            ) from None
        finally:
            shutil.rmtree(self.folder)
        if told["error"] is not None:
            raise CheckpointingException(told["error"])
        if told["container"] is None:
            return []
        index = base64.b64decode(told["index"])
        return RankPart(told["container"], told["header"], index).results(told["bytes"])


def remove_folder(folder: str, owner: int) -> None:
    """Removes a folder, in the process that made it; in others, such as forked ones, it stays."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class HeldData:
    """The data of a plan on its way to the process that writes it.

    That process is forked, and has all memory of this one as it was then; or it is spawned, and the data is pickled.
    torch would move a pickled tensor's memory into a file that both processes map: what is pickled here is a copy, so
    that the tensors of the trainer stay where they are, and may change.
    """

    def __init__(self, values: Sequence[torch.Tensor | bytes]) -> None:
        self._values = list(values)

    def __getstate__(self) -> dict[str, Any]:
        """Returns copies of the tensors in host memory; others are shared as torch does it."""
        copies = [
            value.clone() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
            for value in self._values
        ]
        return {"_values": copies}

    def on_host(self) -> list[torch.Tensor | bytes]:
        """Returns the data, with the tensors of accelerators copied to the host."""
        return [value.to("cpu") if isinstance(value, torch.Tensor) else value for value in self._values]


def write(job: FileJob, values: list[torch.Tensor | bytes], nothing: None) -> None:
    """Writes a rank's file, in a process of its own; Megatron passes three arguments and replaces the second.

    It raises nothing: Megatron's persistent worker would end, and the trainer would wait for it for ever.
    """
    del nothing
    told: dict[str, Any] = {"error": None, "container": None}
    try:
        if job.plan.items:
            # The requests of this process have a deadline of their own.
            file = dataclasses.replace(job.file, path=begun(job.file.path))
            written, part = file.write(job.plan, SaveData(values))
            index = base64.b64encode(part.encoded).decode()
            told |= {"container": part.container, "header": part.header, "index": index, "bytes": written.bytes}
    except Exception as e:
        told["error"] = f"{type(e).__name__}: {e}"
    folder = Path(job.folder)
    try:
        write_whole(folder / "results.json", json.dumps(told).encode(), folder / "results.partial", synced=False)
    except OSError:
        # The last function raises then. If the folder is gone, nobody waits for the results any more.
        logger.exception("cannot tell the trainer what was written")
