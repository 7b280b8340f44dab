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

pytestmark = [pytest.mark.beyond_torchft, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

#: Large enough that a verb is still reading it when the signal comes, and without blocks on the disk.
NBYTES = 1 << 30
LINE = "tensorferry: interrupted: ended by Ctrl-C"

#: What verbs work at when they are interrupted: a silent source in place of SOURCE, a silent store, or the file.
CASES = [
    "pull SOURCE -o out",
    "convert large.safetensors out.pt",
    "pull tensorferry-dcp/1_1_SOURCE_SOURCE --into-folder out",
    "inspect SOURCE",
    "diff SOURCE large.safetensors",
    "doctor SOURCE",
    "copy large.safetensors s3://bucket/out",
    "verify large.safetensors",
    "inspect large.safetensors --digests",
    "diff large.safetensors other.safetensors",
    "bench --size 16M --rounds 1000",
]


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


@pytest.mark.parametrize("line", mostly_at_night(CASES, by_day=2))
def test_a_verb_at_work(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = "SOURCE" in line or "s3:" in line
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in (("ENDPOINT_URL", host), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
            monkeypatch.setenv(f"AWS_{name}", value)
        given = [part.replace("SOURCE", f"{host}/x/checkpoint/").replace("_", " ") for part in line.split()]
        with command(*given, cwd=folder) as process:
            if asks:
                connection, _ = silent.accept()
                with connection:
                    lines = interrupted(process)
            else:
                until(
                    lambda: has_open(process, lambda name: name.endswith("large.safetensors") or "socket:" in name),
                    process,
                )
                lines = interrupted(process)
    assert lines[-1] == LINE
    assert sum("interrupted" in line for line in lines) == 1
    assert sorted(os.listdir(folder)) == ["large.safetensors", "other.safetensors"]


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
    # The keeper has its own tests.
    assert {line.split()[0] for line in CASES} | {"serve", "top", "keeper"} == set(app.VERBS)
