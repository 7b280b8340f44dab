"""Carries out a load plan: computes the slices of containers that it needs, and reads them into its targets."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .. import _gc
from ..errors import ProtocolError, StateMismatch
from ..memory.accelerator import ACCELERATOR
from ..memory.tensors import (
    DTYPE_NAMES,
    count_as_written,
    takes_bytes,
    why_not_copied,
    why_not_writable,
    without_memory,
)
from ..pickles.allowlist import Allowed
from ..pickles.torch_archives import unpickled
from ..state.slice_batch import Entry, SliceBatch
from ..storage.slices import SliceTuple, contiguous_strides
from ..storage.source import Parts, Progress
from .index import BUILT, ELEMENTS, PICKLED_TENSOR, EntryRef
from .planner_objects import rewritten, saved
from .shared_targets import without_aliases


@runtime_checkable
class TakesObjects(Protocol):
    """A planner that takes objects themselves, so that they are unpickled once; torch's take what they unpickle."""

    def load_object(self, item: ReadItem, value: Any) -> None:
        """Takes the object of an item."""


#: An object of the plan and its entry; a tensor, its entry and its target.
_Object: TypeAlias = tuple[ReadItem, EntryRef]
_Tensor: TypeAlias = tuple[ReadItem, EntryRef, torch.Tensor]


