"""Ranks on hosts of their own load the same state: what they bring each other, and what harm one can do."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fabric import Fabric
from network import Agent, NotPermitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(240),
    pytest.mark.beyond_torchft,
]

PROGRAM = Path(__file__).parents[3] / "benches" / "shared_reads_host.py"
MIB, RANKS = 32, 3
STATE = MIB << 20
#: One copy takes 3.4 s.
MBIT = 80


class Loading:
    """A source, and ranks that load its state together."""

    def __init__(self, fabric: Fabric, start: Callable[[int], Agent]) -> None:
        self.fabric = fabric
        self.source, *self.ranks = (start(number) for number in range(RANKS + 1))
        for agent in (self.source, *self.ranks):
            assert agent.next() == {"ready": True}
        master = fabric.address(1, 0)
        for rank, agent in enumerate(self.ranks):
            joining = {"rank": rank, "world": RANKS, "master": master, "port": 29500, "interface": "card0"}
            self._order(agent, do="join", patience=20, **joining)
        for agent in self.ranks:
            assert agent.next() == {"joined": True}
        self.metadata = self.source.ask(do="serve", mib=MIB)["metadata"]
        self._before = 0

    @staticmethod
    def _order(agent: Agent, **what: Any) -> None:
        agent.process.stdin.write(json.dumps(what) + "\n")
        agent.process.stdin.flush()

    def served(self) -> int:
        """The bytes that the source has served since the load began."""
        return self.source.ask(do="count")["served"] - self._before

    def begin(self, relay: bool = True, **more: Any) -> None:
        """Has all ranks begin to load."""
        self._before += self.served()
        what = {"mib": MIB, "metadata": self.metadata, "relay": relay, "tells": True, "timeout": 60, **more}
        for agent in self.ranks:
            self._order(agent, do="load", at=time.monotonic() + 0.5, environment={}, **what)

    def past(self, share: float, rank: int) -> None:
        """Waits until a rank has more than this share of what it wants."""
        while (said := self.ranks[rank].next()).get("done", 0) <= share * STATE:
            assert "seconds" not in said, "it was over before anything could happen to it"

    def end(self, *ranks: int) -> list[dict[str, Any]]:
        """Waits until the loads of these ranks have ended; returns what they say of them."""
        return [next(said for said in self.ranks[rank].lines() if "seconds" in said) for rank in ranks]


@contextlib.contextmanager
def all_started() -> Iterator[Loading]:
    with contextlib.ExitStack() as stack:
        try:
            fabric = Fabric("rails", [[0]] * (RANKS + 1), MBIT)
        except NotPermitted as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        stack.callback(fabric.remove)

        def start(number: int) -> Agent:
            agent = Agent(fabric.hosts[number], fabric.address(number, 0), PROGRAM)
            stack.callback(agent.end)
            stack.callback(agent.kill)
            return agent

        yield Loading(fabric, start)


@pytest.fixture
def loading() -> Iterator[Loading]:
    """Those of one test."""
    with all_started() as loading:
        yield loading


def test_slices_that_all_ranks_need_leave_the_source_about_once(loading: Loading) -> None:
    loading.begin()
    told = loading.end(0, 1, 2)
    sent = loading.served()
    assert [(one["equal"], one["error"]) for one in told] == [(True, "")] * RANKS
    assert sent < 2 * STATE, f"{sent / STATE:.2f} copies have left the source"
    assert sum(one["report"]["relayed"] for one in told) > STATE
    for more in ({"relay": False}, {"own": True}):
        loading.begin(**more)
        told = loading.end(0, 1, 2)
        assert [(one["equal"], one["error"], one["report"]["relayed"]) for one in told] == [(True, "", 0)] * RANKS


@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
def test_a_rank_that_is_lost_is_done_without(how: str, loading: Loading) -> None:
    loading.begin()
    loading.past(0.3, 2)
    if how == "cut off":
        loading.fabric.cut(3, 0)
    else:
        loading.ranks[2].process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    # torch ends the load, since a rank is missing that should say how its part went. What the others need is there.
    assert [one["equal"] for one in loading.end(0, 1)] == [True, True]


def test_a_source_that_dies_ends_every_load_with_an_error(loading: Loading) -> None:
    loading.begin(timeout=20)
    loading.past(0.1, 0)
    loading.source.kill()
    for one in loading.end(0, 1, 2):
        # Who has everything by then, and the digests, needs the source no more.
        assert one["equal"] or one["error"], one
