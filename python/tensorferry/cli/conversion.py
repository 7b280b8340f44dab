"""Conversions: a source, whose tensors lie in the pages of files, and the formats that are written from them."""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from .._native import FilePages
from ..checkpointing.resharding import Resharding
from ..dcp.file_writer import FileWriter
from ..errors import InvalidArgument, SourceChanged, UnsupportedLeaf
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import HostStager
from ..memory.tensors import DTYPES
from ..pickles.allowlist import Allowed, refuse_unlisted
from ..state.local_parts import is_spread
from ..state.snapshot import StateSnapshot
from ..storage.folder_save import FolderSave, SaveId
from ..storage.pending import pending, stem
from ..storage.reserved import is_reserved
from . import intact, states
from .listing import files_of_shards
from .places import CheckpointKind, Place
from .torch_leaves import values_of
from .values import has_elements, whole, without_groups

#: The names of the dtypes that a safetensors file can have.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: How many names an error has.
_NAMED = 5


class Conversion:
    """A source that is converted.

    Args:
        place: what is converted
        rank: of a checkpointer's folder, the rank; ``None`` is 0
        step: the step number of a checkpoint that is written; ``None`` takes that of the source
        verify: compare files with their checksums first
        drop: leave out what a safetensors file cannot hold
        only: the part of the state that is converted, as for :func:`find_part`; ``None`` converts all of it
    """

    def __init__(
        self, place: Place, *, rank: int | None, step: int | None, verify: bool, drop: bool, only: str | None
    ) -> None:
        self._place, self._rank, self._step = place, rank or 0, step
        self._verify, self._drop, self._only = verify, drop, only
        #: What is left out may be of any class.
        self._allowed = Allowed().sparing()
        #: Those in which tensors of the source lie.
        self._pages: list[FilePages] = []
        #: How many ranks saved what is converted, if they have their own values.
        self._ranks = 1

    def write(self, output: Path, to: str) -> dict[str, Any]:
        """Writes the checkpoint to ``output``; returns how much there was.

        Raises:
            SourceChanged: a file of the source was written to meanwhile; the output is not made
            TensorferryError: the source cannot be read, or the output not be written
            RuntimeError: torch cannot write the state
        """
        with pending(output, folder=to in ("checkpoint", "dcp", "torch-dcp")) as partial:
            try:
                return self._write(partial, to)
            finally:
                # Whatever was read of it, or went wrong with it.
                if not all(pages.is_unchanged for pages in self._pages):
                    raise SourceChanged(f"{self._place.text} was changed while it was converted: convert it again")

    def _write(self, partial: Path, to: str) -> dict[str, Any]:
        """Writes the state to ``partial`` in the format ``to``; returns what the verb tells of it."""
        facts: dict[str, Any] = {}
        state = self._state(partial.parent)
        if self._only is not None:
            state = find_part(state, self._only).of(state)
        if not self._drop:
            refuse_unlisted([state])
        values = values_of(state)
        if to not in ("tensorferry", "checkpoint") and any(map(is_spread, values.values())):
            state = states.without_ranks(state, self._place.text)
            values = values_of(state)
        tensors = sum(isinstance(value, torch.Tensor) for value in values.values())
        facts |= {"tensors": tensors, "objects": len(values) - tensors}
        if self._ranks > 1:
            facts |= {"rank": self._rank, "ranks": self._ranks}
        match to:
            case "tensorferry":
                snapshot = StateSnapshot(state, HostStager(ACCELERATOR), "borrow")
                snapshot.container().write(partial, partial=partial.with_name(f".{stem(partial)}.new"))
            case "safetensors":
                facts["dropped"] = write_safetensors(values, partial, drop=self._drop)
            case "torch":
                with partial.open("xb") as file, states.typed_errors():
                    torch.save(state, file)
                    _sync(file)
            case "checkpoint":
                _write_checkpoint(state, partial, self._step)
            case "dcp":
                _save_distributed(state, FileWriter(partial))
            case _:
                _save_distributed(state, dcp.FileSystemWriter(partial))
        return facts

    def _state(self, scratch: Path) -> Any:
        """Returns the state of the source; a distributed checkpoint's tensors lie in a file in ``scratch``."""
        place = self._place
        match place.kind:
            case CheckpointKind.CHECKPOINT:
                return self._state_of_rank(place.path)
            case CheckpointKind.DISTRIBUTED | CheckpointKind.TORCH_DISTRIBUTED:
                return states.state_of_distributed(place.path, scratch, self._only, objects=not self._drop)
            case CheckpointKind.SHARDS:
                files = list(files_of_shards(place.path))
            case _:
                files = [place.path]
        for file in files:
            self._require_undamaged(file, archive=place.kind is CheckpointKind.ARCHIVE)
        return states.state_in(place, self._pages, self._allowed)

    def _state_of_rank(self, folder: Path) -> Any:
        """Returns the state of a rank, with what only others have, and with whole tensors for those that are spread.

        With ``only``, other parts of the state are left out. The step of the index counts where none was given.

        Raises:
            InvalidArgument: there is no such rank, or no such part
            StateMismatch: the states of the ranks cannot be put together
            TensorferryError: the checkpoint is incomplete or damaged, or cannot be read
        """
        index, files = intact.files_of_ranks(folder)
        if self._rank not in index.files:
            raise InvalidArgument(f"--rank must be between 0 and {index.world_size - 1}, not {self._rank}")
        if self._step is None:
            self._step = index.step
        self._ranks = index.world_size
        resharding = Resharding(folder, index, self._rank, None, None)

        def read(rank: int) -> Any:
            return states.state_of_container(self._require_undamaged(files[rank]), self._pages, self._allowed)

        # Of tensors that are spread over ranks, all parts are read later, each with its checksums.
        with without_groups():
            state = resharding.with_keys_of_all_ranks(read(self._rank), read)
            if self._only is not None:
                # The files of the other ranks name tensors by their keys in the whole state.
                state = find_part(state, self._only).alone(state)
            return resharding.with_whole_tensors(state)

    def _require_undamaged(self, path: Path, *, archive: bool = False) -> Path:
        """Returns ``path``, after comparing the file with its checksums if everything is to be verified."""
        return intact.require_undamaged(path, archive=archive) if self._verify else path


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_checkpoint(state: Any, folder: Path, step: int | None) -> None:
    """Writes a state as a checkpointer's checkpoint of one rank."""
    save = FolderSave(folder, SaveId.new(step=step))
    try:
        save.write(StateSnapshot(state, HostStager(ACCELERATOR), "borrow").container())
        save.commit()
    finally:
        save.close()


