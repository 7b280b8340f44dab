"""The file by which tools that look for torch's checkpoints find those of ``FileWriter``."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import tensorferry
from states import loaded, save
from tensorferry.dcp import FileWriter, marker

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
SAYS = "This folder holds a checkpoint of tensorferry, not one of torch's: load it with tensorferry.dcp.FileReader"


def test_torchs_reader_says_what_the_folder_is(tmp_path):
    save(tmp_path, 1)
    assert marker.is_marker(tmp_path / ".metadata")
    with pytest.raises(ValueError, match=SAYS):
        dcp.FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(dcp.CheckpointException, match=SAYS):
        loaded(None, dcp.FileSystemReader(tmp_path))
    with (tmp_path / ".metadata").open("rb") as file, pytest.raises(ValueError, match=SAYS):
        pickle._Unpickler(file).load()
    assert loaded(tmp_path) == 1


def test_a_folder_whose_index_was_removed_is_incomplete_and_can_be_saved_into(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "index.safetensors").unlink()
    with pytest.raises(dcp.CheckpointException, match=r"index\.safetensors was removed"):
        loaded(tmp_path)

    class Failing(FileWriter):
        def write_data(self, *_):
            raise RuntimeError("killed")

    with pytest.raises(dcp.CheckpointException):
        save(tmp_path, 2, Failing(tmp_path))
    assert not (tmp_path / ".metadata").exists(), "an incomplete folder must not look like a checkpoint"
    save(tmp_path, 3, FileWriter(tmp_path, overwrite=False))
    assert marker.is_marker(tmp_path / ".metadata")
    assert loaded(tmp_path) == 3


class Killed(BaseException):
    """Not an Exception, so that nothing is tidied up."""


@pytest.mark.parametrize("before", ["nothing", "torch's", "ours"])
def test_a_save_that_is_killed_anywhere_leaves_a_checkpoint_that_is_found_and_whole(before, tmp_path, monkeypatch):
    """Ends the save before its first, second, ... call that changes the folder, until a save needs no more calls."""
    steps = 0
    while True:
        folder = tmp_path / str(steps)
        if before != "nothing":
            save(folder, 1, (dcp.FileSystemWriter if before == "torch's" else FileWriter)(folder))
        left = steps

        def counted(real):
            def call(*arguments, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as killing:
            killing.setattr(Path, "replace", counted(Path.replace))
            killing.setattr(Path, "unlink", counted(Path.unlink))
            killing.setattr(os, "fsync", counted(os.fsync))
            killing.setattr(os, "utime", counted(os.utime))
            try:
                save(folder, 2)
            except Killed:
                ended = False
            except dcp.CheckpointException as e:
                assert isinstance(e.failures[0][0], Killed), e  # noqa: PT017
                ended = False
            else:
                ended = True
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if ".metadata" in names:
            if marker.is_marker(folder / ".metadata"):
                assert "index.safetensors" in names
            else:
                assert loaded(None, dcp.FileSystemReader(folder)) == 1, (
                    "torch's checkpoint is whole until it is replaced"
                )
        elif before != "nothing":
            pytest.fail("the folder no longer looks like a checkpoint")
        if "index.safetensors" in names:
            assert loaded(folder) == 2 if before != "ours" else loaded(folder) in (1, 2)
        for path in names:
            os.utime(folder / path, (1, 1)) if path.endswith(".partial") or path.startswith("rank") else None
        if steps:
            save(folder, 3)
            assert loaded(folder) == 3
            assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == [
                ".metadata",
                "index.safetensors",
                "rank00000",
            ]
        if ended:
            break
        steps += 1
    assert steps >= (1 if before == "ours" else 4)


def test_a_marker_that_cannot_be_written_is_an_error_and_the_checkpoint_is_there(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as full:
        full.setattr(marker.os, "utime", refuse)
        with pytest.raises(dcp.CheckpointException, match=r"tools look for \.metadata") as caught:
            save(tmp_path, 1)
    assert isinstance(caught.value.failures[0][0], tensorferry.errors.SystemRefused)
    assert loaded(tmp_path) == 1
    assert not list(tmp_path.glob(".metadata*"))
    save(tmp_path, 2)
    assert marker.is_marker(tmp_path / ".metadata")
