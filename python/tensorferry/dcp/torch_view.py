"""Presents a publication as a folder that torch's own readers can load: ``.metadata``, and a file for each rank.

A rank's file is a sequence of ``torch.save`` archives. The elements of tensors are served from where they are. The
bytes of an archive before and behind the elements depend only on dtype and shape, so that the coordinator can compute
the lengths of the archives of all ranks.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..errors import ProtocolError
from ..state.allowlist import Allowed
from ..storage.peers import url_of
from . import index
from .index import ELEMENTS, EntryRef
from .save_plan import PlanSnapshot


class TorchView:
    """Renders the files of the folder on request.

    Args:
        packed: this rank's entries
        step: the step of the publication
        url: this rank's URL
        urls: the URLs of all ranks, the coordinator's first
        text: on the coordinator, the index and how many entries all ranks have written; ``None`` on the other ranks
    """

    def __init__(
        self, packed: PlanSnapshot, step: int, url: str, urls: list[str], text: tuple[bytes, int] | None
    ) -> None:
        self._packed = packed
        self._step = step
        self._url = url
        self._urls = urls
        self._files = {_name(number): url for number, url in enumerate(urls)}
        self._text = text

    def __call__(self, name: str) -> list[Any] | str | None:
        """Renders a file of the folder, or with an empty name the list of its files, as HTML.

        Returns:
            The parts of the file: bytes, or address and length of memory. The URL where it is for a file of another
            rank, on the coordinator, and for the list on other ranks. ``None`` if there is no such file.

        Raises:
            ProtocolError: the planner has written items that its metadata does not describe
        """
        file = name.removeprefix("dcp/")
        if not file:
            return [self._listing()] if self._text is not None else f"{self._urls[0]}{self._step}/{name}"
        if file == ".metadata" and self._text is not None:
            return [self._metadata(*self._text)]
        url = self._files.get(file)
        if url is None or (url != self._url and self._text is None):
            return None
        return self._own() if url == self._url else f"{url}{self._step}/{name}"

    def _listing(self) -> bytes:
        """Returns the page by which fsspec lists a folder: any page with links to its files."""
        links = "".join(f'<li><a href="{name}">{name}</a></li>\n' for name in (".metadata", *self._files))
        return f"<!DOCTYPE html>\n<title>checkpoint</title>\n<ul>\n{links}</ul>\n".encode()

    def _own(self) -> list[Any]:
        rows = self._packed.rows
        parts: list[Any] = []
        columns = sorted(zip(rows.names, self._packed.elements, rows.memory, rows.sizes, strict=True), key=_by_name)
        for _, elements, memory, nbytes in columns:
            around = _around(*elements) if elements else (b"", b"")
            parts += [around[0], (memory.data_ptr() if nbytes else 0, nbytes), around[1]]
        return parts

    def _metadata(self, text: bytes, count: int) -> bytes:
        metadata = index.decode(text, "the publication", Allowed((), trust=True))
        refs: dict[MetadataIndex, EntryRef] = metadata.storage_data
        if len(refs) != count:
            raise ProtocolError(
                "the planner has written items that its metadata does not describe, so torch cannot find them by name"
            )
        shapes = {
            (fqn, chunk.offsets): (stored.properties.dtype, tuple(chunk.sizes))
            for fqn, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks
        }
        of_container = defaultdict(list)
        for key, ref in refs.items():
            of_container[ref.container].append((ref.entry, key, ref))
        names = {url: name for name, url in self._files.items()}
        metadata.storage_data = {}
        for container, entries in of_container.items():
            at = 0
            for _, key, ref in sorted(entries, key=_by_name):
                around = _around(*shapes[key.fqn, key.offset]) if ref.kind == ELEMENTS else (b"", b"")
                length = ref.nbytes + sum(map(len, around))
                file = names[url_of(container)]
                metadata.storage_data[key] = _StorageInfo(file, at, length)
                at += length
        return pickle.dumps(metadata)


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


def _by_name(entry: tuple[Any, ...]) -> str:
    return entry[0]  # type: ignore[no-any-return]


class _Recorder:
    """Stands in for the file that ``torch.save`` writes; keeps all bytes except the elements, which torch skips."""

    def __init__(self) -> None:
        self.parts = [io.BytesIO()]

    def write(self, data: Any) -> int:
        return self.parts[-1].write(data)

    def seek(self, offset: int, whence: int) -> None:
        assert (whence, len(self.parts)) == (os.SEEK_CUR, 1), "torch.save passes over one storage"
        del offset
        self.parts.append(io.BytesIO())

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=4096)
def _around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns the bytes that ``torch.save`` writes before and behind the elements of a tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = _Recorder()
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), recorder)
    before, *behind = (part.getvalue() for part in recorder.parts)
    return before, behind[0] if behind else b""
