"""Saves replace a checkpoint, or removals take it away, in the middle of a command that reads it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.cli import distributed, exits, intact, listing
from tensorferry.dcp import FileWriter
from tensorferry.errors import IncompleteCheckpoint, SourceChanged, SystemRefused
from tensorferry.storage import folder as folders
from tensorferry.storage import lineage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning"),
]


def save(path: Path, value: float) -> None:
    SyncCheckpointer().save(path, {"w": torch.full((100,), value)}, step=int(value))


def save_distributed(path: Path, value: float) -> None:
    dcp.save({"w": torch.full((100,), value)}, storage_writer=FileWriter(path), no_dist=True)


def remove(path: Path) -> None:
    lineage.remove_checkpoint(path, folders.read_index(path).commit)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Has something done before each of the first calls of a function; returns how often it was called."""

    def patch(owner: Any, name: str, *done: Callable[[], object]) -> list[int]:
        called, left, real = [], [*done], getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called.append(len(called))
            if left:
                left.pop(0)()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)
        return called

    return patch


#: The modules behind the verbs of the same names.
verify, serve, diff = (import_module(f"tensorferry.cli.verbs.{verb}") for verb in ("verify", "serve", "diff"))
#: Of each command: its arguments before and after the folder, and the function before which the folder changes.
COMMANDS = {
    "inspect": (["inspect"], ["--json"], lambda: (listing, "list_file")),
    "digests": (["inspect"], ["--json", "--digests"], lambda: (listing, "list_file")),
    "verify": (["verify"], ["--json"], lambda: (verify, "_verified")),
}
#: Of what reads a checkpoint once: its arguments behind the folder, and the function before which the folder changes.
ONCE = {
    "convert": (["out.safetensors"], (intact, "_file_damage")),
    "serve": (["--interface", "127.0.0.1"], (serve.Publisher, "_publish")),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_shows_begins_again_until_saves_replace_the_checkpoint_too_often(
    command: str, run: Callable[..., Any], before: Callable[..., Any], tmp_path: Path
) -> None:
    save(tmp_path / "a", 1)
    first, last, where = COMMANDS[command]
    before(*where(), lambda: save(tmp_path / "a", 2))
    done = run(*first, tmp_path / "a", *last)
    assert done.status == exits.OK, done.err
    assert json.loads(done.out)["verified"] if command == "verify" else json.loads(done.out)[0]["step"] == 2
    for changes, error in (
        ([lambda: remove(tmp_path / "a")], IncompleteCheckpoint),
        ([lambda: save(tmp_path / "a", 2)] * 100, SourceChanged),
    ):
        save(tmp_path / "a", 2)
        before(*where(), *changes)
        done = run(*first, tmp_path / "a", *last)
        assert (done.status, json.loads(done.err)["error"]) == (exits.status_of(error("")), error.__name__)


def test_a_refusal_by_the_system_stays_one_while_saves_replace_the_checkpoint(
    run: Callable[..., Any], before: Callable[..., Any], tmp_path: Path
) -> None:
    save(tmp_path, 1)

    def refuse() -> None:
        save(tmp_path, 2)
        raise SystemRefused("a file cannot be read: Input/output error (os error 5)")

    before(listing, "list_file", refuse)
    assert run("inspect", tmp_path).status == exits.UNAVAILABLE
    # The index of a distributed checkpoint is read again, too.
    save_distributed(tmp_path / "d", 1)
    before(distributed, "with_digests", lambda: save_distributed(tmp_path / "d", 2))
    assert run("inspect", tmp_path / "d", "--digests", "--json").status == exits.OK


@pytest.mark.parametrize("verb", ONCE)
@pytest.mark.parametrize(
    ("change", "error"), [(lambda path: save(path, 2), SourceChanged), (remove, IncompleteCheckpoint)]
)
def test_what_reads_a_checkpoint_once_says_that_it_goes_and_leaves_nothing(
    change: Any, error: type, verb: str, run: Any, before: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", 1)
    rest, where = ONCE[verb]
    before(*where, lambda: change(tmp_path / "a"))
    done = run(verb, "a", *rest)
    assert done.status == exits.status_of(error("")), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["a"], [])


def test_diff_mixes_no_two_saves(run: Callable[..., Any], before: Callable[..., Any], tmp_path: Path) -> None:
    """The values of a leaf are read after the listings, when the index may be another one."""
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    called = before(diff._Comparison, "_compare", lambda: save(tmp_path / "a", 2))
    assert run("diff", tmp_path / "a", tmp_path / "b", "--json").status == exits.OK
    assert len(called) == 2
