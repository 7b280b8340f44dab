"""``bench --save``: checkpoints measured on a disk of the user's, of which nothing stays."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.cli import disk_rates, exits
from tensorferry.errors import InvalidArgument, SystemRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.beyond_torchft, pytest.mark.process]

KINDS = [
    "AsyncCheckpointer",
    "dcp.async_save of torch",
    "dcp.save, FileWriter",
    "dcp.save of torch",
    "torch.save, fsync",
]


def test_every_kind_is_measured_and_nothing_stays(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("bench", "--save", tmp_path, "--size", "1M", "--rounds", "1", "--json")
    assert done.status == exits.OK, done.err
    result = json.loads(done.out)
    assert [one["kind"] for one in result["saves"]] == KINDS
    for one in result["saves"]:
        on_disk = one["on_disk_seconds"]
        assert 0 < one["stands_still_seconds"] <= on_disk["median"]
        assert on_disk["least"] <= on_disk["median"] <= on_disk["most"]
        assert one["load_seconds"] > 0
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_leaves_nothing(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: int) -> None:
        path.mkdir()
        (path / "begun").touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(disk_rates, "_torch_writer", full)
    done = run("bench", "--save", tmp_path, "--size", "1M", "--rounds", "1")
    assert done.status == exits.STATUS[SystemRefused]
    assert "No space left" in done.err
    assert os.listdir(tmp_path) == []


def test_the_folder_must_be_there(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("bench", "--save", tmp_path / "none", "--size", "1M")
    assert done.status == exits.STATUS[InvalidArgument]
    assert "is not a folder" in done.err
    assert not (tmp_path / "none").exists()
