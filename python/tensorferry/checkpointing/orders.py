"""What is to be saved where and how, and the save of one rank from its file to the commit; torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from .. import _validate
from ..errors import InvalidArgument, ProtocolError
from ..storage.container import Container, Stored
from ..storage.folder_save import FolderSave, SaveId
from ..storage.lineage import Lineage
from ..storage.places import AnyPlace, any_place, is_store_url


class Options:
    """How states are written.

    Args:
        threads: threads with which a rank writes; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses, see ``FileWriter``
        keep_last: how many checkpoints of a run stay, see ``storage/lineage.py``; ``None`` keeps all
        patience: seconds without a sign of life of another rank after which a save has failed

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        cached: bool | None = None,
        keep_last: int | None = None,
        patience: float = 600.0,
    ) -> None:
        self.threads = None if threads is None else _validate.integer("threads", threads, 1)
        self.cached = None if cached is None else _validate.boolean("cached", cached)
        self.keep_last = None if keep_last is None else _validate.integer("keep_last", keep_last, 1)
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 1e9:
            raise InvalidArgument(f"patience must be a positive number of seconds, not {_validate.brief(patience)}")
        self.patience = float(patience)


@dataclass(frozen=True)
class Order:
    """What is to be saved where.

    Attributes:
        path: the folder, absolute, or the place in a store
        save: which save, and which rank
        options: how the state is written
    """

    path: AnyPlace
    save: SaveId
    options: Options

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a handover, all of which JSON can express."""
        save = asdict(self.save)
        return {"path": str(self.path), "save_id": save.pop("save"), **save, **vars(self.options)}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Order:
        """Returns the order that a handover has; fields that are not an order's are left out.

        Raises:
            ProtocolError: a field that says what is saved where is missing or has another type
            InvalidArgument: an option, or the URL of a store, cannot be used
        """
        numbers: list[Any] = [fields.get(name) for name in ("began", "rank", "world_size")]
        texts: list[Any] = [fields.get(name) for name in ("path", "save_id")]
        if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a handover does not say what is to be saved where")
        # It becomes a part of names of files.
        began, rank, world_size = numbers
        path, save_id = texts
        if not re.fullmatch("[0-9a-f]{12}", save_id):
            raise ProtocolError("a handover has no valid id of its save")
        lineage = fields.get("lineage")
        if not (lineage is None or isinstance(lineage, str)):
            raise ProtocolError("a handover has no valid lineage of its save")
        options = {name: fields[name] for name in ("threads", "cached", "keep_last", "patience") if name in fields}
        chosen = Options(**options)
        # In a store, no save takes longer than a rank waits for another one.
        timeout = timedelta(seconds=chosen.patience)
        place = any_place(path, timeout=timeout) if is_store_url(path) else Path(path)
        return cls(place, SaveId(save_id, began, rank, world_size, fields.get("step"), lineage), chosen)


def perform(order: Order, container: Callable[[], Container], lineage: Lineage) -> Stored:
    """Writes this rank's state, commits it with the other ranks, and removes older checkpoints as the order says.

    Args:
        order: what is to be saved where
        container: called to get the state
        lineage: what this process knows of its earlier saves

    Returns:
        The file that was written: its length, the bytes that went past the page cache, and its header's checksum.

    Raises:
        TensorferryError: the save has failed. What was written is removed, now or by a later save; but if the system
            refuses what comes after the new index, the checkpoint is complete, and can be loaded
        OSError: likewise
        Exception: whatever ``container`` raises; likewise
    """
    options, save_id = order.options, order.save
    if save_id.rank == 0:
        save_id = lineage.begin(order.path, save_id, options.keep_last)
    save = FolderSave(order.path, save_id, options.patience)
    try:
        file = save.write(container(), options.threads, options.cached)
        commit = save.commit()
    except BaseException as e:
        save.fail(f"{type(e).__name__}: {e}")
        raise
    finally:
        save.close()
    if options.keep_last is not None and commit is not None:
        lineage.keep_last(options.keep_last, order.path, commit)
    return file
