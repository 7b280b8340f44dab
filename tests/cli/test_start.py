"""How the command starts and ends: without torch where none is needed, with one line for an error, and a status."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from commands import command
from tensorferry import errors
from tensorferry.cli import app, console, exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = "tests/data/state.safetensors"

pytestmark = pytest.mark.beyond_torchft


@pytest.mark.process
def test_no_torch_is_imported_for_files_and_help() -> None:
    block = f"""
import contextlib, io, sys
from tensorferry import cli
for arguments in (
    ["--help"], ["--version"], *([verb, "--help"] for verb in {app.VERBS!r}),
    ["inspect", {DATA!r}, "--digests"], ["inspect", {DATA!r}, "--json"], ["verify", {DATA!r}],
    ["diff", {DATA!r}, {DATA!r}],
):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(arguments)
    assert status in (0, 1), (arguments, status)
    assert out.getvalue() or arguments[0] == "diff", arguments
    assert "torch" not in sys.modules and "numpy" not in sys.modules, arguments
"""
    subprocess.run([sys.executable, "-c", block], timeout=110, check=True)


@pytest.mark.parametrize(
    "arguments", [["inspekt"], ["inspect"], ["inspect", "x", "--nope"], ["pull", "x", "--step", "y"]]
)
def test_wrong_usage_has_status_2_and_one_line(arguments: list[str], run: Callable[..., Any]) -> None:
    done = run(*arguments)
    assert done.status == exits.USAGE
    assert done.err.startswith("tensorferry: usage: ")
    assert len(done.err.splitlines()) == 1


def test_an_error_is_one_line_or_one_json_object(run: Callable[..., Any], tmp_path: Path) -> None:
    there = run("inspect", tmp_path / "none")
    assert (there.status, there.out) == (3, "")
    assert there.err == f"tensorferry: IncompleteCheckpoint: {tmp_path}/none: there is no such file or folder\n"
    told = json.loads(run("inspect", tmp_path / "none", "--json").err)
    assert told == {
        "error": "IncompleteCheckpoint",
        "message": f"{tmp_path}/none: there is no such file or folder",
        "status": 3,
    }


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_a_status_of_its_own_class(name: str) -> None:
    kind = getattr(errors, name)
    listed = [one for one in kind.__mro__ if one in exits.STATUS]
    assert exits.status_of(kind.__new__(kind)) == exits.STATUS[listed[0]] not in (exits.OK, exits.NO)


def test_a_mistake_of_ours_has_a_status_and_a_traceback_on_request(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorferry.cli.places.find", lambda _: 1 / 0)
    done = run("verify", DATA)
    assert done.status == exits.BUG
    assert "ZeroDivisionError" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("TENSORFERRY_TRACEBACK", "1")
    assert "Traceback" in run("verify", DATA).err


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "a\nb", "bell\x07", "\x9b2J", "a\u202eb", "\u2028", "zero\u200bwidth", "\x7f", "\ud800"]
)
def test_nothing_that_a_terminal_acts_upon_is_printed(text: str) -> None:
    shown = console.clean(text)
    assert all(c.isprintable() for c in shown), shown
    assert "\\" in shown
    assert len(shown.splitlines()) == 1


def test_warnings_of_the_package_are_printed_cleanly_while_the_command_runs(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(text: str) -> Any:
        logging.getLogger("tensorferry").warning("look: %s", "\x1b[31m")
        raise errors.ProtocolError(text)

    monkeypatch.setattr("tensorferry.cli.places.find", find)
    assert run("verify", "x").err.splitlines()[0] == "tensorferry: warning: look: \\x1b[31m"
    assert not logging.getLogger("tensorferry").handlers


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_error() -> None:
    with command("inspect", DATA) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) in (exits.OK, exits.BROKEN_PIPE)
        process.stdout = None


def test_signal_handlers_are_those_from_before(run: Callable[..., Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run("--version")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.process
def test_the_module_runs_the_command() -> None:
    with command("--version") as process:
        assert process.communicate(timeout=30)[0].strip() == tensorferry.__version__
