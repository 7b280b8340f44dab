"""States whose tensors lie in the pages of files, so that the system can take their memory back: for conversions.

A state of any size passes through a process like that. What has to be in memory of its own is pickled objects, views
that were stored in pieces, and, for distributed checkpoints, what ``dcp/load_plan.py`` reads at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._gc import gc_paused
from .._native import FilePages, Stored, _check_machine_has
from ..dcp.failures import own_errors
from ..dcp.file_reader import FileReader
from ..errors import InvalidArgument, ProtocolError, SystemRefused, UnsupportedLeaf
from ..memory.tensors import DTYPES, QUANTISED, over
from ..pickles import torch_archives
from ..pickles.allowlist import Allowed
from ..state import tree
from ..state.build import StateBuilder
from ..state.local_parts import is_spread
from ..state.manifest import Manifest
from ..storage.reserved import DIGESTS
from .listing import check_names_of_shard, files_of_shards
from .mapped import Mapping, check_foreign
from .places import CheckpointKind, Place
from .values import whole_of, without_groups


def state_in(place: Place, pages: list[FilePages] | None = None, allowed: Allowed | None = None) -> Any:
    """Returns the state in a file, a model in several files, or a distributed checkpoint; raises as what reads it.

    Args:
        place: the checkpoint, on this machine
        pages: gets the pages in which the tensors lie
        allowed: the globals that its pickle may name
    """
    match place.layout:
        case CheckpointKind.CONTAINER:
            with without_groups():
                return state_of_container(place.path, pages, allowed)
        case CheckpointKind.ARCHIVE:
            return state_of_archive(place.path, pages, allowed)
        case CheckpointKind.SHARDS:
            return state_of_shards(place.path, pages)
        case CheckpointKind.MEGATRON:
            raise InvalidArgument(f"{place.text} is a checkpoint of Megatron's backend zarr: convert it first")
        case _:
            return state_of_distributed(place.path)


def state_of_container(path: Path, pages: list[FilePages] | None = None, allowed: Allowed | None = None) -> Any:
    """Returns the state in a container file; of a safetensors file of another program, a dict of its tensors.

    The tensors lie in the pages of the file, and are compared with no checksums: whoever reads them asks
    ``is_unchanged`` of these pages afterwards.

    Args:
        path: the file
        pages: gets the pages in which the tensors lie
        allowed: the globals that its pickle may name

    Raises:
        TensorferryError: it cannot be read, or its pickle names what is not allowed
    """
    stored = Stored.open(path, checksums=False)
    for dtype, name in stored.kinds.items():
        if dtype not in DTYPES:
            raise ProtocolError(f"{path}: entry {name!r} has dtype {dtype}, which this version does not support")
    check_foreign(path, stored)
    mapping = Mapping(path)
    if pages is not None:
        pages.append(mapping.pages)
    starts, sizes = stored.starts, stored.sizes

    def memory(number: int) -> tuple[Any, int]:
        return mapping.pages, mapping.payload_start + starts[number]

    if stored.manifest is None or stored.tree is None:
        found = {}
        columns = zip(stored.names, stored.dtypes, stored.shapes, sizes, strict=True)
        with gc_paused():
            for number, (name, dtype, shape, size) in enumerate(columns):
                if name != DIGESTS:
                    buffer, offset = memory(number) if size else (None, 0)
                    found[name] = over(buffer, offset, DTYPES[dtype], shape, size)
        return found
    builder = StateBuilder(Manifest(stored.manifest, stored.tree), stored, stored.plain)
    for k, storage in builder.scattered.items():
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        for entry, lo in builder.manifest.storages[k][1]:
            if sizes[entry]:
                buffer, offset = memory(entry)
                part = torch.frombuffer(buffer, dtype=torch.uint8, count=sizes[entry], offset=offset)
                whole[lo : lo + sizes[entry]].copy_(part)
    return builder.build(stored.pickle or b"", (allowed or Allowed()).detached(), memory)


def state_of_shards(folder: Path, pages: list[FilePages] | None = None) -> dict[str, Any]:
    """Returns the tensors of a model in several safetensors files, by their names; see :func:`state_of_container`.

    Args:
        folder: the folder
        pages: gets the pages in which the tensors lie

    Raises:
        TensorferryError: a file is missing, or cannot be read
    """
    found: dict[str, Any] = {}
    for path, names in files_of_shards(folder).items():
        state = state_of_container(path, pages)
        check_names_of_shard(path, names, list(state))
        found |= {name: state[name] for name in names}
    return found


def state_of_archive(path: Path, pages: list[FilePages] | None = None, allowed: Allowed | None = None) -> Any:
    """Returns what ``torch.save`` wrote, its tensors in the pages of the file, compared with no CRC-32.

    Args:
        path: the file
        pages: gets the pages in which the tensors lie
        allowed: the globals that its pickle may name

    Raises:
        TensorferryError: it cannot be read, or its pickle names what is not allowed
    """
    mapping = Mapping(path)
    if pages is not None:
        pages.append(mapping.pages)

    def mapped(offset: int, nbytes: int) -> torch.Tensor:
        if not 0 <= offset <= offset + nbytes <= mapping.nbytes:
            raise ProtocolError(f"{path}: a storage is not inside of the file")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapping.pages, dtype=torch.uint8, count=nbytes, offset=offset)

    return torch_archives.load_file(path, allowed or Allowed(), "cpu", mapped=mapped)


def state_of_distributed(
    folder: Path, scratch: Path | None = None, only: str | None = None, *, objects: bool = True
) -> Any:
    """Returns the state of a distributed checkpoint, of this package or of torch.

    Keys of an optimizer's state that are numbers as text become integers, where the groups of its parameters list them.

    Args:
        folder: its folder
        scratch: a folder in whose file system the tensors lie, in a file without a name; ``None`` takes memory
        only: the part that is read, its keys joined with dots, where there is one; ``None`` reads all
        objects: whether what is not a tensor is read as well; without, there is ``None`` in its place

    Raises:
        UnsupportedLeaf: a tensor of it is quantized
        SystemRefused: there is no room for the tensors
        TensorferryError: it is incomplete, damaged, or names what is not allowed
    """
    state: dict[str, Any] = {}
    planner = _Planner(scratch, only, objects)
    reader = FileReader(folder)
    # Read here first: torch logs an error of the index with a traceback, and looks for another index then.
    reader.read_metadata()
    with typed_errors():
        dcp.state_dict_loader._load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    for path in planner.left_out:
        set_element(state, path, None)
    _restore_numbers(state)
    return state


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raises an error of this package for each that torch has wrapped, or in whose place it has raised another one.

    Raises:
        TensorferryError: the error itself
        SystemRefused: the system refuses; torch says of a full disk that a position is not the expected one
        ProtocolError: its collectives fail for another reason
        RuntimeError: torch itself fails
    """
    try:
        with own_errors():
            yield
    except CheckpointException as e:
        failures = [failure for failure, _ in e.failures.values()]
        for failure in failures:
            _raise_of_system(failure)
        raise ProtocolError(f"torch cannot handle this checkpoint: {[*map(str, failures)]}") from e
    except RuntimeError as e:
        _raise_of_system(e)
        raise


