"""``keep_last`` removes what the same run has saved, or one that it goes on from, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stores import BUCKET, client
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.storage.folder import INDEX

pytestmark = pytest.mark.timeout(120)


def checkpoints(root: Path) -> list[str]:
    """Returns the names of the folders with an index, in order."""
    return sorted(path.parent.name for path in root.glob(f"*/{INDEX}"))


def save(checkpointer: SyncCheckpointer, path: str | Path, value: float, step: int | None) -> None:
    checkpointer.save(path, {"w": torch.full((30,), float(value))}, step=step)


@pytest.mark.parametrize("with_steps", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("replica-0", "replica-1"),
        ("rank0-step-0", "rank1-step-0"),
    ],
)
def test_jobs_side_by_side_remove_nothing_of_each_other(tmp_path, names, with_steps) -> None:
    first = 0 if "step-0" in names[0] else 100
    jobs = [SyncCheckpointer(keep_last=1) for _ in names]
    for step in (first, first + 1):
        for job, name in zip(jobs, names, strict=True):
            save(job, tmp_path / name.replace(f"step-{first}", f"step-{step}"), step, step if with_steps else None)
    last = [name.replace(f"step-{first}", f"step-{first + 1}") for name in names]
    assert checkpoints(tmp_path) == sorted(last)
    # Nor does one that begins anew.
    save(SyncCheckpointer(keep_last=1), tmp_path / last[0], 5, first + 1 if with_steps else None)
    assert checkpoints(tmp_path) == sorted(last)


def test_what_a_run_was_made_from_stays_unless_its_name_differs_in_the_step_alone(tmp_path) -> None:
    save(SyncCheckpointer(), tmp_path / "stage-1", 1, 700)
    run = SyncCheckpointer(keep_last=1)
    run.load(tmp_path / "stage-1")
    for step in (None, 800, None, 900):
        save(run, tmp_path / "stage-2", 2, step)
    assert checkpoints(tmp_path) == ["stage-1", "stage-2"]


@pytest.mark.parametrize("loads", [True, False])
def test_a_run_that_goes_on_removes_what_it_goes_on_from(tmp_path, loads) -> None:
    """It has loaded the newest checkpoint; or it has loaded nothing, and saves beside it under such a name."""
    first = SyncCheckpointer(keep_last=3)
    for step in (1, 2, 3):
        save(first, tmp_path / f"step-{step}", step, step)
    second = SyncCheckpointer(keep_last=2)
    if loads:
        second.load(latest_checkpoint(tmp_path))
    save(second, tmp_path / "step-4", 4, 4)
    assert checkpoints(tmp_path) == ["step-3", "step-4"]
    save(second, tmp_path / "step-5", 5, 5)
    assert checkpoints(tmp_path) == ["step-4", "step-5"]


def test_who_removes_nothing_says_so_once(tmp_path, caplog) -> None:
    for n in range(3):
        save(SyncCheckpointer(), tmp_path / f"step-{n}", n, None)
    caplog.clear()
    run = SyncCheckpointer(keep_last=1)
    for step in (5, 6):
        save(run, tmp_path / f"step-{step}", step, step)
    assert checkpoints(tmp_path) == ["step-0", "step-1", "step-2", "step-6"]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "keep_last" in said
    assert "step-0" in said
    caplog.clear()
    # The name does not tell which number is the step.
    run = SyncCheckpointer(keep_last=1)
    for step in (100, 200):
        save(run, tmp_path / "replica-0", step, step)
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "200" in said or "100" in said


@pytest.mark.process
def test_foreign_folders_cost_a_save_nothing(gateway, server) -> None:
    """However many there are: those of other names are listed once, and none is asked for its index."""
    s3 = client(server.url)
    for n in range(300):
        s3.put_object(Bucket=BUCKET, Key=f"{server.prefix}/foreign-{n}/index.safetensors", Body=b"x")
    s3.close()
    run = SyncCheckpointer(keep_last=2)
    for step in (1, 2, 3):
        gateway.seen.clear()
        save(run, f"{server.place}/step-{step}", step, step)
        assert not [path for _, path in gateway.seen if "foreign" in path]
        lists = [path for _, path in gateway.seen if path.endswith(f"prefix={server.prefix}%2F")]
        assert len(lists) == (1 if step == 1 else 0)
        assert len(gateway.seen) < 25


def test_links_are_none_of_a_run(tmp_path) -> None:
    """A save through one replaces what it leads to; what lies beside that stays, and so does the link."""
    for n in (0, 1):
        save(SyncCheckpointer(), tmp_path / "others" / f"step-{n}", 9, n)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "others" / "step-1")
    run = SyncCheckpointer(keep_last=1)
    run.load(tmp_path / "run" / "step-1")
    for n in range(1, 4):
        save(run, tmp_path / "run" / f"step-{n}", n, n)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-1", "step-3"]
    assert [float(run.load(tmp_path / "others" / f"step-{n}")["w"][0]) for n in (0, 1)] == [9, 1]