def _save_distributed(state: Any, writer: Any) -> None:
    """Saves a state with a writer of ``torch.distributed.checkpoint``; refuses what such a checkpoint cannot hold."""
    if not isinstance(state, dict):
        raise UnsupportedLeaf(f"a distributed checkpoint holds a dict, and this state is a {type(state).__name__}")
    for name, value in values_of(state).items():
        # torch writes the integers of a quantized tensor without their scale, and reads memory that is not there.
        if isinstance(value, torch.Tensor) and (value.is_quantized or value.is_meta):
            kind = "quantized" if value.is_quantized else "on the device meta, without elements"
            raise UnsupportedLeaf(f"{name}: a distributed checkpoint cannot hold it, because it is {kind}")
    try:
        flatten_state_dict(state)
    except ValueError as e:
        raise UnsupportedLeaf(
            f"a distributed checkpoint names a leaf by its keys, joined with dots, and two leaves of this state would "
            f"have the same name: {e}"
        ) from e
    with warnings.catch_warnings(), states.typed_errors():
        warnings.simplefilter("ignore")
        dcp.state_dict_saver._save_state_dict(state, storage_writer=writer, no_dist=True)


def write_safetensors(values: dict[str, Any], path: Path, *, drop: bool) -> list[str]:
    """Writes tensors as a safetensors file for other programs, without checksums; returns the names left out.

    The empty name, and names that the formats keep for themselves, get a ``~`` in front, or as many
    as it takes to have the name of no other leaf.

    Args:
        values: the leaves of a state by their paths
        path: the file, which must not exist
        drop: leave out what is not a tensor, is sparse, quantized or on the device ``meta``, or has a dtype that
            safetensors lacks

    Raises:
        UnsupportedLeaf: there is such a leaf, and ``drop`` is not set
        SystemRefused: this machine has no memory for a copy of a view
        OSError: the file is there already, or cannot be written
    """
    dropped, tensors = [], {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and has_elements(value) and value.dtype in _NAMES:
            written = name
            while is_reserved(written) or (written != name and written in values):
                written = f"~{written}"
            tensors[written] = value.detach()
        elif drop:
            dropped.append(name)
        else:
            raise UnsupportedLeaf(
                f"{name}: safetensors cannot hold a {type(value).__name__}: leave such leaves out with --drop-objects, "
                "or convert to tensorferry, which is a safetensors file as well"
            )
    # Wide elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        nbytes = tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        fields[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            copy = whole(tensors[name])
            if nbytes := copy.numel() * copy.element_size():
                file.write((ctypes.c_char * nbytes).from_address(copy.data_ptr()))
        _sync(file)
    return dropped


class StatePart(NamedTuple):
    """Where a part lies in a state.

    Attributes:
        keys: the keys that lead from the state to the dict that holds the part
        prefix: what the keys of the part begin with there; empty if the whole dict is the part
    """

    keys: tuple[Any, ...]
    prefix: str

    def alone(self, state: Any) -> Any:
        """Returns the state without everything else; what is left has the keys that it had."""
        if not self.keys:
            return {key: value for key, value in state.items() if _begins(key, self.prefix)} if self.prefix else state
        return {self.keys[0]: StatePart(self.keys[1:], self.prefix).alone(state[self.keys[0]])}

    def of(self, state: Any) -> Any:
        """Returns the part itself, with the keys that it has below its own name."""
        for key in self.keys:
            state = state[key]
        if not self.prefix:
            return state
        return {key.removeprefix(self.prefix): value for key, value in state.items() if _begins(key, self.prefix)}


def find_part(state: Any, path: str) -> StatePart:
    """Returns where the part ``path`` lies: keys joined with dots, in nested dicts or within the names of one dict.

    Raises:
        InvalidArgument: there is no such part, or it is a value of its own and not a dict
    """
    if not path:
        raise InvalidArgument("--only must name a part of the state, such as model")
    found = _part_at(state, path)
    if found is None:
        raise InvalidArgument(f"--only {path}: there is no such part: {_keys_text(state)}")
    part = found.of(state)
    if not isinstance(part, dict):
        raise InvalidArgument(
            f"--only {path}: that is a {type(part).__name__}, and only a dict is a part that can be converted"
        )
    return found


def _part_at(state: Any, path: str) -> StatePart | None:
    if not isinstance(state, dict):
        return None
    for key in state:
        if str(key) == path:
            return StatePart((key,), "")
    for key in state:
        if path.startswith(f"{key}.") and (below := _part_at(state[key], path[len(str(key)) + 1 :])) is not None:
            return StatePart((key, *below.keys), below.prefix)
    prefix = f"{path}."
    return StatePart((), prefix) if any(_begins(key, prefix) for key in state) else None


def _begins(key: Any, prefix: str) -> bool:
    return isinstance(key, str) and key.startswith(prefix)


def _keys_text(state: Any) -> str:
    keys = [str(key) for key in state] if isinstance(state, dict) else []
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"the state has {', '.join(keys[:_NAMED])}{more}" if keys else f"the state is a {type(state).__name__}"
