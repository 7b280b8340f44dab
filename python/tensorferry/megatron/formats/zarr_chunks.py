"""The bytes of the chunks of a Zarr array: boxes that are read and written in place, and chunks that are compressed."""

from __future__ import annotations

import bz2
import math
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._native import _check_machine_has
from ...errors import SystemRefused
from ...memory.tensors import scratch, takes_bytes, view_as
from ...storage.slices import contiguous_strides
from ...storage.whole_files import read_whole
from ..release import CheckpointingException

if TYPE_CHECKING:
    from .zarr_arrays import ZarrArray

#: Bytes of temporary memory for each thread that reads or writes.
WINDOW = 4 << 20
#: Runs of at least this many bytes are read one by one; shorter ones together with the bytes between them.
_LONG_RUN = 64 << 10
_window = threading.local()


def _scratch(nbytes: int) -> Tensor:
    """Returns memory of this thread that is used until the next call."""
    if nbytes > WINDOW:
        return scratch(nbytes)
    memory: Tensor | None = getattr(_window, "memory", None)
    if memory is None:
        memory = _window.memory = scratch(WINDOW)
    return memory[:nbytes]


def _bytes_of(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous tensor as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _pread(file: int, path: Path, start: int, into: Tensor) -> int:
    """Fills a contiguous tensor with the bytes of a file from ``start`` on; returns how many."""
    buffer = memoryview(_bytes_of(into))
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], start + done)
        if not count:
            raise CheckpointingException(f"{path} was shortened while it was read: load the checkpoint again")
        done += count
    return done


def read_box(
    file: int, path: Path, start: int, sizes: list[int], strides: list[int], dtype: torch.dtype, target: Tensor
) -> int:
    """Reads a box of elements, whose first byte in the file is ``start``, into ``target``; returns the bytes read.

    Raises:
        CheckpointingException: the file ends before the box does
        OSError: it cannot be read
    """
    size = int(dtype.itemsize)
    dims = [dim for dim, n in enumerate(sizes) if n > 1]
    span = sum((sizes[dim] - 1) * strides[dim] for dim in dims) + size
    wanted = math.prod(sizes) * size
    packed = contiguous_strides(sizes, size)
    if all(strides[dim] == packed[dim] for dim in dims) and target.is_contiguous() and takes_bytes(target, dtype):
        return _pread(file, path, start, target)
    scattered = span > wanted and _run(sizes, strides, size) >= _LONG_RUN
    if not dims or (span <= WINDOW and not scattered):
        memory = _scratch(span)
        _pread(file, path, start, memory)
        target.copy_(view_as(memory, dtype, sizes, strides))
        return span
    # By rows, or as many of them at a time as the window has room for.
    outer = max(dims, key=lambda dim: strides[dim])
    row = span - (sizes[outer] - 1) * strides[outer]
    rows = 1 if scattered or row > WINDOW else (WINDOW - row) // strides[outer] + 1
    done = 0
    for first in range(0, sizes[outer], rows):
        some = sizes.copy()
        some[outer] = min(rows, sizes[outer] - first)
        part = target.narrow(outer, first, some[outer])
        done += read_box(file, path, start + first * strides[outer], some, strides, dtype, part)
    return done


def _run(sizes: list[int], strides: list[int], size: int) -> int:
    """Returns how many consecutive bytes the runs of a box have."""
    for stride, n in sorted((stride, n) for stride, n in zip(strides, sizes, strict=True) if n > 1):
        if stride != size:
            break
        size *= n
    return size


