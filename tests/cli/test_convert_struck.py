"""Conversions and pulls that are killed, meet a full or read-only disk, or one another: no half output has its name."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import command, incomplete, until, write_archive
from equality import assert_same_state
from tensorferry.checkpointing import load_file
from tensorferry.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft

FORMATS = ("tensorferry", "safetensors", "torch", "checkpoint", "dcp", "torch-dcp")


def state() -> dict[str, Any]:
    """12 MiB in four tensors."""
    return {str(i): torch.full((3 << 18,), i, dtype=torch.int32) for i in range(4)}


def size_of(path: Path) -> int:
    """The length of a file, or of all files in a folder; 0 if there is none."""
    if path.is_dir():
        return sum(size_of(one) for one in path.iterdir())
    return path.stat().st_size if path.exists() else 0


@pytest.mark.process
def test_a_killed_conversion_leaves_nothing_under_the_final_name(
    run: Callable[..., Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    write_archive(state(), tmp_path / "a.pt")
    chance = random.Random(7)
    ended = 0
    for number in range(pytestconfig.getoption("--convert-kills")):
        to = FORMATS[number % len(FORMATS)]
        output = tmp_path / f"out-{to}"
        with command("convert", tmp_path / "a.pt", output, "--to", to) as process:
            # From the moment at which the folder is made: what comes before takes longer than the conversion.
            until(lambda path=output: incomplete(path) != [] or process.poll() is not None, process)
            time.sleep(chance.random() * 0.05)
            process.kill()
            process.wait(timeout=30)
        if output.exists():
            # It was complete before the signal came.
            ended += 1
        else:
            done = run("convert", tmp_path / "a.pt", output, "--to", to)
            assert done.status == 0, done.err
        assert run("diff", tmp_path / "a.pt", output).status == exits.OK
        (shutil.rmtree if output.is_dir() else os.unlink)(output)
        left = incomplete(output)
        # It may have been killed between the rename and the removal of the folder that is empty then.
        assert left == [] or (ended and not any(left[0].iterdir())), left
        for folder in left:
            folder.rmdir()
        assert os.listdir(tmp_path) == ["a.pt"]


def test_an_output_that_is_the_source_or_exists_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_archive(state(), path)
    (tmp_path / "link.pt").symlink_to("a.pt")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("kept")
    before = sorted(os.listdir(tmp_path))
    for name in ("a.pt", "link.pt", "broken", "pipe", "full", "../" + tmp_path.name + "/a.pt"):
        for to in ("torch", "checkpoint"):
            told = run("convert", path, tmp_path / name, "--to", to)
            assert told.status == exits.USAGE, (name, told)
            assert "exists already" in told.err
    assert sorted(os.listdir(tmp_path)) == before
    assert_same_state(load_file(path), state())


#: Runs commands on a small file system of their own: the script mounts it on the first argument, and prints the status,
#: the output and what is left of each command.
ON_SMALL_DISK = """
import ctypes, json, os, subprocess, sys
disk, options, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
def must(status):
    if status:
        sys.exit(77)
must(libc.unshare(0x00020000))
must(libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None))
must(libc.mount(b"tmpfs", disk.encode(), b"tmpfs", 0, options.encode()))
told = []
# As a killed save leaves it: saves remove it for room, commands do not.
from tensorferry.storage import names
left = os.path.join(disk, f"rank00000-{names.machine()}0123456789ab.safetensors.partial")
open(left, "wb").close()
os.utime(left, (0, 0))
for command in commands:
    if command == "read-only":
        must(libc.mount(b"tmpfs", disk.encode(), None, 32 | 1, None))
        continue
    done = subprocess.run([sys.executable, "-m", "tensorferry", *command], capture_output=True, text=True, timeout=110)
    told.append([done.returncode, done.stderr, sorted({*os.listdir(disk)} - {os.path.basename(left)})])
    assert os.path.exists(left)