def _raise_of_system(error: BaseException) -> None:
    """Raises the error of the system that is behind ``error``, if there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            what = f"torch cannot read or write this checkpoint: {found.strerror or found}"
            raise SystemRefused(found.errno, what) from error
        found = found.__cause__ or found.__context__


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]  # mypy does not follow torch
    """Makes the state that an index describes, and plans to load what is wanted of it."""

    def __init__(self, scratch: Path | None, only: str | None, objects: bool) -> None:
        super().__init__()
        self._scratch, self._only, self._objects = scratch, only, objects
        #: The paths of the objects that are not read.
        self.left_out: list[tuple[Any, ...]] = []

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Fills ``state_dict`` with tensors over the scratch file, and for objects with what the index has of them.

        Raises:
            UnsupportedLeaf: a tensor is quantized
            SystemRefused: there is no room for the tensors
        """
        assert metadata is not None
        wanted = self._wanted(metadata)
        tensors = {k: v for k, v in wanted.items() if isinstance(v, TensorStorageMetadata)}
        places, at = {}, 0
        for key, about in tensors.items():
            # torch ends the process when it copies into a tensor of such a dtype that is made from bytes.
            if about.properties.dtype in QUANTISED:
                raise UnsupportedLeaf(
                    f"{key} is of {about.properties.dtype}, whose scale no distributed checkpoint has"
                )
            places[key] = at
            at += -(-about.size.numel() * about.properties.dtype.itemsize // 64) * 64
        pages = self._pages(at)
        for key, value in wanted.items():
            if (about := tensors.get(key)) is not None:
                dtype, nbytes = about.properties.dtype, about.size.numel() * about.properties.dtype.itemsize
                value = over(pages if nbytes else None, places[key] if nbytes else 0, dtype, tuple(about.size), nbytes)
            if metadata.planner_data is not None and key in metadata.planner_data:
                set_element(state_dict, metadata.planner_data[key], value)
            else:
                state_dict[key] = value
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _wanted(self, metadata: Metadata) -> dict[str, Any]:
        """Returns what the index has of each key that is read; of all keys, if none of them is in the part."""
        state, paths = metadata.state_dict_metadata, metadata.planner_data or {}
        names = {key: ".".join(map(str, paths.get(key, (key,)))) for key in state}
        only = self._only
        part = [key for key, name in names.items() if only and f"{name}.".startswith(f"{only}.")] or [*names]
        read = {key: state[key] for key in part if self._objects or isinstance(state[key], TensorStorageMetadata)}
        self.left_out = [paths.get(key, (key,)) for key in part if key not in read]
        return read

    def _pages(self, nbytes: int) -> mmap.mmap | None:
        """Maps ``nbytes`` bytes of a new file without a name in the scratch folder, or without such a folder of memory.

        Raises:
            SystemRefused: there is no room for them
        """
        if not nbytes:
            return None
        if self._scratch is None:
            _check_machine_has(nbytes, "the checkpoint")
            return mmap.mmap(-1, nbytes)
        try:
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                # A write to a page for which the disk has no room would end the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return mmap.mmap(file.fileno(), nbytes)
        except (OSError, OverflowError) as e:
            raise SystemRefused(f"{self._scratch}: there is no room for {nbytes} bytes of tensors: {e}") from e


def _restore_numbers(state: Any) -> None:
    """Makes integers of the keys of each optimizer's state, in place, if its parameter groups list all of them so.

    ``torch.distributed.checkpoint`` has keys as text, and keeps no note of which were integers.
    """
    left = [state]
    while left:
        node = left.pop()
        if not isinstance(node, dict | list | tuple):
            continue
        left += node.values() if isinstance(node, dict) else node
        if not isinstance(node, dict):
            continue
        of_parameters, groups = node.get("state"), node.get("param_groups")
        if isinstance(of_parameters, dict) and isinstance(groups, list | tuple):
            listed = {str(number): number for group in groups for number in _parameters(group)}
            if of_parameters and of_parameters.keys() <= listed.keys():
                restored = {listed[key]: value for key, value in of_parameters.items()}
                of_parameters.clear()
                of_parameters.update(restored)


def _parameters(group: Any) -> list[int]:
    listed = group.get("params") if isinstance(group, dict) else None
    return [number for number in listed if type(number) is int] if isinstance(listed, list | tuple) else []


def without_ranks(state: Any, place: str) -> Any:
    """Returns ``state`` with a plain tensor in place of each DTensor or ShardedTensor that is whole in one part.

    Raises:
        UnsupportedLeaf: one is not whole, or is whole in several parts only
    """
    flat = tree.flatten(state)
    for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
        if is_spread(value):
            whole = whole_of(value)
            if is_spread(whole):
                raise UnsupportedLeaf(
                    f"{place}: {path} is a part of a tensor that is spread over ranks, {list(value.size())} in all, "
                    "and the other parts are not there: convert a checkpoint that has those of all ranks, or keep the "
                    "format with --to tensorferry"
                )
            flat.objects[number] = whole.detach()
    return tree.unflatten(flat.tree, flat.plain, flat.objects)
