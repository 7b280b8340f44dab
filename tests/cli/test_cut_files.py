"""Files that are cut off while a verb reads them: a short read is never taken for the end of what was to be read."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import write_archive
from tensorferry._native import Stored
from tensorferry.errors import CorruptCheckpoint, ProtocolError
from tensorferry.storage import whole_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft


@pytest.mark.parametrize("verb", ["verify", "convert"])
def test_an_archive(verb: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    write_archive({str(i): torch.full((1 << 18,), float(i)) for i in range(4)}, path)
    compare = zipfile.ZipFile.testzip

    def cut(archive: zipfile.ZipFile) -> str | None:
        os.truncate(path, path.stat().st_size // 3)
        return compare(archive)

    monkeypatch.setattr(zipfile.ZipFile, "testzip", cut)
    done = run(verb, path, *([tmp_path / "b", "--to", "tensorferry"] if verb == "convert" else []))
    assert (done.status, f"{path} is damaged: it was cut off" in done.out + done.err) == (4, True), done
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_container(forms: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(forms["file"].read_bytes())
    stored = Stored.open(path)
    os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(CorruptCheckpoint, match=r"a\.safetensors: corrupt: it was cut off while it was read"):
        stored.fetch()


def test_a_file_that_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "common.pt"
    path.write_bytes(bytes(1000))
    # Between the look at its length and the read.
    monkeypatch.setattr(whole_files, "_check_machine_has", lambda *_: os.truncate(path, 100))
    with pytest.raises(ProtocolError, match="was cut off while it was read"):
        whole_files.read_whole(path, None)
