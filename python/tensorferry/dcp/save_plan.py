"""Turns the items of a save plan into the entries of a container."""

from __future__ import annotations

import contextlib
import io
import pickle
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from .._gc import gc_paused
from .._native import Index, _copy_memory
from ..errors import InvalidArgument, UnsupportedLeaf
from ..memory.accelerator import Accelerator
from ..memory.staging import HostStager, Piece, copying_threads
from ..memory.tensors import DTYPE_NAMES, address, dense, no_rows, reach, scratch, why_not_copied, without_memory
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..pickles.torch_archives import SavedTensor, globals_of
from ..state.local_parts import differs_by_rank
from ..storage import reserved
from .index import ELEMENTS, OBJECT, PICKLED_TENSOR, RankPart, checked_key, dtype_name

#: The ``__metadata__`` of the containers of a distributed checkpoint, besides that of every container.
ABOUT = (("tensorferry.dcp", "1"),)
#: What was warned of in this process. Many programs make a writer for each save.
_warned: set[tuple[str, str]] = set()


class PlanSnapshot:
    """The entries for one rank's plan, and the memory behind them.

    Args:
        plan: this rank's part of the save
        planner: resolves the data of its items
        accelerator: the accelerators, or a stand-in
        copy: host memory is to be copied, too

    Attributes:
        rows: an entry for each item of the plan
        owner: keeps their memory alive
        late: the bytes of those rows that are not in host memory as they are written
        private: whether all memory is a copy to which nothing else writes, once :meth:`complete` was called

    Raises:
        UnsupportedLeaf: an item cannot be written; the message names it
        InvalidArgument: a graph is being captured on a device that holds an item
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, accelerator: Accelerator, copy: bool = False) -> None:
        self.rows = no_rows()
        self.owner: list[Any] = []
        self._items = plan.items
        self._kinds: list[str] = []
        #: The dtype of each item that is a tensor.
        self._dtypes: list[torch.dtype | None] = []
        self.late: dict[int, Piece | SavedTensor] = {}
        #: The key of each object, and the archive of ``torch.save``, or its beginning with the pickle.
        self._pickles: list[tuple[str, bytes | bytearray]] = []
        self._taken: set[str] = set()
        self._borrowed = False
        self._accelerator = accelerator
        # The planner pickles objects and may convert tensors; this class makes some tensors dense and pickles others.
        with self._accelerator.reading(self._accelerator.in_use()) as also:
            for number, item in enumerate(plan.items):
                try:
                    checked_key(item.index.fqn).encode()
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        self._append_object(item, reserved.pickled_object(number), data)
                    else:
                        also(self._accelerator.holding([data]))
                        self._append_tensor(item, data, number, copy)
                except InvalidArgument:
                    raise
                except Exception as e:
                    raise UnsupportedLeaf(f"{item.index.fqn} cannot be saved ({type(e).__name__}: {e})") from e
        self.private = not self._borrowed

    def complete(self, stager: HostStager) -> None:
        """Brings the late rows into host memory, each of them at once.

        Raises:
            InvalidArgument: a graph is being captured on a device that holds an item
            SystemRefused: there is no memory for a copy
            Exception: whatever the device raises when a copy fails
        """
        stager.copy([late for late in self.late.values() if isinstance(late, Piece)])
        for row, late in self.late.items():
            if isinstance(late, Piece):
                self.rows.place(row, late.data_ptr())
                continue
            memory = scratch(late.nbytes)
            _copy_memory(late.copies(0, late.nbytes, memory.data_ptr()), copying_threads())
            self.owner[row] = memory
            self.rows.place(row, memory.data_ptr())
        self.late = {}

    def _append(self, name: str, kind: str, owner: Any, shape: tuple[int, ...], start: int, dtype: str = "U8") -> None:
        """Adds an entry, whose memory ``owner`` keeps."""
        self.owner.append(owner)
        self._kinds.append(kind)
        self.rows.append(owner, name, dtype, shape, start, owner.nbytes, 0)

    def _append_object(self, item: WriteItem, name: str, data: io.BytesIO) -> None:
        """Adds an entry of a pickled object."""
        copy = bytearray(data.getbuffer())
        self._pickles.append((item.index.fqn, copy))
        memory = torch.frombuffer(copy, dtype=torch.uint8) if copy else scratch(0)
        self._dtypes.append(None)
        self._append(name, OBJECT, memory, (len(copy),), address(memory))

    def _append_tensor(self, item: WriteItem, tensor: torch.Tensor, number: int, copy: bool) -> None:
        """Adds an entry of a tensor's elements, or of its pickle if these do not describe it.

        Raises:
            ValueError: the tensor has no memory, torch copies no elements of its dtype, so that no load could put them
                anywhere, or it has another shape than when the save was planned
        """
        if (why := without_memory(tensor) or why_not_copied(tensor.dtype, tensor)) is not None:
            raise ValueError(why)
        if tensor.shape != item.tensor_data.chunk.sizes:
            planned = tuple(item.tensor_data.chunk.sizes)
            raise ValueError(f"its shape was {planned} when the save was planned, and is {tuple(tensor.shape)} now")
        memory = dense(tensor)
        self._dtypes.append(tensor.dtype)
        if memory is None:
            saved = SavedTensor(tensor.detach())
            self._pickles.append((item.index.fqn, saved.head))
            self.late[len(self.rows)] = saved
            self._append(reserved.pickled_tensor(number), PICKLED_TENSOR, saved, (saved.nbytes,), 0)
            return
        dtype = DTYPE_NAMES.get(memory.dtype)
        owner: torch.Tensor | Piece = memory
        start = address(memory)
        if memory.nbytes and (copy or self._accelerator.device_of(memory.untyped_storage()) is not None):
            owner = self.late[len(self.rows)] = Piece(*reach(memory))
            start = 0
        elif memory.data_ptr() == tensor.data_ptr():
            self._borrowed = self._borrowed or memory.nbytes > 0
        shape = tuple(memory.shape) if dtype else (memory.nbytes,)
        self._append(self._name(item), ELEMENTS, owner, shape, start, dtype or "U8")

    def _name(self, item: WriteItem) -> str:
        """Returns a unique entry name: the item's key, and for a part of a tensor the slice in brackets."""
        fqn, data = item.index.fqn, item.tensor_data
        name: str = fqn.replace("\0", "~")
        if reserved.is_reserved(name):
            name = f"~{name}"
        if data is not None and data.chunk.sizes != data.size:
            ends = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
            name += f"[{','.join(f'{start}:{start + size}' for start, size in ends)}]"
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}~{count}"
        self._taken.add(unique)
        return unique

    def warn_of_refusals(self, allowed: Allowed) -> None:
        """Warns, once in this process, of each global that the pickled objects name and ``allowed`` refuses."""
        needed: dict[tuple[str, str], str] = {}
        for fqn, data in self._pickles:
            for named in globals_of(data):
                needed.setdefault(named, fqn)
        RefusalWarnings(allowed, REFUSED_LATER, _warned).warn(needed)

    @gc_paused()
    def part(self, container: str, header: int | None = None) -> RankPart:
        """Returns what the coordinator is told: which entry holds each item.

        Args:
            container: the name of this container, see :class:`EntryRef`
            header: the checksum of the container's header, if it is a file

        Raises:
            InvalidArgument: parts of one tensor contradict each other
        """
        index, rows = Index(), defaultdict(list)
        for row, item in enumerate(self._items):
            rows[item.index.fqn].append(row)
        nbytes = self.rows.sizes
        for fqn, of_key in rows.items():
            described = {(self._dtypes[row], _size(self._items[row])) for row in of_key}
            if len(described) > 1:
                dtypes = ", ".join(f"{dtype} {list(size)}" for dtype, size in described)
                raise InvalidArgument(f"{fqn}: its parts have different dtypes or shapes ({dtypes}): save it in one")
            ((dtype, size),) = described
            index.add(fqn, dtype and dtype_name(dtype), size, spread=dtype is not None)
            for row in of_key:
                chunk = self._items[row].tensor_data and self._items[row].tensor_data.chunk
                offsets, sizes = (chunk.offsets, chunk.sizes) if chunk else ((), ())
                index.add_chunk(offsets, sizes, row, nbytes[row], self._kinds[row])
        return RankPart(container, header, zlib.compress(index.encode(), 1))


