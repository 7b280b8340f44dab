"""The scripts of examples/frameworks run: replicas that are killed heal, and jobs go on from what they have saved."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import pytest
from digests import digest
from framework_ranks import EXAMPLES, Process, job
from safetensors.torch import load_file
from torch.distributed import TCPStore

import tensorferry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly


def losses(output: list[str]) -> dict[int, str]:
    lines = [line.split() for line in output if line.startswith("step ")]
    return {int(step): loss for _, step, _, loss in lines}


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torchft_ddp", {"TENSORFERRY_TLS": "1", "TENSORFERRY_SECRET": "a secret of more than 16 bytes"}),
        ("torchft_diloco", {}),
    ],
    ids=["ddp, secured", "diloco"],
)
def test_a_killed_replica_heals_and_trains_on_with_the_same_loss(name, options, tmp_path):
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
    stores, started = [], []

    def start(replica):
        # Each replica has a store, which torchrun would make.
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": stores[-1].port}
        about = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA": replica} | options
        # torchft logs to stderr, in the middle of lines.
        with (tmp_path / f"{len(started)}.log").open("w") as log:
            started.append(Process(EXAMPLES / f"{name}.py", errors=log, **rank, **about))
        return started[-1]

    try:
        one, two = start(0), start(1)
        for each in (one, two):
            each.wait_for("step")
        two.kill()
        again = start(1)
        again.wait_for("healed")
        for _ in range(5):
            last = int(again.wait_for("step").split()[0])
        while int(one.wait_for("step").split()[0]) < last:
            pass
        healed, whole = losses(again.output), losses(one.output)
        assert min(healed) > 1
        if name == "torchft_ddp":
            [line] = [line for line in (tmp_path / "2.log").read_text().splitlines() if "received step" in line]
            # Four of the model, and of each exp_avg, exp_avg_sq and step.
            assert "with TLS, with a secret, 16 of 16 tensors in place" in line
        assert {step: healed[step] for step in healed if step <= last}.items() <= whole.items()
    finally:
        for each in started:
            each.kill()
        lighthouse.shutdown()


def run(folder: Path, *script: object, world: int = 2, **environment: object) -> dict[int, str]:
    with job(*script, folder=folder, world=world, **environment) as ranks:
        for rank in ranks:
            rank.end(120)
        return losses(ranks[0].output)


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize(
    ("name", "world", "checkpoints"),
    [("lightning_fsdp2", 2, "checkpoints-of-fsdp2"), ("lightning_checkpoint_io", 1, "checkpoints-of-the-plugin")],
)
def test_lightning_goes_on_from_its_checkpoint_as_if_it_had_not_ended(name, world, checkpoints, tmp_path):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    # Eight steps: two epochs have as many.
    script = (EXAMPLES / f"{name}.py", 2)
    whole = run(tmp_path, *script, world=world)
    assert list(whole) == list(range(8))
    first, newest = sorted((tmp_path / checkpoints).iterdir())
    assert len(list(newest.rglob("index.safetensors"))) == 1
    assert not list(tmp_path.rglob("*.distcp"))
    shutil.rmtree(newest)
    assert run(tmp_path, *script, world=world) == {step: whole[step] for step in range(4, 8)}
    assert sorted((tmp_path / checkpoints).iterdir()) == [first, newest]


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_accelerate_goes_on_from_torchs_checkpoint_and_from_its_own(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate.utils import merge_fsdp_weights

    script = ("with_cpu_shards.py", EXAMPLES / "accelerate_fsdp2.py")
    theirs, ours = (tmp_path / name / "checkpoints" for name in ("theirs", "ours"))
    ours.mkdir(parents=True)
    theirs.parent.mkdir()
    by_torch = run(theirs.parent, *script, 8, THEIRS=1)
    assert list(by_torch) == list(range(8))
    assert list(theirs.rglob("*.distcp"))
    shutil.copytree(theirs / "step-4", ours / "step-4")
    whole = run(ours.parent, *script, 12)
    assert list(whole) == list(range(4, 12))
    assert {step: whole[step] for step in range(4, 8)} == {step: by_torch[step] for step in range(4, 8)}
    assert len(list((ours / "step-8").rglob("index.safetensors"))) == 2
    assert not list((ours / "step-8").rglob("*.distcp"))
    shutil.rmtree(ours / "step-12")
    assert run(ours.parent, *script, 12) == {step: whole[step] for step in range(8, 12)}
    with tensorferry.install():
        for folder in (theirs, ours):
            merge_fsdp_weights(str(folder / "step-8" / "pytorch_model_fsdp_0"), str(folder / "merged"))
    merged = [load_file(folder / "merged" / "model.safetensors") for folder in (theirs, ours)]
    assert digest(merged[0]) == digest(merged[1])