def write_box(file: int, start: int, strides: list[int], source: Tensor) -> None:
    """Writes the elements of ``source`` where its first one belongs at byte ``start`` of the file.

    Raises:
        OSError: the system refuses
    """
    sizes = list(source.shape)
    dims = [dim for dim, n in enumerate(sizes) if n > 1]
    packed = contiguous_strides(sizes, source.element_size())
    if all(strides[dim] == packed[dim] for dim in dims) and (source.nbytes <= WINDOW or _is_packed(source)):
        memory = source if _is_packed(source) else source.detach().cpu().resolve_conj().resolve_neg().contiguous()
        buffer = memoryview(_bytes_of(memory))
        done = 0
        while done < len(buffer):
            done += os.pwrite(file, buffer[done:], start + done)
        return
    outer = max(dims, key=lambda dim: strides[dim])
    row = source.nbytes // sizes[outer]
    is_whole = strides[outer] == packed[outer]
    rows = max(1, WINDOW // max(row, 1)) if is_whole else 1
    for first in range(0, sizes[outer], rows):
        part = source.narrow(outer, first, min(rows, sizes[outer] - first))
        write_box(file, start + first * strides[outer], strides, part)


def _is_packed(source: Tensor) -> bool:
    return takes_bytes(source, source.dtype) and source.is_contiguous()


def _inflated(decompressor: Any, data: bytes, length: int) -> bytes:
    """Decompresses ``data``, with memory for ``length`` bytes.

    Raises:
        ValueError: it has another length
        zlib.error, OSError: it is damaged
    """
    content: bytes = decompressor.decompress(data, length + 1)
    if len(content) != length or not decompressor.eof or decompressor.unused_data:
        raise ValueError("it does not hold exactly that")
    return content


def _zstd_length(data: bytes) -> int:
    """Returns what the header of a Zstandard frame says about the length of its content; -1 if it says nothing."""
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        return -1
    flags = data[4]
    single = bool(flags & 0x20)
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    width = (1 if single else 0, 2, 4, 8)[flags >> 6]
    return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0) if width else -1


#: The compressors that the standard library decodes, with a bound on what it returns.
INFLATE: dict[str, Callable[[], Any]] = {
    "zlib": zlib.decompressobj,
    "gzip": lambda: zlib.decompressobj(31),
    "bz2": bz2.BZ2Decompressor,
}
#: Those that a package decodes, which allocates what the head of the data announces: each with what reads that.
ANNOUNCED: dict[str, Callable[[bytes], int]] = {
    "blosc": lambda data: int.from_bytes(data[4:8], "little") if len(data) >= 16 else -1,
    "zstd": _zstd_length,
}


def decompressed(array: ZarrArray, chunk: Sequence[int]) -> Tensor:
    """Returns a compressed chunk as a tensor of the chunk's shape.

    Raises:
        CheckpointingException: it cannot be read, is not what the metadata says, or the package that decodes it is not
            installed
        SystemRefused: this process cannot have memory for all of it
    """
    assert array.compressor is not None
    path, kind, length = array.chunk_path(chunk), array.compressor["id"], array.chunk_bytes
    # As it is decoded, and as a tensor.
    _check_machine_has(2 * length, f"a chunk of {array.path} and its copy")
    try:
        # Compressors lengthen what they cannot compress, but not by much.
        data = read_whole(path, length + length // 8 + (1 << 16))
        if kind in INFLATE:
            content = _inflated(INFLATE[kind](), data, length)
        else:
            announced = ANNOUNCED[kind](data)
            if announced != length:
                raise ValueError(f"it announces {announced if announced >= 0 else 'an unknown number of'} bytes")
            content = _by_package(array, chunk, data)
        if len(content) != length:
            raise ValueError(f"it holds {len(content)} bytes")
    except SystemRefused:  # The file is as it should be.
        raise
    except (ValueError, EOFError, OSError, RuntimeError, zlib.error) as e:
        raise CheckpointingException(
            f"{path} is damaged: {length} bytes compressed with {kind} are expected in it, and {e}. Restore the file, "
            "or load another checkpoint"
        ) from e
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return view_as(flat, array.dtype, list(array.chunks), array.strides())


def _by_package(array: ZarrArray, chunk: Sequence[int], data: bytes) -> Any:
    """Returns the content of a chunk; ``numcodecs``, which ``zarr`` is built on, decodes it, or else ``tensorstore``.

    Raises:
        CheckpointingException: neither of them is installed
        ValueError: the data is damaged
        RuntimeError: the same, from a package
    """
    assert array.compressor is not None
    try:
        from numcodecs import get_codec
    except ImportError:
        pass
    else:
        return bytes(get_codec({"id": array.compressor["id"]}).decode(data))
    try:
        import numpy as np
        import tensorstore
    except ImportError:
        raise CheckpointingException(
            f"{array.path} is compressed with {array.compressor['id']}, which needs a package: "
            "pip install 'tensorferry[megatron-zarr]'"
        ) from None
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(array.path)}}
    low = [i * c for i, c in zip(chunk, array.chunks, strict=True)]
    high = [min(a + c, n) for a, c, n in zip(low, array.chunks, array.shape, strict=True)]
    inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    whole = np.zeros(array.chunks, tensorstore.open(spec, read=True).result().dtype.numpy_dtype)
    whole[tuple(slice(0, s.stop - s.start) for s in inside)] = tensorstore.open(spec).result()[inside].read().result()
    return whole.tobytes(order="F" if array.order == "F" else "C")
