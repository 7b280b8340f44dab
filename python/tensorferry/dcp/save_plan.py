"""Turns the items of a save plan into the entries of a container."""

from __future__ import annotations

import io
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._gc import gc_paused
from ..errors import InvalidArgument, UnsupportedLeaf
from ..memory.staging import HostStager, Piece
from ..memory.tensors import DTYPE_NAMES, address, dense, no_rows, reach, scratch, without_memory
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..pickles.torch_archives import globals_of
from ..storage import reserved
from .index import ELEMENTS, OBJECT, PICKLED_TENSOR, EntryRef, dtype_name

#: The ``__metadata__`` of the containers of a distributed checkpoint, besides that of every container.
ABOUT = (("tensorferry.dcp", "1"),)
#: What was warned of in this process. Many programs make a writer for each save.
_warned: set[tuple[str, str]] = set()
#: The dtype and the shape of a tensor.
Elements: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


class PlanSnapshot:
    """The entries for one rank's plan, and the memory behind them.

    Args:
        plan: this rank's part of the save
        planner: resolves the data of its items
        stager: copies accelerator memory to the host
        copy: copy host memory, too

    Attributes:
        rows: an entry for each item of the plan
        owner: keeps their memory alive
        private: whether all memory is a copy to which nothing else writes
        elements: dtype and shape of each entry that holds a tensor's elements, ``None`` for the others

    Raises:
        UnsupportedLeaf: an item cannot be written; the message names it
        InvalidArgument: a graph is being captured on a device that holds an item
        SystemRefused: there is no memory for a copy
        Exception: whatever the device raises when a copy fails
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, stager: HostStager, copy: bool) -> None:
        self.rows = no_rows()
        self.owner: list[Any] = []
        self.elements: list[Elements | None] = []
        self._indices: list[MetadataIndex] = []
        self._kinds: list[str] = []
        #: Of each item that is a tensor.
        self._tensors: list[Elements | None] = []
        #: The key and the pickle of each object, in the memory of its entry.
        self._pickles: list[tuple[str, bytearray]] = []
        self._taken: set[str] = set()
        self._borrowed = False
        self._accelerator = stager.accelerator
        pieces: list[tuple[int, Piece]] = []
        # The planner pickles objects and may convert tensors; this class makes some tensors dense and pickles others.
        with self._accelerator.reading(self._accelerator.in_use()) as also:
            for number, item in enumerate(plan.items):
                try:
                    data = planner.resolve_data(item)
                    self._indices.append(item.index)
                    if item.type == WriteItemType.BYTE_IO:
                        self._append_bytes(item, reserved.pickled_object(number), data.getvalue(), OBJECT)
                    else:
                        also(self._accelerator.holding([data]))
                        self._append_tensor(item, data, number, copy, pieces)
                except InvalidArgument:
                    raise
                except Exception as e:
                    raise UnsupportedLeaf(f"{item.index.fqn} cannot be saved ({type(e).__name__}: {e})") from e
            stager.copy([piece for _, piece in pieces])
        for row, piece in pieces:
            self.rows.place(row, piece.data_ptr())
        self.private = not self._borrowed

    def _append_bytes(
        self, item: WriteItem, name: str, data: bytes, kind: str, tensor: torch.Tensor | None = None
    ) -> None:
        """Adds an entry of pickled bytes: an object, or a ``tensor`` that had to be pickled."""
        copy = bytearray(data)
        self._pickles.append((item.index.fqn, copy))
        memory = torch.frombuffer(copy, dtype=torch.uint8) if data else scratch(0)
        self.owner.append(memory)
        self.elements.append(None)
        self._kinds.append(kind)
        self._tensors.append(None if tensor is None else (tensor.dtype, tuple(tensor.shape)))
        self.rows.append(memory, name, "U8", (len(data),), address(memory), len(data), 0)

    def _append_tensor(
        self, item: WriteItem, tensor: torch.Tensor, number: int, copy: bool, pieces: list[tuple[int, Piece]]
    ) -> None:
        """Adds an entry of a tensor's elements, or of its pickle if these do not describe it.

        Elements that are to be copied are added to ``pieces``.

        Raises:
            ValueError: the tensor has no memory, or another shape than when the save was planned
        """
        if tensor.device.type != "meta" and (why := without_memory(tensor)) is not None:
            raise ValueError(why)
        if item.tensor_data is not None and tensor.shape != item.tensor_data.chunk.sizes:
            planned = tuple(item.tensor_data.chunk.sizes)
            raise ValueError(f"its shape was {planned} when the save was planned, and is {tuple(tensor.shape)} now")
        memory = dense(tensor)
        if memory is None:
            file = io.BytesIO()
            torch.save(tensor.detach(), file)
            self._append_bytes(item, reserved.pickled_tensor(number), file.getvalue(), PICKLED_TENSOR, tensor)
            return
        dtype = DTYPE_NAMES.get(memory.dtype)
        shape = tuple(memory.shape) if dtype else (memory.nbytes,)
        owner: torch.Tensor | Piece = memory
        start = address(memory)
        if memory.nbytes and (copy or self._accelerator.device_of(memory.untyped_storage()) is not None):
            owner = Piece(*reach(memory))
            pieces.append((len(self.rows), owner))
            start = 0
        elif memory.data_ptr() == tensor.data_ptr():
            self._borrowed = self._borrowed or memory.nbytes > 0
        self.owner.append(owner)
        self.elements.append((memory.dtype, tuple(memory.shape)))
        self._tensors.append(self.elements[-1])
        self._kinds.append(ELEMENTS)
        self.rows.append(owner, self._name(item), dtype or "U8", shape, start, memory.nbytes, 0)

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
        for fqn, pickle in self._pickles:
            for named in globals_of(pickle):
                needed.setdefault(named, fqn)
        RefusalWarnings(allowed, REFUSED_LATER, _warned).warn(needed)

    @gc_paused()
    def results(self, container: str, header: int | None = None) -> list[WriteResult]:
        """Returns the results for the coordinator: which entry holds each item.

        Args:
            container: the name of this container, see :class:`EntryRef`
            header: the checksum of the container's header, if it is a file
        """
        rows = self.rows
        tensors = [tensor and (dtype_name(tensor[0]), tensor[1]) for tensor in self._tensors]
        columns = zip(self._indices, self._kinds, tensors, rows.names, rows.dtypes, rows.sizes, strict=True)
        return [
            WriteResult(index, nbytes, EntryRef(container, name, dtype, nbytes, kind, header, tensor))
            for index, kind, tensor, name, dtype, nbytes in columns
        ]
