"""Converts checkpoints of Megatron from one format into another, without a job: as a function and as a command.

    python -m tensorferry.megatron.convert SOURCE OUTPUT [--to torch_dist]

It reads folders of the backends ``zarr``, ``torch_dist`` and ``tensorferry``, and writes the last two. Data passes
through a window of memory. The output appears when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _validate
from ..dcp import marker
from ..errors import InvalidArgument, TensorferryError
from ..memory.tensors import scratch
from ..pickles.allowlist import Allowed
from ..storage.boxes import Box
from ..storage.copies import download_folder, scratch_folder, upload_folder
from ..storage.folder import INDEX
from ..storage.objects.place import ObjectPlace
from ..storage.pending import pending
from ..storage.places import AnyPlace, begun, place_as_given
from . import common
from .formats.convert_outputs import OUTPUTS
from .formats.convert_sources import ZARR, ConversionSource, FerrySource, ZarrSource
from .formats.convert_torch_dist import TorchDistSource
from .release import CheckpointingException
from .zarr import thread_count

_MIB = 1 << 20
#: Bytes of memory for the data on its way, unless the caller says otherwise.
WINDOW = 512 * _MIB
#: The sources by the backend that ``metadata.json`` names.
_SOURCES: dict[str, Any] = {ZARR: ZarrSource, "torch_dist": TorchDistSource, "tensorferry": FerrySource}


class Converted(NamedTuple):
    """What a conversion has done.

    Attributes:
        tensors: how many tensors were converted
        objects: how many objects
        bytes: the bytes of the tensors
    """

    tensors: int
    objects: int
    bytes: int


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = "tensorferry",
    window: int = WINDOW,
    threads: int | None = None,
    fill_missing: bool = False,
    safe_globals: Iterable[Any] = (),
    trust_pickle: bool = False,
) -> Converted:
    """Converts the checkpoint in the folder ``source`` into a new folder ``output``.

    Tensors keep their keys, shapes and dtypes; objects and the common state keep their values. One process converts; it
    needs no process group. Missing folders above ``output`` are made. While ``output`` is written, it has the name
    ``.OUTPUT.<id>.partial``. What a killed conversion has left is removed by the next one into the same output.

    In an object store, the output is first written into a folder for temporary files, and then copied to a place where
    nothing is, the index last. Of a source there, ``torch_dist`` is copied to such a folder first, ``tensorferry`` is
    read where it is, and ``zarr`` has to be copied by other means.

    Args:
        source: a checkpoint of backend ``zarr``, ``torch_dist`` or ``tensorferry``: a folder, or the URL of a place in
            an object store
        output: a folder that does not exist, or is empty; or the URL of a place in an object store where nothing is
        to: the backend of the output: ``"tensorferry"`` or ``"torch_dist"``
        window: bytes of memory for tensors on their way, about; no file of the output has more of them. All objects are
            in one file
        threads: threads that read; ``None`` chooses by the number of cores
        fill_missing: take chunks of Zarr arrays that are missing for the fill value of their array, where it has one,
            as the ``zarr`` package does. Megatron wrote all chunks, and gave no fill values
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: read pickles without limits: whoever can write to ``source`` can then run code here

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        CheckpointingException: ``source`` is incomplete, damaged or of another format, ``output`` exists, or the system
            refuses
    """
    if to not in OUTPUTS:
        raise InvalidArgument(f"to must be one of {', '.join(OUTPUTS)}, not {_validate.brief(to)}")
    window = _validate.integer("window", window, _MIB)
    threads = thread_count(threads)
    allowed = Allowed(safe_globals, trust_pickle)
    origin, target = begun(place_as_given(source, "source")), begun(place_as_given(output, "output"))
    try:
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(_opened(origin, allowed, fill_missing))
            folder = stack.enter_context(_output(target))
            done = _copy(opened, folder, to, window, threads)
            common.mark(folder, to, 1)
    except CheckpointingException:
        raise
    except InvalidArgument as e:
        # Of the output: it exists, or somebody else writes it.
        raise CheckpointingException(str(e)) from e
    except (TensorferryError, OSError) as e:
        raise CheckpointingException(f"{source} cannot be converted into {output}: {e}") from e
    return done


@contextlib.contextmanager
def _output(target: AnyPlace) -> Iterator[Path]:
    """Yields a folder to write to, which is given its name, or copied to a store, once the block has ended."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with pending(target, folder=True) as folder:
            yield folder
        return
    assert isinstance(target, ObjectPlace)
    with scratch_folder(target, file=False) as written:
        yield written
        names = sorted(os.listdir(written), key=lambda name: (name in (INDEX, marker.NAME), name))
        upload_folder(written, target.begun(), names)


@contextlib.contextmanager
def _opened(place: AnyPlace, allowed: Allowed, fill_missing: bool) -> Iterator[ConversionSource]:
    """Yields a checkpoint as a source; one that is read from a folder only is copied to one."""
    with contextlib.ExitStack() as stack:
        if isinstance(place, ObjectPlace) and common.config(place).sharded_backend != "tensorferry":
            if below := place.folders():
                raise CheckpointingException(
                    f"{place} has folders in it ({below[0]}), as checkpoints of zarr: copy it to a folder to convert it"
                )
            copied = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorferry-")))
            download_folder(place, copied, sorted(place.entries()))
            place = copied
        yield stack.enter_context(_open(place, allowed, fill_missing))


