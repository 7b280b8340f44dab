"""Conversions and pulls that are killed, meet a full disk, or one another: nothing of others is replaced or removed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import command, incomplete, make_state, until, write_archive, write_checkpoint
from equality import assert_same_state
from kinds import FORMATS
from nights import mostly_at_night
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import conversion, download, exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft


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


#: Runs commands on a small file system of their own, and prints the status, the errors and what is left of each.
ON_SMALL_DISK = """
import ctypes, json, os, subprocess, sys
disk, commands = sys.argv[1], json.loads(sys.argv[2])
libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"tmpfs", disk.encode(), b"tmpfs", 0, b"size=8m"):
    sys.exit(77)
told = []
for command in commands:
    done = subprocess.run([sys.executable, "-m", "tensorferry", *command], capture_output=True, text=True, timeout=110)
    told.append([done.returncode, done.stderr, os.listdir(disk)])
print(json.dumps(told))
"""


@pytest.mark.process
def test_a_full_disk(publish: Callable[..., str], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    write_archive(state(), tmp_path / "a.pt")
    source, disk, pull = str(tmp_path / "a.pt"), tmp_path / "disk", ["pull", publish(state()), "--quiet"]
    disk.mkdir()
    # Each conversion starts torch, whose own writer is the one that does not say what went wrong.
    formats = FORMATS if pytestconfig.getoption("--convert-kills") > 1 else ("torch-dcp",)
    commands = [["convert", source, str(disk / f"out-{to}"), "--to", to] for to in formats]
    commands += [[*pull, "-o", str(disk / "a")], [*pull, "--into-folder", str(disk / "f")]]
    script = [sys.executable, "-c", ON_SMALL_DISK, str(disk), json.dumps(commands)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode == 77:
        pytest.skip("this user may not mount a file system")
    for status, err, left in json.loads(done.stdout):
        assert (status, len(err.splitlines())) == (exits.UNAVAILABLE, 1), err
        assert "No space left on device" in err or "there is no room" in err, err
        assert left == [], left


def state(value: int = 0) -> dict[str, Any]:
    """12 MiB in four tensors."""
    return {str(i): torch.full((3 << 18,), i + value, dtype=torch.int32) for i in range(4)}


@pytest.mark.parametrize(("to", "appears"), [("torch", "file"), ("dcp", "folder"), ("tensorferry", "link")])
def test_what_appears_during_a_conversion_stays(
    to: str, appears: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive({"w": torch.ones(3)}, tmp_path / "a.pt")
    output = tmp_path / "out"
    make = {
        "file": output.touch,
        "folder": lambda: (output / "x").mkdir(parents=True),
        "link": lambda: output.symlink_to("x"),
    }
    written = conversion.Conversion._write

    def write(*arguments: Any) -> Any:
        told = written(*arguments)
        make[appears]()
        return told

    monkeypatch.setattr(conversion.Conversion, "_write", write)
    told = run("convert", tmp_path / "a.pt", output, "--to", to)
    assert told.status == exits.USAGE, told
    assert "has appeared while it was being written" in told.err
    assert (output.is_symlink(), output.is_dir()) == (appears == "link", appears == "folder")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out"]


class TestPull:
    @pytest.mark.process
    def test_a_file_of_somebody_else_is_replaced_only_by_force(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        metadata, notes = publish(make_state()), tmp_path / "notes.txt"
        notes.write_text("months of work")
        told = run("pull", metadata, "-o", notes)
        assert told.status == exits.USAGE
        assert "no pull has written it" in told.err
        assert "--force" in told.err
        assert notes.read_text() == "months of work"
        # Checkpoints that were not pulled are somebody's, too.
        write_archive(make_state(), tmp_path / "a.pt")
        assert run("convert", tmp_path / "a.pt", tmp_path / "mine.safetensors").status == 0
        before = (tmp_path / "mine.safetensors").read_bytes()
        assert run("pull", metadata, "-o", tmp_path / "mine.safetensors").status == exits.USAGE
        assert (tmp_path / "mine.safetensors").read_bytes() == before
        assert run("pull", metadata, "-o", notes, "--force").status == 0
        assert_same_state(load_file(notes), make_state())

    @pytest.mark.process
    @pytest.mark.parametrize("had", [False, True])
    def test_a_file_that_appears_or_changes_meanwhile_stays(
        self, had: bool, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        metadata, output = publish(state()), tmp_path / "a"
        if had:
            assert run("pull", metadata, "-o", output).status == 0
        fetch = download.Download.fetch

        def fetched(self: Any) -> Any:
            report = fetch(self)
            output.write_text("kept")
            return report

        monkeypatch.setattr(download.Download, "fetch", fetched)
        told = run("pull", metadata, "-o", output)
        assert told.status == exits.USAGE
        assert "has appeared or changed" in told.err
        assert output.read_text() == "kept"
        monkeypatch.undo()
        output.rename(tmp_path / "mine")
        assert run("pull", metadata, "-o", output, "--json").json["fetched"] <= 1 << 20
        assert_same_state(load_file(output), state())

    @pytest.mark.process
    def test_a_checkpoint_of_somebody_else_is_replaced_only_by_force(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        write_checkpoint(make_state(), tmp_path / "c")
        before = sorted(os.listdir(tmp_path / "c"))
        told = run("pull", publish(state()), "--into-folder", tmp_path / "c")
        assert told.status == exits.USAGE
        assert "no pull has written it" in told.err
        assert sorted(os.listdir(tmp_path / "c")) == before
        assert run("pull", publish(state()), "--into-folder", tmp_path / "c", "--force").status == 0
        assert_same_state(SyncCheckpointer().load(tmp_path / "c"), state())

    @pytest.mark.process
    def test_what_other_steps_have_left_goes_once_the_file_is_there(
        self, run: Callable[..., Any], publish: Callable[..., str], tmp_path: Path
    ) -> None:
        output = tmp_path / "a"
        with command("pull", publish(state(), step=4, max_bandwidth=8 << 20), "-o", output, "--quiet") as process:
            until(lambda: any(path.stat().st_size > 12 << 20 for path in incomplete(output)), process)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        (tmp_path / ".a.pull-0123456789abcdef.partial").write_text("kept")
        assert len(incomplete(output)) == 2
        assert run("pull", publish(state(), step=5), "-o", output).status == 0
        assert [path.read_text() for path in incomplete(output)] == ["kept"]

    @pytest.mark.process
    @pytest.mark.parametrize("same_host", mostly_at_night([True, False]))
    def test_a_stranger_who_shortens_the_file_ends_the_pull_with_an_error(
        self, same_host: bool, publish: Callable[..., str], tmp_path: Path
    ) -> None:
        output = tmp_path / "a"
        metadata = publish(state(), max_bandwidth=4 << 20, same_host=same_host)
        with command("pull", metadata, "-o", output, "--quiet") as process:
            until(lambda: any(path.stat().st_size > 12 << 20 for path in tmp_path.glob("*a.*partial")), process)
            [partial] = tmp_path.glob("*a.*partial")
            os.truncate(partial, 4096)
            _, err = process.communicate(timeout=110)
        assert process.returncode == exits.UNAVAILABLE, err
        assert "was shortened by another process" in err
        assert not output.exists()
