"""Archives of ``torch.save`` that hold more than their files: nothing of them is unpacked."""

from __future__ import annotations

import ctypes
import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from hostile_pickles import torch_archive
from tensorferry.cli import states
from tensorferry.errors import ProtocolError
from tensorferry.pickles.allowlist import Allowed
from tensorferry.pickles.torch_archives import SavedTensor, load_file, unpickled

MIB = 1 << 20
#: Other versions of torch have to read a record to know its length: there, the archive's directory is asked.
KNOWS_LENGTHS = hasattr(torch._C.PyTorchFileReader, "get_record_size")
STATE = {"w": torch.arange(64, dtype=torch.float32)}


def overlapping(count: int) -> bytes:
    """Returns an archive in which ``count`` names stand for the bytes of one record."""
    whole = torch_archive(state=STATE)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        names = archive.namelist()
        directory = archive.start_dir
    central, at = [], directory
    while whole[at : at + 4] == b"PK\x01\x02":
        name, extra, comment = struct.unpack_from("<HHH", whole, at + 28)
        length = 46 + name + extra + comment
        central.append(whole[at : at + length])
        at += length
    one = central[next(i for i, name in enumerate(names) if name.endswith("data/0"))]
    more = [one.replace(b"data/0", f"data/{chr(65 + n)}".encode()) for n in range(count)]
    table = b"".join([*central, *more])
    tail = struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(central + more), len(central + more), len(table), directory, 0
    )
    return whole[:directory] + table + tail


def test_a_pickle_that_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    bomb = torch_archive(b"\x80\x02](" + b"]" * (8 * MIB) + b"e.", STATE, zipfile.ZIP_DEFLATED)
    assert len(bomb) < MIB // 8
    path = tmp_path / "bomb.pt"
    path.write_bytes(bomb)
    lengths = r"its records have \d+ bytes and the file \d+: they are compressed"
    with pytest.raises(ProtocolError, match=lengths if KNOWS_LENGTHS else r"data\.pkl is compressed"):
        load_file(path, Allowed())
    with pytest.raises(ProtocolError, match="they are compressed" if KNOWS_LENGTHS else r"data\.pkl is compressed"):
        unpickled(bomb, "an object", Allowed())
    with pytest.raises(ProtocolError, match="is compressed"):
        states.state_of_archive(path)


def test_records_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "overlapping.pt"
    path.write_bytes(overlapping(20))
    with pytest.raises(ProtocolError, match="its records have" if KNOWS_LENGTHS else "its records are longer"):
        load_file(path, Allowed())
    with pytest.raises(ProtocolError, match="its records are longer than the file"):
        states.state_of_archive(path)


def test_pages_of_a_compressed_record_are_not_taken_for_a_tensor(tmp_path: Path) -> None:
    """Its bytes may be as many as those of the tensor, and are others."""
    path = tmp_path / "random.pt"
    noise = {"w": torch.randint(0, 256, (100_000,), dtype=torch.uint8)}
    torch.save(noise, path)
    with zipfile.ZipFile(path) as old:
        records = {record.filename: old.read(record) for record in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in records.items():
            new.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED)
    with pytest.raises(ProtocolError, match="is compressed"):
        states.state_of_archive(path)


def test_what_another_tool_has_packed_without_compression_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stored.pt"
    path.write_bytes(torch_archive(state=STATE))
    assert torch.equal(load_file(path, Allowed())["w"], STATE["w"])
    assert torch.equal(states.state_of_archive(path)["w"], STATE["w"])


def test_a_tensor_saved_in_parts_is_copied_from_wherever_a_copy_begins() -> None:
    saved = SavedTensor(torch.arange(1 << 20, dtype=torch.uint8))

    def copied(begin: int, end: int) -> bytes:
        target = (ctypes.c_char * (end - begin))()
        for source, to, nbytes in saved.copies(begin, end, ctypes.addressof(target)):
            ctypes.memmove(to, source, nbytes)
        return target.raw

    whole = copied(0, saved.nbytes)
    assert torch.equal(torch.load(io.BytesIO(whole)), torch.arange(1 << 20, dtype=torch.uint8))
    for begin in (0, 1, 1000, saved.nbytes // 2):
        assert copied(begin, begin + 900) == whole[begin : begin + 900]