print(json.dumps(told))
"""


def on_a_small_disk(disk: Path, options: str, commands: list[Any]) -> list[tuple[int, str, list[str]]]:
    """Runs commands with a small file system at ``disk``; returns status, errors and what is left there of each."""
    disk.mkdir()
    script = [sys.executable, "-c", ON_SMALL_DISK, str(disk), options, json.dumps(commands)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode == 77:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.mark.process
def test_a_full_or_read_only_disk(publish: Callable[..., str], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    write_archive(state(), tmp_path / "a.pt")
    source, disk = str(tmp_path / "a.pt"), tmp_path / "disk"
    pull = ["pull", publish(state()), "--quiet"]
    # Each conversion starts torch, whose own writer is the one that does not say what went wrong.
    formats = FORMATS if pytestconfig.getoption("--convert-kills") > 1 else ("torch-dcp",)
    conversions = [["convert", source, str(disk / f"out-{to}"), "--to", to] for to in formats]
    pulls = [[*pull, "-o", str(disk / "a")], [*pull, "--into-folder", str(disk / "f")]]
    told = on_a_small_disk(disk, "size=8m", [*conversions, *pulls, "read-only", pulls[0]])
    for status, err, left in told:
        assert status == exits.UNAVAILABLE, err
        assert len(err.splitlines()) == 1, err
        assert re.search("No space left on device|Read-only file system|there is no room", err), err
        # A folder that was made for a checkpoint may stay.
        assert set(left) <= {"f"}, left


@pytest.mark.process
def test_two_pulls_into_one_file(publish: Callable[..., str], run: Callable[..., Any], tmp_path: Path) -> None:
    metadata = publish(state(), max_bandwidth=4 << 20)
    output = tmp_path / "a"
    with command("pull", metadata, "-o", output, "--quiet") as first:
        until(lambda: any(size_of(partial) > 12 << 20 for partial in incomplete(output)), first)
        # It stands still meanwhile: the other one may start slowly.
        first.send_signal(signal.SIGSTOP)
        told = run("pull", metadata, "-o", output, "--timeout", "10")
        first.send_signal(signal.SIGCONT)
        assert told.status == exits.USAGE
        assert "another process is downloading" in told.err
        assert first.wait(timeout=110) == 0
    assert_same_state(load_file(output), state())
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.process
@pytest.mark.parametrize("what", ["a byte of the payload", "the header", "the length", "the whole file"])
def test_what_is_tampered_with_between_a_kill_and_the_next_run_is_noticed(
    what: str, publish: Callable[..., str], run: Callable[..., Any], tmp_path: Path
) -> None:
    metadata = publish(state(), max_bandwidth=32 << 20)
    output = tmp_path / "a"
    with command("pull", metadata, "-o", output, "--quiet") as process:
        until(lambda: any(size_of(left) > 12 << 20 and half_there(left) for left in incomplete(output)), process)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    [partial] = incomplete(output)
    with partial.open("r+b") as file:
        if what == "the length":
            file.truncate(5 << 20)
        elif what == "the whole file":
            file.write(os.urandom(size_of(partial)))
        else:
            file.seek(20 if what == "the header" else (2 << 20) + 7)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    told = run("pull", metadata, "-o", output, "--json")
    assert told.status == 0, told.err
    assert_same_state(load_file(output), state())
    assert run("verify", output).status == 0


def half_there(partial: Path) -> bool:
    """Whether something has arrived behind the first 2 MiB."""
    with partial.open("rb") as file:
        file.seek(2 << 20)
        return file.read(4 << 20).strip(b"\0") != b""


def test_what_others_have_called_partial_stays(
    publish: Callable[..., str], run: Callable[..., Any], tmp_path: Path
) -> None:
    metadata = publish({"w": torch.ones(3)})
    os.mkfifo(tmp_path / "pipe.partial")
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "link.partial").symlink_to("/dev/null")
    (tmp_path / "text.partial").write_text("kept")
    for name in ("pipe", "folder", "link", "text"):
        assert run("pull", metadata, "-o", tmp_path / name, "--quiet", "--timeout", "5").status == 0
    assert (tmp_path / "text.partial").read_text() == "kept"
    assert len(os.listdir(tmp_path)) == 8