class Read(Protocol):
    """Reads slices to memory addresses; takes the slices by the name of their container."""

    def __call__(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> None:
        """Reads ``slices``, and reports how far that is."""


#: Returns the values to which entries refer that the source builds; takes the entries, and what reads slices.
Values = Callable[[list[EntryRef], Callable[[Mapping[str, list[SliceTuple]]], None]], list[Any]]


class Reading:
    """Reads one load plan.

    Args:
        refs: where each chunk and object is stored
        planner: provides the targets
        read: reads slices to memory addresses
        allowed: the globals that pickled objects may name
        values: returns values that the source builds; ``None`` if it builds none
        progress: reports how many bytes of the plan's items are there; values that the source builds do not count
        targets: the memory of parts that the planner does not know
    """

    def __init__(
        self,
        refs: Mapping[MetadataIndex, EntryRef],
        planner: LoadPlanner,
        read: Read,
        allowed: Allowed,
        values: Values | None = None,
        progress: Progress | None = None,
        targets: Mapping[MetadataIndex, torch.Tensor] | None = None,
    ) -> None:
        self._refs = refs
        self._planner = planner
        self._read = read
        self._allowed = allowed
        self._values = values
        self._progress = progress
        self._targets = targets or {}
        self._parts: Parts | None = None
        #: Bytes of the items that have been scheduled since the last read.
        self._scheduled = 0
        self._batch = SliceBatch(self._read_slices, self._follow_up)
        self._accelerator = ACCELERATOR
        self._devices: set[torch.device] = set()

    def run(self, plan: LoadPlan) -> None:
        """Reads all items of ``plan`` into their targets. If it fails, some of them may have new values.

        Raises:
            StateMismatch: a target has another shape than the plan says, or cannot be written to; no target is
                overwritten then, unless the message says so
            CorruptCheckpoint: bytes do not match their checksums
            ProtocolError: plan, index and containers contradict each other, or an object is damaged
            UnsafePickle: an object needs something that is not on the allow-list
            SystemRefused: the index announces an object that is larger than the memory of this machine
            InvalidArgument: a graph is being captured on a device that is to be written to
            FetchTimeout: the deadline of ``allowed``, if it has one, passed while objects were unpickled
            Exception: what ``read``, ``values``, ``progress`` or the planner raises
        """
        # Not during the last fetch, which is the only one unless much passes through temporary memory.
        with _gc.gc_paused():
            self._schedule(plan)
        self._batch.flush()
        if self._parts is not None:
            self._parts.end()

    def _schedule(self, plan: LoadPlan) -> None:
        """Turns all items into slices to be fetched, and fetches them whenever much temporary memory is held."""
        objects, tensors = [], []
        for item in plan.items:
            ref = self._ref(item)
            if item.type == LoadItemType.BYTE_IO:
                objects.append((item, ref))
            else:
                tensors.append((item, ref, self._target(item, ref)))
        self._accelerator.check(self._devices)
        # A DTensor has a counter besides that of its local tensor, which is the target.
        state = getattr(self._planner, "state_dict", None)
        wholes = [state.get(item.dest_index.fqn) for item, *_ in tensors] if isinstance(state, dict) else []
        count_as_written([*[target for *_, target in tensors], *wholes])
        objects, tensors = self._without_built(objects, tensors)
        if self._progress is not None:
            wanted = sum(ref.nbytes for _, ref in objects) + sum(self._nbytes(item, ref) for item, ref, _ in tensors)
            self._parts = Parts(self._progress, wanted)
        for item, ref in objects:
            self._scheduled += ref.nbytes
            self._batch.add_entry(_entry(ref), partial(self._load_bytes, item))
        direct = without_aliases([(item, target) for item, _, target in tensors])
        for (item, ref, target), alone in zip(tensors, direct, strict=True):
            if self._parts is not None:
                self._scheduled += self._nbytes(item, ref)
            self._schedule_tensor(item, ref, target, alone)

    def _without_built(self, objects: list[_Object], tensors: list[_Tensor]) -> tuple[list[_Object], list[_Tensor]]:
        """Has the source build the values that have no entry of their own; returns the other items."""
        built_objects = [one for one in objects if one[1].kind == BUILT]
        built_tensors = [one for one in tensors if one[1].kind == BUILT]
        if self._values is not None and (built_objects or built_tensors):
            values = self._values([one[1] for one in (*built_objects, *built_tensors)], self._read)
            for (item, _), value in zip(built_objects, values, strict=False):
                load = partial(self._planner.load_bytes, item, io.BytesIO(saved(value, item.storage_index.fqn)))
                self._batch.add_call(load)
            for (item, ref, target), value in zip(built_tensors, values[len(built_objects) :], strict=True):
                if isinstance(value, torch.Tensor):
                    _check(item, without_memory(value))
                    _check(item, why_not_copied(value.dtype, target, dense=value.layout is torch.strided))
                self._batch.add_call(partial(self._copy_part, item, ref, target, value))
        return [one for one in objects if one[1].kind != BUILT], [one for one in tensors if one[1].kind != BUILT]

    def _copy_part(self, item: ReadItem, ref: EntryRef, target: torch.Tensor, read: Any) -> None:
        """Copies the part of the tensor ``read`` that an item asks for into its target."""
        fqn = item.storage_index.fqn
        if not isinstance(read, torch.Tensor):
            raise ProtocolError(f"the index says that {fqn} is a tensor, but its entry holds another object")
        try:
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if (start, length) != (0, read.shape[dim]):
                    read = read.narrow(dim, start, length)
        except Exception as e:
            raise ProtocolError(f"{fqn} cannot be read ({type(e).__name__}: {e})") from e
        if read.shape != target.shape:
            raise ProtocolError(
                f"{fqn}: its entry {ref.entry!r} holds a tensor of another shape than {list(target.shape)}"
            )
        self._copy(item, target, read)
        self._commit(item, target)

    def _copy(self, item: ReadItem, target: torch.Tensor, read: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                target.copy_(read)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            raise StateMismatch(
                f"{item.dest_index.fqn} cannot take the values that the checkpoint has for it ({type(e).__name__}: "
                f"{e}): it was not updated, and other tensors may have new values already"
            ) from e

    def _read_slices(self, slices: Mapping[str, list[SliceTuple]]) -> None:
        self._read(slices, progress=None if self._parts is None else self._parts.next(self._scheduled))
        self._scheduled = 0

    def _follow_up(self, calls: Iterable[Callable[[], object]]) -> None:
        # Planners may copy to a device as well, in commit_tensor.
        with self._accelerator.writing({*self._accelerator.in_use(), *self._devices}):
            for call in calls:
                call()

    def _nbytes(self, item: ReadItem, ref: EntryRef) -> int:
        """Returns how many bytes a part of a tensor has, as it is stored."""
        if ref.kind != ELEMENTS or ref.tensor is None:
            return ref.nbytes
        return int(ref.tensor[0].itemsize) * math.prod(map(int, item.lengths))

    def _ref(self, item: ReadItem) -> EntryRef:
        ref = self._refs.get(item.storage_index)
        if ref is None:
            raise ProtocolError(f"the plan asks for {item.storage_index}, which the checkpoint does not have")
        if ref.kind == BUILT and self._values is None:
            raise ProtocolError(f"{item.storage_index.fqn} is stored as this tensorferry does not know: upgrade it")
        return ref

    def _target(self, item: ReadItem, ref: EntryRef) -> torch.Tensor:
        """Returns the tensor into which the planner has an item read, after checking its shape and its memory."""
        try:
            target = self._resolved(item)
        except RuntimeError as e:
            raise StateMismatch(f"{item.dest_index.fqn}: nothing can be read into it: {e}") from e
        if target.layout is torch.strided:
            # Only strided tensors: a copy into a detached sparse tensor would set indices and values of the detached
            # one alone.
            target = target.detach()
        if target.size() != item.lengths:
            raise StateMismatch(
                f"{item.dest_index.fqn}: the target has shape {list(target.size())}, but a part of shape "
                f"{list(item.lengths)} is to be read into it"
            )
        if ref.tensor is None:
            raise ProtocolError(f"the plan asks for a tensor {item.storage_index.fqn}, and the index says an object")
        _check(item, why_not_writable(target) or why_not_copied(ref.tensor[0], target, dense=ref.kind == ELEMENTS))
        self._devices.update(self._accelerator.holding([target]))
        return target

    def _resolved(self, item: ReadItem) -> torch.Tensor:
        target = self._targets.get(item.dest_index)
        if target is None:
            return self._planner.resolve_tensor(item)
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def _commit(self, item: ReadItem, target: torch.Tensor) -> None:
        if item.dest_index not in self._targets:
            self._planner.commit_tensor(item, target)

    def _schedule_tensor(self, item: ReadItem, ref: EntryRef, target: torch.Tensor, alone: bool) -> None:
        """Schedules the read of a part of a tensor; directly into ``target`` if that is possible, and it is ``alone``.

        ``alone`` says whether no other target can share memory with it.
        """

        def commit(read: torch.Tensor | None) -> None:
            if read is not None:
                self._copy(item, target, read)
            self._commit(item, target)

        if ref.kind == PICKLED_TENSOR:

            def narrow(data: bytes) -> None:
                self._copy_part(item, ref, target, unpickled(data, item.storage_index.fqn, self._allowed))

            self._batch.add_entry(_entry(ref), narrow)
            return
        dtype, shape = self._chunk(item, ref)
        size = dtype.itemsize
        direct = alone and takes_bytes(target, dtype) and not self._accelerator.holding([target])
        if direct and ref.layout is None and list(item.lengths) == shape and target.is_contiguous():
            self._batch.add_whole(_entry(ref), target, commit)
            return
        begin, steps = (0, None) if ref.layout is None else ref.layout
        strides = contiguous_strides(shape, size) if steps is None else [step * size for step in steps]
        start = begin + sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=True))
        self._batch.add_box(_entry(ref), start, list(item.lengths), strides, target, dtype, commit, direct=direct)

    def _chunk(self, item: ReadItem, ref: EntryRef) -> tuple[torch.dtype, list[int]]:
        """Returns dtype and shape of the chunk that contains an item.

        Raises:
            ProtocolError: the entry does not hold such a chunk, or the item goes beyond it
        """
        fqn = item.storage_index.fqn
        assert ref.tensor is not None
        dtype, shape = ref.tensor[0], list(ref.tensor[1])
        if ref.layout is None:
            matches = ref.dtype == DTYPE_NAMES.get(dtype, "U8") and math.prod(shape) * dtype.itemsize == ref.nbytes
        else:
            begin, steps = ref.layout
            reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
            matches = begin + reach * dtype.itemsize <= ref.nbytes
        if ref.kind != ELEMENTS or not matches:
            raise ProtocolError(
                f"{fqn}: the index says {dtype} {shape}, but its entry {ref.entry!r} has {ref.nbytes} bytes of "
                f"{ref.dtype}"
            )
        inside = all(o + n <= dim for o, n, dim in zip(item.storage_offsets, item.lengths, shape, strict=True))
        if not inside:
            raise ProtocolError(f"{fqn}: the plan goes beyond a chunk of shape {shape}")
        return dtype, shape

    def _load_bytes(self, item: ReadItem, data: bytes) -> None:
        if isinstance(self._planner, TakesObjects):
            self._planner.load_object(item, unpickled(data, item.storage_index.fqn, self._allowed))
            return
        self._planner.load_bytes(item, io.BytesIO(rewritten(data, item.storage_index.fqn, self._allowed)))


def _entry(ref: EntryRef) -> Entry:
    return Entry(ref.container, ref.entry, ref.dtype, ref.nbytes)


def _check(item: ReadItem, why: str | None) -> None:
    """Raises ``StateMismatch`` if ``why`` says why an item cannot be read into its target."""
    if why is not None:
        raise StateMismatch(f"nothing was overwritten: {item.dest_index.fqn}: the target cannot be written to: {why}")