def _size(item: WriteItem) -> tuple[int, ...]:
    """Returns the shape of the whole tensor of which an item is a part."""
    return () if item.tensor_data is None else tuple(item.tensor_data.size)


def objects_of(plan: SavePlan) -> set[MetadataIndex]:
    """Returns the indices of the items of ``plan`` that are pickled objects."""
    return {item.index for item in plan.items if item.type == WriteItemType.BYTE_IO}


def check_left_to_others(wanted: Iterable[MetadataIndex], plan: SavePlan, planner: SavePlanner) -> None:
    """Checks that this rank's objects that another rank saves in its stead hold no part of a tensor of this rank.

    Every rank would load the part of the rank that saves the object.

    Args:
        wanted: the objects that this rank has, as :func:`objects_of` returns them
        plan: what this rank is to save of them
        planner: looks them up; if it cannot, nothing is checked

    Raises:
        UnsupportedLeaf: one does; the message names it
    """
    for fqn in objects_with_parts(set(wanted) - objects_of(plan), planner):
        raise not_for_others(fqn)


def objects_with_parts(wanted: Iterable[MetadataIndex], planner: SavePlanner) -> set[str]:
    """Returns the keys of those objects that hold this rank's part of a tensor, as far as ``planner`` finds them."""
    lookup = getattr(planner, "lookup_object", None)
    return set() if lookup is None else {index.fqn for index in wanted if _has_part(index, lookup)}


def not_for_others(fqn: str) -> UnsupportedLeaf:
    """Returns the error for an object that holds a part of a tensor, and that one rank saves for others."""
    return UnsupportedLeaf(
        f"{fqn} cannot be saved: one rank saves this object for all ranks, and it holds a tensor that is "
        "spread over ranks, of which it would save its own part. Keep the tensor in dicts and lists alone, not "
        "in a tuple or another object, or give the object of each rank a key of its own"
    )


def _has_part(index: MetadataIndex, lookup: Callable[[MetadataIndex], Any]) -> bool:
    """Whether pickling the object meets a tensor of which each rank has another part."""
    finder = _PartFinder(_Sink(), 5, buffer_callback=lambda _: None)
    with contextlib.suppress(Exception):  # The rank that saves it says what cannot be pickled.
        finder.dump(lookup(index))
    return finder.found


class _PartFinder(pickle.Pickler):
    """Pickles an object without the elements of its tensors, and records whether one differs by rank."""

    found = False

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self.found = self.found or differs_by_rank(value)
        return int, ()


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)
