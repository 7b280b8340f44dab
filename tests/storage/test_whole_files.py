"""Small files are written whole, or what was there stays."""

from __future__ import annotations

import pytest

from tensorferry.storage.whole_files import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path) -> None:
    path, partial = tmp_path / "file", tmp_path / "file.partial"
    partial.write_bytes(b"left by a killed process, and longer than what comes")
    for data in (b"first", b""):
        write_whole(path, data, partial, modified_ns=5_000_000_000)
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == 5_000_000_000
        assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "file"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="file"):
        write_whole(path, b"data", tmp_path / "file.partial")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone" / "file", b"data", tmp_path / "gone" / "file.partial")
