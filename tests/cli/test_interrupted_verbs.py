"""Ctrl-C ends every verb with one line and status 130, and leaves nothing under the name that was asked for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from commands import command, until
from nights import mostly_at_night
from tensorferry._native import _seal_file
from tensorferry.cli import app, exits
from tensorferry.storage.reserved import DIGESTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.beyond_torchft, pytest.mark.slow, pytest.mark.timeout(180)]

#: Large enough that a verb is still reading it when the signal comes, and without blocks on the disk.
NBYTES = 1 << 30
LINE = "tensorferry: interrupted: ended by Ctrl-C"

#: The verbs by what they wait for or work at when they are interrupted, and the names that must not be there.
ON_A_SOURCE = {
    "pull": (["pull", "SOURCE", "-o", "out.safetensors"], "out.safetensors"),
    "pull of ranks": (["pull", "tensorferry-dcp/1 1 SOURCE SOURCE", "--into-folder", "out"], "out/index.safetensors"),
    "inspect": (["inspect", "SOURCE"], None),
    "diff": (["diff", "SOURCE", "large.safetensors"], None),
    # Without the rates, which it would measure for a minute on a busy machine before it asks the source.
    "doctor": (["doctor", "--quick", "SOURCE"], None),
}
ON_A_FILE = {
    "verify": (["verify", "large.safetensors"], None),
    "inspect of a file": (["inspect", "large.safetensors", "--digests"], None),
    "diff of files": (["diff", "large.safetensors", "other.safetensors"], None),
    "convert": (["convert", "large.safetensors", "out.pt"], "out.pt"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has two large files with checksums; those of ``other`` differ."""
    place = tmp_path_factory.mktemp("large")
    table = 48 + 8 * -(-NBYTES // 512)
    for name, last in (("large", b"\0"), ("other", b"\1")):
        fields = {
            "w": {"dtype": "U8", "shape": [NBYTES], "data_offsets": [0, NBYTES]},
            DIGESTS: {"dtype": "U8", "shape": [table], "data_offsets": [NBYTES, NBYTES + table]},
        }
        text = json.dumps(fields).encode()
        text += b" " * (-(len(text) + 8) % 4096)
        with (place / f"{name}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + NBYTES + table)
            file.seek(8 + len(text) + NBYTES - 1)
            file.write(last)
        _seal_file(place / f"{name}.safetensors")
    return place


def interrupted(process: subprocess.Popen[str], status: int = exits.INTERRUPTED) -> list[str]:
    """Interrupts the verb; the lines of its standard error."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert "Traceback" not in err
    return err.splitlines()


def has_open(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> bool:
    at = f"/proc/{process.pid}"
    try:
        links = [os.readlink(f"{at}/fd/{number}") for number in os.listdir(f"{at}/fd")]
        with open(f"{at}/maps") as maps:
            mapped = [line.split(maxsplit=5)[-1].strip() for line in maps]
    except OSError:
        return False
    return any(map(wanted, links + mapped))


@pytest.mark.process
@pytest.mark.parametrize("verb", mostly_at_night(ON_A_SOURCE, by_day=2))
def test_a_verb_that_waits_for_a_source(verb: str, folder: Path) -> None:
    arguments, output = ON_A_SOURCE[verb]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        source = f"http://127.0.0.1:{silent.getsockname()[1]}/x/checkpoint/"
        with command(*(one.replace("SOURCE", source) for one in arguments), cwd=folder) as process:
            connection, _ = silent.accept()
            with connection:
                assert interrupted(process) == [LINE]
    assert output is None or not (folder / output).exists()


@pytest.mark.process
@pytest.mark.parametrize("verb", mostly_at_night(ON_A_FILE, by_day=2))
def test_a_verb_that_works_at_a_file(verb: str, folder: Path) -> None:
    arguments, output = ON_A_FILE[verb]
    with command(*arguments, cwd=folder) as process:
        until(lambda: has_open(process, lambda name: name.endswith("large.safetensors")), process)
        lines = interrupted(process)
    assert lines[-1] == LINE
    assert sum("interrupted" in line for line in lines) == 1
    assert output is None or not (folder / output).exists()


@pytest.mark.process
def test_a_copy_that_waits_for_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra objects is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "x")
        with command("copy", "large.safetensors", "s3://bucket/out.safetensors", cwd=folder) as process:
            connection, _ = silent.accept()
            with connection:
                assert interrupted(process) == [LINE]


@pytest.mark.nightly
def test_bench(folder: Path) -> None:
    with command("bench", "--size", "16M", "--rounds", "1000", cwd=folder) as process:
        until(lambda: has_open(process, lambda name: name.startswith("socket:")), process)
        assert interrupted(process)[-1] == LINE


@pytest.mark.nightly
def test_serve_and_top_have_no_other_end(folder: Path) -> None:
    """So that is no failure."""
    with command("serve", "large.safetensors", "--unverified", "--interface", "127.0.0.1", cwd=folder) as serving:
        assert serving.stdout is not None
        metadata = serving.stdout.readline().strip()
        with command("top", metadata, "--every", "0.1", "--json") as top:
            assert top.stdout is not None
            top.stdout.readline()
            assert interrupted(top, exits.OK) == []
        assert len(interrupted(serving, exits.OK)) == 1  # that it serves


@pytest.mark.process
def test_an_interrupt_while_the_command_is_being_imported() -> None:
    program = (
        "import builtins, sys, tensorferry.cli as cli\n"
        "before = builtins.__import__\n"
        "def interrupt(name, *rest):\n"
        "    if name == 'rich': raise KeyboardInterrupt\n"
        "    return before(name, *rest)\n"
        "builtins.__import__ = interrupt\n"
        "sys.exit(cli.main(['inspect', 'x']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()) == (exits.INTERRUPTED, [LINE])


def test_every_verb_is_among_these() -> None:
    tried = {arguments[0] for arguments, _ in (*ON_A_SOURCE.values(), *ON_A_FILE.values())} | {
        *("bench", "copy", "serve", "top")
    }
    # Completion prints a text, and is done.
    assert tried == set(app.VERBS) - {"completion"}
