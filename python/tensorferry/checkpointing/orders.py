"""What is to be saved where and how, and the save of one rank from its file to the commit; torch-free."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import _validate
from ..errors import InvalidArgument, ProtocolError
from ..storage import folder as folders
from ..storage.folder import FolderSave, SaveId
from .handover import Handover


class Options:
    """How states are written.

    Args:
        threads: threads with which a rank writes; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses, see ``FileWriter``
        keep_last: how many checkpoints of a folder's series stay, see ``storage/folder.py``; ``None`` keeps all
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

    def order(self, folder: Path, save: SaveId) -> Order:
        """Returns the order to write one save."""
        return Order(
            str(folder),
            save.save,
            save.began,
            save.rank,
            save.world_size,
            save.step,
            self.threads,
            self.cached,
            self.patience,
            self.keep_last,
        )


@dataclass(frozen=True)
class Order:
    """What is to be written where; the fields of a handover, all of which JSON can express.

    Attributes:
        path: the folder, absolute
        save_id: as :class:`SaveId` has it, like the next four
        began: likewise
        rank: likewise
        world_size: likewise
        step: likewise
        threads: threads that write; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses
        patience: seconds without a sign of life of another rank
        keep_last: how many checkpoints of the folder's series stay; ``None`` keeps all
    """

    path: str
    save_id: str
    began: int
    rank: int
    world_size: int
    step: int | None
    threads: int | None = None
    cached: bool | None = None
    patience: float = 600.0
    keep_last: int | None = None

    @property
    def save(self) -> SaveId:
        """Which save it is."""
        return SaveId(self.save_id, self.began, self.rank, self.world_size, self.step)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a handover."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Order:
        """Returns the order that a handover has; fields that are not an order's are left out.

        Raises:
            ProtocolError: a field is missing or has another type
        """
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        numbers = [known.get(name) for name in ("began", "rank", "world_size")]
        texts = [known.get(name) for name in ("path", "save_id")]
        if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a handover does not say what is to be saved where")
        # It becomes a part of names of files.
        if not re.fullmatch("[0-9a-f]{12}", known["save_id"]):
            raise ProtocolError("a handover has no valid id of its save")
        return cls(**known)


def perform(order: Order, given: Handover) -> dict[str, int]:
    """Writes a state and commits it with the other ranks.

    Returns:
        The fields of ``written``.

    Raises:
        TensorferryError: the save has failed, and nothing of it can be loaded
        OSError: likewise
    """
    save = FolderSave(Path(order.path), order.save, order.patience)
    try:
        written = save.write(given.container(), order.threads, order.cached)
        save.commit()
    except BaseException as e:
        save.fail(f"{type(e).__name__}: {e}")
        raise
    finally:
        save.close()
    if order.keep_last is not None and order.rank == 0:
        folders.keep_last(order.keep_last, save.folder)
    return {"bytes": written.bytes, "direct": written.direct}