def _open(folder: AnyPlace, allowed: Allowed, fill_missing: bool) -> ConversionSource:
    """Opens a checkpoint as a source of the backend that its ``metadata.json`` names."""
    config = common.config(folder)
    kind = _SOURCES.get(config.sharded_backend)
    if kind is None or config.sharded_backend_version != 1:
        raise CheckpointingException(
            f"{folder} is of backend {config.sharded_backend!r}, version {config.sharded_backend_version!r}: "
            f"checkpoints of version 1 of {', '.join(_SOURCES)} can be converted"
        )
    opened: ConversionSource = (
        kind(folder, allowed, fill_missing) if config.sharded_backend == ZARR else kind(folder, allowed)
    )
    return opened


def _copy(source: ConversionSource, folder: Path, to: str, window: int, threads: int) -> Converted:
    """Copies everything from ``source`` into ``folder``; one half of the window is read while the other is written."""
    output = OUTPUTS[to](folder)
    tensors = total = 0
    for tensor in source.tensors():
        output.add_tensor(tensor.key, tensor.dtype, tensor.shape)
        tensors += 1
    names = source.objects()
    with ThreadPoolExecutor(threads, "tensorferry-convert") as readers, ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for batch in _batches(source, window // 2):
            filled = [(key, box, _room(box, dtype)) for key, box, dtype, _ in batch]
            reads = [
                readers.submit(source.read, key, number, box, memory)
                for (key, box, _, number), (_, _, memory) in zip(batch, filled, strict=True)
            ]
            for read in reads:
                read.result()
            total += sum(memory.nbytes for _, _, memory in filled)
            if writing is not None:
                writing.result()
            writing = writer.submit(output.write, filled)
            del filled, reads
        if writing is not None:
            writing.result()
    output.write_objects((name, source.value(name)) for name in names)
    shared = source.common()
    if shared is not None:
        common.write(folder, shared)
    output.finish(shared)
    return Converted(tensors, len(names), total)


def _room(box: Box, dtype: torch.dtype) -> torch.Tensor:
    return scratch(box.numel * dtype.itemsize).view(dtype).view(box.sizes)


def _batches(source: ConversionSource, most: int) -> Iterator[list[tuple[str, Box, torch.dtype, int]]]:
    """Yields what is read at a time: key, box, dtype and number of the stored chunk that the box is in."""
    batch: list[tuple[str, Box, torch.dtype, int]] = []
    held = 0
    for tensor in source.tensors():
        for number, chunk in enumerate(tensor.chunks):
            for box in split(chunk, tensor.dtype.itemsize, most):
                nbytes = box.numel * tensor.dtype.itemsize
                if batch and held + nbytes > most:
                    yield batch
                    batch, held = [], 0
                batch.append((tensor.key, box, tensor.dtype, number))
                held += nbytes
    if batch:
        yield batch


def split(box: Box, size: int, most: int) -> Iterator[Box]:
    """Splits a box, by its first dimensions, into boxes of at most ``most`` bytes, with elements of ``size`` bytes."""
    dim = next((dim for dim, n in enumerate(box.sizes) if n > 1), None)
    if dim is None or box.numel * size <= most:
        yield box
        return
    row = box.numel // box.sizes[dim] * size
    rows = max(1, most // row)
    for first in range(0, box.sizes[dim], rows):
        count = min(rows, box.sizes[dim] - first)
        part = Box(
            (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], count, *box.sizes[dim + 1 :]),
        )
        if row > most:
            yield from split(part, size, most)
        else:
            yield part


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorferry.megatron.convert",
        description="Converts a checkpoint of Megatron, of zarr, torch_dist or tensorferry, to one of the last two.",
    )
    parser.add_argument("source", help="the folder of the checkpoint, or its URL in an object store")
    parser.add_argument("output", help="a new folder, or the URL of a place in a store")
    parser.add_argument("--to", choices=sorted(OUTPUTS), default="tensorferry", help="the format of the output")
    parser.add_argument("--window", type=int, default=WINDOW // _MIB, metavar="MIB", help="memory for data, in MiB")
    parser.add_argument("--threads", type=int, default=None, help="threads that read")
    parser.add_argument(
        "--fill-missing", action="store_true", help="missing chunks of Zarr arrays have the fill value, if there is one"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read pickles without limits: whoever can write to the source can then run code here",
    )
    given = parser.parse_args(arguments)
    try:
        done = convert(
            given.source,
            given.output,
            to=given.to,
            window=given.window * _MIB,
            threads=given.threads,
            fill_missing=given.fill_missing,
            trust_pickle=given.trust_pickle,
        )
    except (CheckpointingException, InvalidArgument) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{given.output}: {done.tensors} tensors of {done.bytes} bytes and {done.objects} objects, as {given.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
