"""Several sources on separate links: the gain of a second source, and the cost of losing it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from network import Agent, Network, NotPermitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.nightly


MIB = 24
STATE = MIB << 20


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(sources=2, mbit=200)
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        yield made
    finally:
        made.remove()


@pytest.fixture
def fleet(network: Network) -> Iterator[tuple[list[Agent], list[str], Agent, str]]:
    """Two sources of the same state, their metadata, a receiver, and the state's digest."""
    with contextlib.ExitStack() as stack:

        def start(host: str, role: str, **options: Any) -> Agent:
            agent = Agent(host, role, **options)
            stack.callback(agent.end)
            return agent

        sources = [start(h, "serve", mib=MIB, advertise=f"10.77.{i}.2") for i, h in enumerate(network.sources)]
        receiver = start(network.receiver, "receive")
        published = [source.next() for source in sources]
        assert published[0]["digest"] == published[1]["digest"]
        yield sources, [t["metadata"] for t in published], receiver, published[0]["digest"]


def receive(receiver: Agent, metadata: list[str], at_half: Callable[[], None] | None = None) -> dict[str, Any]:
    answer = receiver.ask(metadata=metadata)
    while "seconds" not in answer:
        if at_half is not None and answer["done"] * 3 > answer["total"]:
            at_half()
            at_half = None
        answer = receiver.next()
    assert at_half is None, "it was over before anything could happen to it"
    return answer


def served(sources: list[Agent]) -> list[int]:
    return [source.ask()["served"] for source in sources]


def test_two_sources_carry_half_each(fleet: Any, record_property: Callable[[str, object], None]) -> None:
    sources, metadata, receiver, digest = fleet
    one = receive(receiver, metadata[:1])
    assert one["digest"] == digest
    before = served(sources)
    assert before[0] >= STATE
    assert before[1] == 0
    two = receive(receiver, metadata)
    assert two["digest"] == digest
    assert two["troubles"] == []
    shares = [(now - then) / STATE for now, then in zip(served(sources), before, strict=True)]
    # The links are equally fast and carry nothing else: with half of the bytes on each it takes half as long.
    assert all(0.35 < share < 0.65 for share in shares), shares
    record_property("speedup of a second source", one["seconds"] / two["seconds"])
    print(f"one source {one['seconds']:.2f} s, two {two['seconds']:.2f} s, {one['seconds'] / two['seconds']:.2f} x")


def test_a_source_that_is_killed_costs_its_share(fleet: Any) -> None:
    sources, metadata, receiver, digest = fleet
    got = receive(receiver, metadata, at_half=sources[1].kill)
    assert got["digest"] == digest
    assert any("10.77.1.2" in trouble for trouble in got["troubles"])
    # The survivor sent only bytes that had not arrived from the dead source; ranges are 16 MiB at most.
    assert served(sources[:1])[0] < STATE


def test_a_link_that_goes_silent_costs_its_share(fleet: Any, network: Network) -> None:
    sources, metadata, receiver, digest = fleet
    got = receive(receiver, metadata, at_half=lambda: network.cut(1))
    assert got["digest"] == digest
    assert any("10.77.1.2" in trouble for trouble in got["troubles"])
    assert served(sources[:1])[0] < STATE
