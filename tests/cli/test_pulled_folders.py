"""``tensorferry pull --into-folder`` that ends early: what is committed stays, and nothing else does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from checkpoint_loads import load_state
from commands import serving, write_checkpoint, write_distributed
from tensorferry.cli import exits
from tensorferry.errors import ConnectError
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state.snapshot import StateSnapshot
from tensorferry.storage import commits
from tensorferry.storage.folder import INDEX
from tensorferry.storage.folder_save import FolderSave, SaveId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.beyond_torchft

GONE = "http://127.0.0.1:1/x/checkpoint/"


def shown(folder: Path) -> list[str]:
    """What lies in the folder under a name of its own."""
    return sorted(name for name in os.listdir(folder) if name[0] != ".")


def full(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def strike_at(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, at this moment of the next commit."""

    def reached(at: str, _: Any) -> None:
        if at == moment:
            raise KeyboardInterrupt

    monkeypatch.setattr(commits, "reached", reached)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", ["checked", "renamed"])
def test_an_interrupt_at_the_commit_leaves_a_whole_checkpoint(
    moment: str, ranks: int, run: Callable[..., Any], publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metadata(value: float) -> str:
        urls = [publish(full(value + rank)) for rank in range(ranks)]
        return urls[0] if ranks == 1 else f"tensorferry-dcp/1 5 {' '.join(urls)}"

    assert run("pull", metadata(10), "--into-folder", tmp_path / "c").status == 0
    before = shown(tmp_path / "c")
    strike_at(moment, monkeypatch)
    assert run("pull", metadata(20), "--into-folder", tmp_path / "c").status == exits.INTERRUPTED
    monkeypatch.undo()
    assert run("verify", tmp_path / "c").status == 0
    value = 20 if moment == "renamed" else 10
    for rank in range(ranks):
        assert torch.equal(load_state(tmp_path / "c", rank=rank, world_size=ranks)["w"], full(value + rank)["w"])
    if moment == "checked":
        assert shown(tmp_path / "c") == before


@pytest.mark.process
def test_a_rank_of_a_distributed_checkpoint_that_is_gone_leaves_no_file_of_the_others(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    write_distributed(full(1), tmp_path / "source")
    with serving(tmp_path / "source") as (metadata,):
        for _ in range(2):
            done = run("pull", f"{metadata} {GONE}", "--into-folder", tmp_path / "d", "--timeout", "5")
            assert done.status == exits.STATUS[ConnectError], done.err
            assert os.listdir(tmp_path) == ["source"]
        assert run("pull", metadata, "--into-folder", tmp_path / "d").status == 0
        before = shown(tmp_path / "d")
        # A checkpoint that is there stays whole.
        assert run("pull", f"{metadata} {GONE}", "--into-folder", tmp_path / "d", "--timeout", "5").status != 0
    assert shown(tmp_path / "d") == before
    assert run("verify", tmp_path / "d").status == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_saved_during_a_pull_is_replaced_only_by_force(
    ranks: int, run: Callable[..., Any], publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [publish(full(value)) for value in range(ranks)]
    metadata = urls[0] if ranks == 1 else f"tensorferry-dcp/1 5 {' '.join(urls)}"
    assert run("pull", metadata, "--into-folder", tmp_path / "c").status == 0
    # It begins before the pull, which it does not know of.
    saved = FolderSave(tmp_path / "c", SaveId.new(step=99, known=commits.beginnings(tmp_path / "c" / INDEX)))

    def save_right_before(moment: str, _: Path) -> None:
        if moment == "written" and not saved.path.exists():
            saved.write(StateSnapshot(full(99), HostStager(ACCELERATOR), "borrow").container())
            saved.commit()
            saved.close()

    # After the pull's last look before it locks the folder.
    monkeypatch.setattr(commits, "reached", save_right_before)
    done = run("pull", metadata, "--into-folder", tmp_path / "c")
    assert done.status == exits.USAGE, done
    assert "holds a checkpoint already" in done.err
    assert torch.equal(load_state(tmp_path / "c")["w"], full(99)["w"])
    assert shown(tmp_path / "c") == sorted([INDEX, saved.path.name])
    assert run("pull", metadata, "--into-folder", tmp_path / "c", "--force").status == 0
    assert len(shown(tmp_path / "c")) == 1 + ranks


@pytest.mark.process
def test_a_checkpoint_that_is_saved_during_a_pull_of_a_distributed_one_stays(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distributed(full(1), tmp_path / "source")
    saved: list[Any] = []

    def save_right_before(moment: str, index: Path) -> None:
        if moment == "written" and not saved:
            saved.append(index)
            write_checkpoint(full(99), tmp_path / "d")

    with serving(tmp_path / "source") as (metadata,):
        monkeypatch.setattr(commits, "reached", save_right_before)
        monkeypatch.setattr(commits, "begin_after", lambda _: 1)
        done = run("pull", metadata, "--into-folder", tmp_path / "d")
    assert done.status == exits.USAGE, done
    assert "holds a checkpoint already" in done.err
    assert torch.equal(load_state(tmp_path / "d")["w"], full(99)["w"])
    assert len(shown(tmp_path / "d")) == 2
