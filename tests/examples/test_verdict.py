"""The verdict on a run's events, with invented events."""

import copy

import pytest
from verdict import Rank, heals_of, problems_of

SOURCE, PEER, RESTARTED = Rank(0, 0, 0), Rank(1, 0, 0), Rank(1, 0, 1)


def received(step: int, digest: str) -> dict:
    return {"event": "received", "step": step, "source": "s", "digest": digest, "nbytes": 8, "seconds": 0.5}


def sent(step: int, digest: str) -> dict:
    return {"event": "sent", "step": step, "source": "s", "digest": digest, "seconds": 0.25}


def finished(step: int = 9, digest: str = "f") -> dict:
    return {"event": "finished", "step": step, "digest": digest}


GOOD = {
    SOURCE: [{"event": "loaded", "weights": "w0"}, sent(0, "a"), sent(5, "b"), finished()],
    PEER: [{"event": "loaded", "weights": "w1"}, received(0, "a"), {"event": "gone", "status": -9}],
    RESTARTED: [{"event": "loaded", "weights": "w2"}, received(5, "b"), finished()],
}


def judged(**changes) -> list[str]:
    log = copy.deepcopy(GOOD)
    for where, events in changes.items():
        log[{"source": SOURCE, "peer": PEER, "restarted": RESTARTED}[where]] = events
    return problems_of(log, replicas=2, group_world_size=1)


def test_a_good_run_has_no_problems():
    assert judged() == []
    assert [(heal.receiver, heal.step, heal.intact) for heal in heals_of(GOOD)] == [
        (PEER, 0, True),
        (RESTARTED, 5, True),
    ]


@pytest.mark.parametrize(
    ("restarted", "problem"),
    [
        ([received(5, "tampered"), finished()], "received other bytes at step 5"),
        ([received(6, "b"), finished()], "from a source that never sent it"),
        ([received(5, "b"), finished(digest="other")], "ended with different states"),
        ([{"event": "loaded", "weights": "w0"}, received(5, "b"), finished()], "the run proves nothing"),
    ],
)
def test_each_fault_is_found(restarted, problem):
    found = judged(restarted=restarted)
    assert len(found) == 1
    assert problem in found[0]
