"""A real torchft job heals through our transport: every heal is bit-equal, and so are all replicas at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nights import mostly_at_night

pytest.importorskip("torchft")

from scenario import Outcome, Scenario, run

pytestmark = pytest.mark.process


MATRIX = {
    "one_of_three_256_mib": {"pad_mib": 256},
    "one_of_three_in_4_chunks_sync_quorum": {"chunks": 4, "sync_quorum": True},
    "two_of_four_at_once": {"replicas": 4, "kill": 2},
    "two_ranks_per_group": {"replicas": 2, "group_world_size": 2, "chunks": 4},
}


def play(directory: Path, transport: str, **options) -> Outcome:
    scenario = Scenario(transport=transport, directory=directory, **options)
    outcome = run(scenario, lambda seconds, text: print(f"{seconds:7.1f} s  {text}"))
    for heal in outcome.heals:
        print(f"{heal.receiver} from {heal.source} step {heal.step}: {heal.nbytes} B in {heal.receive_seconds:.3f} s")
    if outcome.problems:
        log = (directory / "torchft.log").read_text(encoding="utf-8", errors="replace")
        print("\n".join(log.splitlines()[-200:]))
    return outcome


# The next test starts replicas as the demo does, anew.
@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("name", mostly_at_night(MATRIX))
def test_killed_replicas_heal_bit_equal(name: str, tmp_path: Path, pytestconfig: pytest.Config):
    options = MATRIX[name]
    outcome = play(tmp_path, pytestconfig.getoption("--transport"), **options)
    assert outcome.problems == []
    # No problems means that all of this was compared, so see that there was something to compare.
    ranks = options.get("group_world_size", 1)
    after_kill = [heal for heal in outcome.heals if heal.receiver.life == 1 and heal.step > 0]
    assert {(heal.receiver.replica, heal.receiver.rank) for heal in after_kill} == {
        (replica, rank) for replica in range(1, options.get("kill", 1) + 1) for rank in range(ranks)
    }
    assert all(heal.intact for heal in outcome.heals)
    assert all(heal.nbytes >= options.get("pad_mib", 1) * 2**20 for heal in after_kill)
    assert len(outcome.digests) == ranks
    assert len(set(outcome.digests.values())) == ranks, "the ranks of a group hold different parts"
