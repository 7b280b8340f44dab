"""Small files are written whole, or what was there stays."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

import pytest

from tensorferry.dcp import marker
from tensorferry.errors import ProtocolError, SystemRefused
from tensorferry.storage.whole_files import FEW, create_folder, read_whole, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path) -> None:
    path, partial = tmp_path / "file", tmp_path / "file.partial"
    partial.write_bytes(b"left by a killed process, and longer than what comes")
    for data in (b"first", b""):
        write_whole(path, data, partial, modified_ns=5_000_000_000)
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == 5_000_000_000
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_read_up_to_a_length_and_not_one_byte_of_a_longer_one(tmp_path) -> None:
    path = tmp_path / "metadata.json"
    path.write_bytes(b"{}")
    assert read_whole(path, 2) == read_whole(path, None) == b"{}"
    with pytest.raises(ProtocolError, match=r"metadata.json has 2 bytes, and such a file has at most 1"):
        read_whole(path, 1)
    # Sparse: it takes nothing on the disk.
    os.truncate(path, 2 << 30)
    with pytest.raises(ProtocolError, match="such a file has at most 1048576"):
        read_whole(path, FEW)
    os.truncate(path, 1 << 42)
    with pytest.raises(SystemRefused, match=r"metadata.json has 4398046511104 bytes, and"):
        read_whole(path, None)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "gone", FEW)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProtocolError, match="is not a regular file"):
        read_whole(tmp_path / "pipe", FEW)


@pytest.mark.parametrize("read", [lambda path: read_whole(path, FEW), marker.is_marker])
def test_a_folder_in_the_place_of_a_file_costs_no_descriptor(read, tmp_path) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with contextlib.suppress(IsADirectoryError):
            assert not read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_that_cannot_be_synchronised(tmp_path, monkeypatch) -> None:
    """Where the system cannot sync folders at all, there is nothing to be done; what else fails is named."""
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    number = errno.EINVAL
    assert create_folder(tmp_path / "a" / "b")
    number = errno.ENOSPC
    with pytest.raises(SystemRefused, match=r"the folder .*/c/d cannot be synchronised: No space left") as caught:
        create_folder(tmp_path / "c" / "d")
    assert caught.value.errno == errno.ENOSPC
