"""torchft's Manager under ``install``: a killed replica heals, with torchft's own transport and with tensorferry's."""

from __future__ import annotations

import os

import pytest
from framework_ranks import Process

pytestmark = pytest.mark.nightly


torchft = pytest.importorskip("torchft")


# DiLoCo heals in test_framework_examples.py as well.
CASES = [("ddp", "1")]
if os.environ.get("TENSORFERRY_ALL_FRAMEWORKS"):
    CASES += [("diloco", "1"), ("local_sgd", "1"), ("ddp", ""), ("diloco", ""), ("local_sgd", "")]


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize(("method", "installed"), CASES)
def test_a_killed_replica_heals(method, installed):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
    started = []

    def start(name, seed):
        about = (lighthouse.address(), method, name, seed)
        started.append(Process("manager_replica.py", *about, TENSORFERRY=installed))
        return started[-1]

    try:
        one, two = start("one", 1), start("two", 2)
        door = "tensorferry.torchft.transport" if installed else "torchft.checkpointing.http_transport"
        assert [each.wait_for("transport") for each in (one, two)] == [door] * 2
        for each in (one, two):
            each.wait_for("step")
        two.kill()
        again = start("two_again", 3)
        again.wait_for("healed")
        seen = dict(again.wait_for("step").split() for _ in range(5))
        while one.wait_for("step").split()[0] != max(seen, key=int):
            pass
        of_one = dict(line.split()[1:] for line in one.output if line.startswith("step "))
        assert seen.items() <= of_one.items()
        assert any("log tensorferry received step" in line for line in again.output) is bool(installed)
    finally:
        for each in started:
            each.kill()
        lighthouse.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_every_healthy_replica_sends_to_one_that_heals():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=3000, heartbeat_timeout_ms=2000)
    started = []

    def start(name, seed):
        started.append(Process("manager_replica.py", lighthouse.address(), "ddp", name, seed, EVERY_REPLICA=1))
        return started[-1]

    def sent(process):
        lines = [line.split()[1] for line in process.output if line.startswith("sent ")]
        return int(lines[-1]) if lines else 0

    try:
        one, two, three = (start(name, seed) for seed, name in enumerate(("one", "two", "three"), 1))
        for each in (one, two, three):
            while int(each.wait_for("step").split()[0]) < 3:
                pass
        three.kill()
        before = {each: sent(each) for each in (one, two)}
        again = start("three_again", 4)
        again.wait_for("healed")
        seen = dict(again.wait_for("step").split() for _ in range(3))
        for each in (one, two):
            each.wait_for("sent")
            while each.wait_for("step").split()[0] != max(seen, key=int):
                pass
            of_it = dict(line.split()[1:] for line in each.output if line.startswith("step "))
            assert seen.items() <= of_it.items()
            assert sent(each) > before[each]
        assert 32 << 20 < sum(sent(each) - before[each] for each in (one, two)) < 48 << 20
    finally:
        for each in started:
            each.kill()
        lighthouse.shutdown()
