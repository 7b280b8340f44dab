"""A full disk: what killed saves have left makes room, and a save that fails leaves no empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from child import run_forked

pytestmark = [pytest.mark.beyond_torchft, pytest.mark.timeout(300)]

#: Mounts a small file system in a mount namespace of its own, or exits with 77; then what the scripts share.
SMALL_DISK = """
import ctypes, errno, fcntl, os, secrets, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
libc = ctypes.CDLL(None, use_errno=True)
root = Path(sys.argv[1])
for status in (
    libc.unshare(0x00020000),
    libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None),
    libc.mount(b"tmpfs", os.fsencode(root), b"tmpfs", 0, b"size=4m"),
):
    if status:
        sys.exit(77)

import torch
import torch.distributed.checkpoint as dcp
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import SystemRefused
from tensorferry.storage import names

MIB = 1 << 20
state = {"w": torch.arange(2 * MIB, dtype=torch.uint8)}
huge = {"w": torch.arange(8 * MIB, dtype=torch.uint8)}

def leave(folder, nbytes=3 * MIB, age=3600, suffix=".partial"):
    "Leaves what a killed save of this machine has written."
    folder.mkdir(exist_ok=True)
    path = folder / f"rank00000-{names.machine()}{secrets.token_hex(6)}.safetensors{suffix}"
    path.write_bytes(bytes(nbytes))
    os.utime(path, (time.time() - age,) * 2)
    return path

def sync(folder, state, **options):
    SyncCheckpointer(**options).save(folder, state)

def in_background(folder, state, **options):
    with_writer = AsyncCheckpointer(**options)
    try:
        with_writer.save(folder, state)[1].result()
    finally:
        with_writer.close()

def distributed(folder, state):
    with own_errors():
        dcp.save(state, storage_writer=FileWriter(folder), no_dist=True)

def refused(save, *arguments, **options):
    try:
        save(*arguments, **options)
    except SystemRefused as e:
        assert "No space left on device" in str(e), e
        return str(e)
    raise AssertionError("the disk is full")

def loaded(save, folder):
    if save is distributed:
        found = {"w": torch.zeros(2 * MIB, dtype=torch.uint8)}
        dcp.load(found, storage_reader=FileReader(folder), no_dist=True)
        return found["w"]
    return SyncCheckpointer().load(folder)["w"]

save = {"sync": sync, "async": in_background, "dcp": distributed}[sys.argv[2]]
run = root / "run"
"""

IN_ITS_FOLDER = """
dead = leave(run)
text = refused(save, run, state)
assert f"{3 * MIB} bytes that killed saves had left were removed: save again" in text, text
assert not dead.exists()
save(run, state)
assert torch.equal(loaded(save, run), state["w"])
"""

ALIVE = """
# One whose writer may be about to lock it, one that its writer has locked, and a file that is none of ours.
new, locked, foreign = leave(run, MIB, 0), leave(run, MIB), run / "notes.bin"
foreign.write_bytes(bytes(MIB))
os.utime(foreign, (0, 0))
file = os.open(locked, os.O_RDONLY)
fcntl.flock(file, fcntl.LOCK_EX)
text = refused(save, run, state)
assert new.exists() and locked.exists() and foreign.exists()
assert f"{2 * MIB} bytes are taken by saves that have not finished" in text, text
assert f"this one among them, in {run}: if files of theirs are left" in text, text
assert "were removed" not in text, text
"""

COMMITTED = """
small = {"w": torch.arange(MIB, dtype=torch.uint8)}
save(run, small)
for file in run.iterdir():
    os.utime(file, (time.time() - 3600,) * 2)
dead = leave(run, MIB, suffix="")
refused(save, run, huge)
assert not dead.exists()
if save is distributed:
    found = {"w": torch.zeros(MIB, dtype=torch.uint8)}
    dcp.load(found, storage_reader=FileReader(run), no_dist=True)
else:
    found = SyncCheckpointer().load(run)
assert torch.equal(found["w"], small["w"])
"""

EMPTY = """
refused(save, run, huge)
assert not run.exists(), os.listdir(run)
run.mkdir()
refused(save, run, huge)
assert run.exists() and not os.listdir(run)
"""

SERIES = """
dead, other = leave(root / "step-1", 2 * MIB), leave(root / "other", MIB)
text = refused(save, root / "step-2", state)
assert dead.exists() and str(root / "step-1") in text and str(root / "other") not in text, text
text = refused(save, root / "step-2", state, keep_last=2)
assert f"{2 * MIB} bytes that killed saves had left were removed" in text, text
assert not dead.parent.exists() and other.exists() and not (root / "step-2").exists()
save(root / "step-3", state, keep_last=2)
"""


def on_a_small_disk(where: Path, door: str, script: str) -> None:
    done = run_forked(SMALL_DISK + script, where, door, within=200)
    if done.returncode == 77:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("door", ["sync", "async", "dcp"])
@pytest.mark.parametrize(
    "script", [IN_ITS_FOLDER, ALIVE, COMMITTED, EMPTY], ids=["left", "alive", "committed", "empty"]
)
def test_a_save_that_fails_because_the_disk_is_full(door: str, script: str, tmp_path: Path) -> None:
    """It removes what dead writers have left, and nothing else: neither what may be in use nor what an index names."""
    on_a_small_disk(tmp_path, door, script)


@pytest.mark.parametrize("door", ["sync", "async"])
def test_what_is_left_in_other_folders_of_a_series(door: str, tmp_path: Path) -> None:
    """It goes where older checkpoints go; otherwise the error says where it is."""
    on_a_small_disk(tmp_path, door, SERIES)
