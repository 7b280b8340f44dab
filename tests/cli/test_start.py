"""How the command starts and ends, and what it says to people."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from commands import (
    command,
    make_state,
    write_archive,
    write_checkpoint,
    write_distributed,
    write_torch_distributed,
)
from equality import assert_same_state
from kinds import KINDS, written
from leaves import adam, model
from tensorferry import errors
from tensorferry.checkpointing import load_file
from tensorferry.cli import app, console, exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft


DATA = "tests/data/state.safetensors"


@pytest.mark.process
def test_no_torch_is_imported_for_files_and_help_and_no_verb_for_the_list_of_them() -> None:
    block = f"""
import contextlib, io, sys
from tensorferry import cli
slow = ("asyncio", "concurrent.futures", "importlib.metadata", "ssl", "zipfile", "tensorferry.cli.verbs")
for arguments in (
    ["--help"], ["--version"], *([verb, "--help"] for verb in {[*app.VERBS][:-1]!r}),
    ["inspect", {DATA!r}, "--digests"], ["inspect", {DATA!r}, "--json"], ["verify", {DATA!r}],
    ["diff", {DATA!r}, {DATA!r}],
):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(arguments)
    assert status in (0, 1), (arguments, status)
    assert out.getvalue() or arguments[0] == "diff", arguments
    assert "torch" not in sys.modules and "numpy" not in sys.modules, arguments
    assert arguments != ["--help"] or not [name for name in slow if name in sys.modules]
print("all")
"""
    done = subprocess.run([sys.executable, "-c", block], timeout=110, check=True, capture_output=True, text=True)
    assert done.stdout == "all\n"
    with command("keeper", "--help") as process:
        assert "usage: tensorferry keeper" in process.communicate(timeout=110)[0]


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


@pytest.mark.parametrize("write", [write_distributed, write_torch_distributed])
@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_the_numbers_of_parameters_are_integers_again(
    name: str, write: Callable[..., None], run: Callable[..., Any], tmp_path: Path
) -> None:
    before = adam()
    write({"model": {"w": torch.ones(2)}, "optim": before}, tmp_path / "ck")
    done = run("convert", tmp_path / "ck", tmp_path / name)
    assert (done.status, done.err) == (0, "")
    state = load_file(tmp_path / name)["optim"]
    assert sorted(state["state"]) == list(range(6))
    fresh = torch.optim.Adam(model().parameters())
    fresh.load_state_dict(state)
    assert_same_state(fresh.state_dict()["state"], before["state"])


WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from tensorferry.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["inspect", "a.pt"], ["convert", "a.pt", "b.safetensors"]])
def test_without_torch_the_command_says_what_to_install(arguments: list[str], tmp_path: Path) -> None:
    write_archive(make_state(), tmp_path / "a.pt")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == exits.USAGE, done.stderr
    assert (
        done.stderr
        == f"tensorferry: InvalidArgument: {arguments[0]} of this needs the package torch: pip install torch\n"
    )
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_folder_of_checkpoints_is_listed(run: Callable[..., Any], tmp_path: Path) -> None:
    # Step 1 is saved last: a job has gone back to it.
    for step in (2, 1):
        write_checkpoint({"w": torch.ones(step)}, tmp_path / f"step-{step}", step=step)
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("nothing")
    left = f"rank00000-{'0' * 20}.safetensors.partial"
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / left).write_bytes(b"123")
    listed = {one["name"]: one for one in run("inspect", tmp_path, "--json").json["checkpoints"]}
    assert [name for name in listed if name != "step-3"] == ["step-1", "step-2"]
    of = listed["step-2"]
    files = sum(path.stat().st_size for path in (tmp_path / "step-2").iterdir())
    assert (of["step"], of["ranks"], of["bytes"], of["problem"]) == (2, 1, files, "")
    assert (listed["step-3"]["kind"], listed["step-3"]["bytes"]) == ("", 3)
    assert left in listed["step-3"]["problem"]
    shown = run("inspect", tmp_path)
    assert shown.status == exits.OK
    assert shown.out.splitlines()[0].split() == ["name", "step", "bytes", "ranks", "saved"]
    for verb in ("verify", "serve"):
        done = run(verb, tmp_path)
        assert done.status == 3
        assert "Name one of what is in it: step-" in done.err, done.err


@pytest.mark.parametrize("verb", ["inspect", "verify", "convert", "diff"])
def test_of_a_half_written_checkpoint_the_leftover_is_named(run: Callable[..., Any], tmp_path: Path, verb: str) -> None:
    left = f"rank00000-{'0' * 20}.safetensors.partial"
    (tmp_path / left).write_bytes(b"123")
    more = {"convert": [tmp_path / "o.pt"], "diff": [tmp_path]}.get(verb, [])
    done = run(verb, tmp_path, *more)
    assert done.status == 3
    assert f"holds an incomplete checkpoint: the save that wrote {left}" in done.err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::UserWarning")
class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return written(KINDS["model"], tmp_path, with_notes=False)

    @pytest.mark.process
    @pytest.mark.parametrize("verb", ["inspect", "verify", "convert"])
    def test_a_file_that_is_missing_or_has_another_tensor(
        self, verb: str, folder: Path, run: Callable[..., Any], tmp_path: Path
    ) -> None:
        assert run("diff", folder, folder / "model.safetensors.index.json").status == exits.OK
        output = [tmp_path / "b.pt"] if verb == "convert" else []
        second = folder / "model-00002-of-00002.safetensors"
        save_file({"w": torch.ones(1)}, second)
        done = run(verb, folder, *output)
        assert done.status == 3
        assert "does not hold b" in done.err
        second.unlink()
        done = run(verb, folder, *output)
        assert done.status == 3
        assert "model-00002-of-00002.safetensors is missing" in done.err

    @pytest.mark.process
    @pytest.mark.parametrize("index", ['{"weight_map": {"w": "../a.safetensors"}}', "[1]", "[" * 100_000, "nothing"])
    def test_an_index_that_is_not_valid(self, index: str, folder: Path, run: Callable[..., Any]) -> None:
        (folder / "model.safetensors.index.json").write_text(index)
        assert run("inspect", folder).status == exits.UNREADABLE
