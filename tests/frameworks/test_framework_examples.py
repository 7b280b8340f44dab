"""The scripts of examples/frameworks run: replicas that are killed heal, and jobs go on from what they have saved."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from framework_ranks import Process, job
from torch.distributed import TCPStore

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


def losses(output: list[str]) -> dict[int, str]:
    lines = [line.split() for line in output if line.startswith("step ")]
    return {int(step): loss for _, step, _, loss in lines}


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("name", ["torchft_ddp", "torchft_diloco"])
def test_a_killed_replica_heals_and_trains_on_with_the_same_loss(name, tmp_path):
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
    stores, started = [], []

    def start(replica):
        # Each replica has a store, which torchrun would make.
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": stores[-1].port}
        about = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA": replica}
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
        assert {step: healed[step] for step in healed if step <= last}.items() <= whole.items()
    finally:
        for each in started:
            each.kill()
        lighthouse.shutdown()


def run(framework: str, folder: Path) -> dict[int, str]:
    # Eight steps either way: two epochs of Lightning have as many.
    script = {
        "lightning": (EXAMPLES / "lightning_fsdp2.py", 2),
        "accelerate": ("with_cpu_shards.py", EXAMPLES / "accelerate_fsdp2.py", 8),
    }[framework]
    with job(*script, folder=folder) as ranks:
        for rank in ranks:
            rank.end(100)
        return losses(ranks[0].output)


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_a_job_goes_on_from_its_checkpoint_as_if_it_had_not_ended(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    whole = run(framework, tmp_path)
    assert list(whole) == list(range(8))
    first, newest = sorted((tmp_path / "checkpoints").iterdir())
    assert len(list(newest.rglob("index.safetensors"))) == (2 if framework == "accelerate" else 1)
    assert not list(tmp_path.rglob("*.distcp"))
    shutil.rmtree(newest)
    assert run(framework, tmp_path) == {step: whole[step] for step in range(4, 8)}
    assert sorted((tmp_path / "checkpoints").iterdir()) == [first, newest]
