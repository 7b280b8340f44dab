"""A full disk: the save fails, removes nothing but its own, and leaves no empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from child import run_forked

pytestmark = [pytest.mark.process, pytest.mark.beyond_torchft, pytest.mark.timeout(300)]

#: Mounts a small file system in a mount namespace of its own, or exits with 77; then what the scripts share.
SMALL_DISK = """
import ctypes, os, secrets, sys, time, warnings
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
huge = {"w": torch.arange(8 * MIB, dtype=torch.uint8)}

def in_background(folder, state):
    with_writer = AsyncCheckpointer()
    try:
        with_writer.save(folder, state)[1].result()
    finally:
        with_writer.close()

def distributed(folder, state):
    with own_errors():
        dcp.save(state, storage_writer=FileWriter(folder), no_dist=True)

def refused(save, *arguments):
    try:
        save(*arguments)
    except SystemRefused as e:
        assert "No space left on device" in str(e), e
        return str(e)
    raise AssertionError("the disk is full")

save = {"async": in_background, "dcp": distributed}[sys.argv[2]]
run = root / "run"
"""

COMMITTED = """
small = {"w": torch.arange(MIB, dtype=torch.uint8)}
save(run, small)
others = [f"rank00000-{names.machine()}{secrets.token_hex(6)}.safetensors", *os.listdir(run)]
(run / others[0]).write_bytes(bytes(MIB))
for name in others:
    os.utime(run / name, (time.time() - 3600,) * 2)
text = refused(save, run, huge)
assert set(os.listdir(run)) == set(others), os.listdir(run)
assert "remove" not in text, text
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


@pytest.mark.parametrize("door", ["async", "dcp"])
@pytest.mark.parametrize("script", [COMMITTED, EMPTY], ids=["committed", "empty"])
def test_a_save_that_fails_because_the_disk_is_full(door: str, script: str, tmp_path: Path) -> None:
    done = run_forked(SMALL_DISK + script, tmp_path, door, within=200)
    if done.returncode == 77:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 0, done.stderr[-3000:]
