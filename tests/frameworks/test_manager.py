"""tensorferry's Manager in a real job: every healthy replica sends to a killed one that heals."""

from __future__ import annotations

import pytest
from framework_ranks import Process

pytestmark = pytest.mark.nightly


torchft = pytest.importorskip("torchft")


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_every_healthy_replica_sends_to_one_that_heals():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=3000, heartbeat_timeout_ms=2000)
    started = []

    def start(name, seed):
        started.append(Process("manager_replica.py", lighthouse.address(), name, seed))
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
