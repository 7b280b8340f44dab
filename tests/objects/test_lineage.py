"""``keep_last`` removes what the same run has saved, or one that it goes on from, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stores import BUCKET, client, objects
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.storage.folder import INDEX

pytestmark = pytest.mark.timeout(120)


class Root:
    """A folder, or a place in a bucket, in which checkpoints lie beside each other."""

    def __init__(self, where: object) -> None:
        self.where = where
        self.text = str(where) if isinstance(where, Path) else where.place

    def __truediv__(self, name: str) -> str:
        return f"{self.text}/{name}"

    def checkpoints(self) -> list[str]:
        """Returns the names of the folders with an index, in order."""
        if isinstance(self.where, Path):
            return sorted(path.parent.name for path in self.where.glob(f"*/{INDEX}"))
        keys = objects(self.where.url, f"{self.where.prefix}/")
        return sorted(key.split("/")[-2] for key in keys if key.endswith(f"/{INDEX}"))


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.process)])
def root(request, tmp_path) -> Root:
    if request.param == "bucket":
        return Root(request.getfixturevalue("server"))
    (tmp_path / "run").mkdir()
    return Root(tmp_path / "run")


def save(checkpointer: SyncCheckpointer, path: str, value: float, step: int | None) -> None:
    checkpointer.save(path, {"w": torch.full((30,), float(value))}, step=step)


@pytest.mark.process
@pytest.mark.parametrize("with_steps", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("replica-0", "replica-1"),
        ("rank0-step-0", "rank1-step-0"),
    ],
)
def test_jobs_side_by_side_remove_nothing_of_each_other(root, names, with_steps) -> None:
    first = 0 if "step-0" in names[0] else 100
    jobs = [SyncCheckpointer(keep_last=1) for _ in names]
    for step in (first, first + 1):
        for job, name in zip(jobs, names, strict=True):
            save(job, root / name.replace(f"step-{first}", f"step-{step}"), step, step if with_steps else None)
    last = [name.replace(f"step-{first}", f"step-{first + 1}") for name in names]
    assert root.checkpoints() == sorted(last)
    # Nor does one that begins anew.
    save(SyncCheckpointer(keep_last=1), root / last[0], 5, first + 1 if with_steps else None)
    assert root.checkpoints() == sorted(last)


@pytest.mark.process
def test_what_a_run_was_made_from_stays_unless_its_name_differs_in_the_step_alone(root) -> None:
    save(SyncCheckpointer(), root / "stage-1", 1, 700)
    run = SyncCheckpointer(keep_last=1)
    run.load(root / "stage-1")
    for step in (None, 800, None, 900):
        save(run, root / "stage-2", 2, step)
    assert root.checkpoints() == ["stage-1", "stage-2"]


@pytest.mark.process
@pytest.mark.parametrize("loads", [True, False])
def test_a_run_that_goes_on_removes_what_it_goes_on_from(root, loads) -> None:
    """It has loaded the newest checkpoint; or it has loaded nothing, and saves beside it under such a name."""
    first = SyncCheckpointer(keep_last=3)
    for step in (1, 2, 3):
        save(first, root / f"step-{step}", step, step)
    second = SyncCheckpointer(keep_last=2)
    if loads:
        second.load(latest_checkpoint(root.text))
    save(second, root / "step-4", 4, 4)
    assert root.checkpoints() == ["step-3", "step-4"]
    save(second, root / "step-5", 5, 5)
    assert root.checkpoints() == ["step-4", "step-5"]


@pytest.mark.process
def test_who_removes_nothing_says_so_once(root, caplog) -> None:
    for n in range(3):
        save(SyncCheckpointer(), root / f"step-{n}", n, None)
    caplog.clear()
    run = SyncCheckpointer(keep_last=1)
    for step in (5, 6):
        save(run, root / f"step-{step}", step, step)
    assert root.checkpoints() == ["step-0", "step-1", "step-2", "step-6"]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "keep_last" in said
    assert "step-0" in said
    caplog.clear()
    # The name does not tell which number is the step.
    run = SyncCheckpointer(keep_last=1)
    for step in (100, 200):
        save(run, root / "replica-0", step, step)
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
    save(SyncCheckpointer(), str(tmp_path / "others" / "step-0"), 9, 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-0").symlink_to(tmp_path / "others" / "step-0")
    run = SyncCheckpointer(keep_last=1)
    run.load(tmp_path / "run" / "step-0")
    for n in range(1, 4):
        save(run, str(tmp_path / "run" / f"step-{n}"), n, n)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-0", "step-3"]
    assert (tmp_path / "others" / "step-0" / INDEX).exists()
