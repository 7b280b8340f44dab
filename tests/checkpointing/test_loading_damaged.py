"""``load`` of what is damaged, incomplete or of another save, and of what changes meanwhile."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch

from checkpoint_loads import load_state, rank_file, save_state
from equality import assert_same_state
from tensorferry.checkpointing import (
    SyncCheckpointer,
    latest,
    latest_checkpoint,
    loading,
)
from tensorferry.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    SystemRefused,
    TensorferryError,
)
from tensorferry.storage.folder import INDEX

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
MIB = 1 << 20


def test_no_flipped_byte_goes_unnoticed(tmp_path):
    state = {"w": torch.arange(600.0), "v": torch.arange(40)[::2], "n": {"lr": 0.5}}
    save_state(tmp_path / "c", state)
    for file in (rank_file(tmp_path / "c"), tmp_path / "c" / INDEX):
        data = file.read_bytes()
        for at in range(0, len(data), 97):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            try:
                loaded = load_state(tmp_path / "c")
            except TensorferryError:
                continue
            # Only bytes that nothing describes, such as padding.
            assert_same_state(loaded, state)
        for length in (0, 7, 100, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:length])
            with pytest.raises(TensorferryError):
                load_state(tmp_path / "c")
        file.write_bytes(data)
    assert_same_state(load_state(tmp_path / "c"), state)


def test_incomplete_and_foreign_folders_are_refused(tmp_path):
    with pytest.raises(IncompleteCheckpoint):
        load_state(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "empty")
    one = save_state(tmp_path / "one", {"w": torch.ones(3)})
    two = save_state(tmp_path / "two", {"w": torch.zeros(3)})
    # The index of another checkpoint, and the file of another one under this name.
    shutil.copy(two / INDEX, tmp_path / "index")
    shutil.copy(one / INDEX, two / INDEX)
    with pytest.raises(IncompleteCheckpoint, match="is missing"):
        load_state(two)
    shutil.copy(tmp_path / "index", two / INDEX)
    name = rank_file(two)
    name.unlink()
    name.symlink_to(rank_file(one))
    with pytest.raises(CorruptCheckpoint, match="another one"):
        load_state(two)
    name.unlink()
    os.mkfifo(name)
    with pytest.raises(IncompleteCheckpoint):
        load_state(two)
    (tmp_path / "dcp").mkdir()
    shutil.copy(rank_file(one), tmp_path / "dcp" / INDEX)
    with pytest.raises(ProtocolError):
        load_state(tmp_path / "dcp")


def test_the_latest_complete_checkpoint_is_found(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 10, 9):
        save_state(tmp_path / f"step-{step}", {"w": torch.tensor(step)})
    os.utime(tmp_path / "step-1" / INDEX, (2e9, 2e9))
    os.utime(tmp_path / "step-1", (2e9, 2e9))
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-9")
    file = rank_file(tmp_path / "step-9")
    file.unlink()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-10")
    file.symlink_to("gone")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-10")
    (tmp_path / "step-10" / INDEX).write_bytes(b"x" * 100)
    (tmp_path / "step-11").mkdir()
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-1")


@pytest.mark.parametrize("call", ["stat", "listdir"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_root_of_which_the_system_does_not_say_what_it_is_is_not_one_without_checkpoints(
    call, code, tmp_path, monkeypatch
):
    """A job that goes on from ``None`` begins anew, and its saves remove the checkpoint that was there."""
    save_state(tmp_path / "run" / "step-1", {"w": torch.tensor(1)})
    real = getattr(os, call)

    def broken(path=".", *args, **options):
        if not isinstance(path, int) and os.fspath(path) == str(tmp_path / "run"):
            raise OSError(code, os.strerror(code))
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, broken)
        with pytest.raises(SystemRefused, match=os.strerror(code)):
            latest_checkpoint(tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "step-1")
    (tmp_path / "file").write_text("")
    for nothing in ("none", "file/none"):
        assert latest_checkpoint(tmp_path / nothing) is None
    with pytest.raises(InvalidArgument, match="file is a file: give the folder"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(InvalidArgument, match="step-1 is a checkpoint itself: give the folder above"):
        latest_checkpoint(tmp_path / "run" / "step-1")


DAMAGE = {
    "empty": lambda index: index.write_bytes(b""),
    "cut": lambda index: index.write_bytes(index.read_bytes()[:100]),
    "flipped": lambda index: index.write_bytes(index.read_bytes().replace(b'"began"', b'"begun"')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_with_a_damaged_index_is_passed_over_with_a_warning_and_is_never_none(damage, tmp_path, caplog):
    for step in (1, 2, 3):
        save_state(tmp_path / f"step-{step}", {"w": torch.tensor(step)})
    for step in (3, 2):
        DAMAGE[damage](tmp_path / f"step-{step}" / INDEX)
        caplog.clear()
        assert latest_checkpoint(tmp_path) == str(tmp_path / f"step-{step - 1}")
        [line] = [record.getMessage() for record in caplog.records]
        assert all((f"step-{passed}" in line) == (passed >= step) for passed in (1, 2, 3)), line
    DAMAGE[damage](tmp_path / "step-1" / INDEX)
    with pytest.raises(CorruptCheckpoint, match=f"{tmp_path}/step-.*there is no other checkpoint"):
        latest_checkpoint(tmp_path)
    save_state(tmp_path / "step-1", {"w": torch.tensor(4)})
    assert "so its files are not removed" in caplog.text
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-1")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_damaged_index_that_is_removed_or_replaced_meanwhile_is_no_error(is_replaced, tmp_path, monkeypatch):
    index = save_state(tmp_path / "step-1", {"w": torch.tensor(1)}) / INDEX
    whole = index.read_bytes()
    index.write_bytes(b"")
    real = latest.read_index

    def interrupted(folder):
        try:
            return real(folder)
        finally:
            index.unlink(missing_ok=True)
            if is_replaced:
                index.write_bytes(whole)
                os.utime(index, ns=(1, 1))

    monkeypatch.setattr(latest, "read_index", interrupted)
    assert latest_checkpoint(tmp_path) == (str(tmp_path / "step-1") if is_replaced else None)


@pytest.mark.parametrize("moment", ["read_index", "missing_files"])
@pytest.mark.parametrize("name", ["step-1", "step-2"])
def test_the_latest_is_found_while_a_save_replaces_it(name, moment, tmp_path, monkeypatch):
    SyncCheckpointer().save(tmp_path / "step-1", {"w": torch.tensor(1)}, step=1)
    real, calls = getattr(latest, moment), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            SyncCheckpointer(keep_last=1).save(tmp_path / name, {"w": torch.tensor(2)}, step=int(name[-1]))
        return real(*args)

    monkeypatch.setattr(latest, moment, interrupted)
    assert latest_checkpoint(tmp_path) == str(tmp_path / name)
    assert len(calls) > 1


@pytest.mark.parametrize("kept", [0, 1])
def test_a_checkpoint_that_is_removed_while_it_is_loaded_is_incomplete(kept, tmp_path, monkeypatch):
    save_state(tmp_path / "a", {"w": torch.ones(3)})
    real = loading.Stored.open

    class Removing:
        @staticmethod
        def open(*args, **kwargs):
            for file in [tmp_path / "a" / INDEX, rank_file(tmp_path / "a")][kept:]:
                file.unlink()
            return real(*args, **kwargs)

    monkeypatch.setattr(loading, "Stored", Removing)
    with pytest.raises(IncompleteCheckpoint, match="while it was read"):
        load_state(tmp_path / "a")
