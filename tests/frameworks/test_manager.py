"""tensorferry's Manager in a real job: a killed replica heals in place, and every healthy one sends to it."""

from __future__ import annotations

import json

import pytest
from framework_ranks import Process

from nights import mostly_at_night

torchft = pytest.importorskip("torchft")

pytestmark = [pytest.mark.process, pytest.mark.waits, pytest.mark.timeout(270)]

#: The options of the replica that heals, and how many of the tensors come in place, and not in place.
CASES = {
    "asynchronous": ({"primed": True}, 17, 0),
    "synchronous": ({"primed": True, "use_async_quorum": False}, 17, 0),
    "a new optimizer": ({}, 5, 12),
    "midway it fails": ({"primed": True, "fails": True}, 17, 0),
    "it does not fit": ({"primed": True, "differs": True}, None, None),
    "off": ({"primed": True, "in_place": False}, None, None),
}


class Job:
    """Replicas, all of which are killed at the end."""

    def __init__(self):
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=1000
        )
        self.started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.started:
            each.kill()
        self.lighthouse.shutdown()

    def start(self, name, **options):
        seed = len(self.started) + 1
        self.started.append(Process("manager_replica.py", self.lighthouse.address(), name, seed, json.dumps(options)))
        return self.started[-1]

    def train(self, count, **options):
        """Starts ``count`` replicas, and waits until each has taken three steps."""
        started = [self.start(f"replica_{number}", **options) for number in range(count)]
        for each in started:
            while int(each.wait_for("step").split()[0]) < 3:
                pass
        return started


def trains_as(again, healthy):
    """Checks that three steps of ``again`` are, bit for bit, those of the others."""
    again.wait_for("healed")
    seen = dict(again.wait_for("step").split() for _ in range(3))
    for each in healthy:
        while int(each.wait_for("step").split()[0]) < int(max(seen, key=int)):
            pass
        assert seen.items() <= dict(line.split()[1:] for line in each.output if line.startswith("step ")).items()


@pytest.mark.parametrize("case", mostly_at_night(list(CASES)))
def test_a_killed_replica_heals_in_place(case):
    options, in_place, fresh = CASES[case]
    with Job() as job:
        one, two = job.train(2, use_async_quorum=options.get("use_async_quorum", True))
        two.kill()
        again = job.start("replica_1", **options)
        trains_as(again, [one])
    output = "".join(again.output)
    assert ("some of its tensors may have new values" in output) is (case == "midway it fails")
    assert ("receiving into fresh memory: nothing was overwritten" in output) is (case == "it does not fit")
    if in_place is None:
        assert "tensors in place" not in output
    else:
        assert f"{in_place} of {in_place + fresh} tensors in place" in output


@pytest.mark.nightly
def test_every_healthy_replica_sends_to_one_that_heals():
    def sent(process):
        lines = [line.split()[1] for line in process.output if line.startswith("sent ")]
        return int(lines[-1]) if lines else 0

    with Job() as job:
        one, two, three = job.train(3)
        three.kill()
        before = {each: sent(each) for each in (one, two)}
        trains_as(job.start("three_again"), (one, two))
        for each in (one, two):
            assert sent(each) > before[each]
        assert 32 << 20 < sum(sent(each) - before[each] for each in (one, two)) < 48 << 20
