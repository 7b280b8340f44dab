"""A source and a receiver with several links between them: all carry, and none is needed."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from network import Agent, Links, NotPermitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.nightly


MIB = 48
STATE = MIB << 20
#: The program of a host without torch, whose small receives need one connection.
LIGHT = Path(__file__).with_name("light.py")


@contextlib.contextmanager
def hosts(mbits: list[int], advertise: str | None = None) -> Iterator[tuple[Links, Agent, dict[str, Any]]]:
    """Yields the links, the receiver, and what the source has published."""
    with contextlib.ExitStack() as stack:
        try:
            links = Links(mbits)
        except NotPermitted as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        stack.callback(links.remove)
        source = Agent(links.source, "serve", mib=MIB, advertise=advertise)
        stack.callback(source.end)
        receiver = Agent(links.receiver, "receive")
        stack.callback(receiver.end)
        yield links, receiver, source.next()


def receive(receiver: Agent, published: dict[str, Any], early: Callable[[], None] | None = None) -> dict[int, int]:
    """Returns the bytes that came over each link, once the state has been compared."""
    answer = receiver.ask(metadata=[published["metadata"]])
    while "seconds" not in answer:
        if early is not None and answer["done"] * 3 > answer["total"]:
            early()
            early = None
        answer = receiver.next()
    assert early is None, "it was over before anything could happen to it"
    assert answer["digest"] == published["digest"]
    return {int(here.split(".")[2]): nbytes for here, _, nbytes in answer["by_route"]}


def test_four_links_carry_as_much_as_they_can() -> None:
    with hosts([200, 200, 200, 50]) as (_, receiver, published):
        carried = receive(receiver, published)
    assert carried.keys() == {0, 1, 2, 3}
    # The slow one has a share, and a smaller one than the others.
    assert 0 < carried[3] < min(carried[0], carried[1], carried[2]), carried


def test_only_the_links_that_are_advertised_carry() -> None:
    with hosts([200, 200, 200], advertise="card1, 10.79.2.1") as (_, receiver, published):
        assert published["metadata"].startswith("http://10.79.1.1:")
        # Receivers begin by the host, which is the first one that is advertised.
        assert "~~10.79.2.1/" in published["metadata"]
        assert receive(receiver, published).keys() == {1, 2}
    with hosts([200, 200], advertise="10.79.1.1") as (_, receiver, published):
        assert "~" not in published["metadata"]
        assert receive(receiver, published).keys() == {1}


@pytest.mark.parametrize("link", [0, 1])
def test_a_link_that_is_cut_in_the_middle_is_done_without(link: int) -> None:
    with hosts([100, 100, 100]) as (links, receiver, published):
        carried = receive(receiver, published, lambda: links.cut(link))
    assert carried[link] < min(nbytes for other, nbytes in carried.items() if other != link), carried


@pytest.mark.parametrize("link", [0, 1])
def test_a_link_that_swallows_everything_is_done_without(link: int) -> None:
    with hosts([100, 100, 100]) as (links, receiver, published):
        carried = receive(receiver, published, lambda: links.swallow(link))
    assert carried[link] < min(nbytes for other, nbytes in carried.items() if other != link), carried


def test_links_that_swallow_everything_from_the_start_are_done_without() -> None:
    with hosts([100, 100, 100, 100]) as (links, receiver, published):
        preferred = int(published["metadata"].partition("~")[2].split(".")[2])
        # The link of the host, and that of the card by which a receive begins.
        for link in {0, preferred, 1}:
            links.swallow(link)
        answer = receiver.ask(metadata=[published["metadata"]])
        while "seconds" not in answer:
            answer = receiver.next()
        assert answer["digest"] == published["digest"]
        # The deadline is 90 s, and a source with one address may be silent for 15.
        assert answer["seconds"] < 40, answer


def connections_begun(host: str) -> int:
    """Returns how many connections have been attempted from a host so far."""
    command = ["ip", "netns", "exec", host, "cat", "/proc/net/snmp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names, values = (line.split() for line in done.stdout.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("ActiveOpens")])


def test_a_link_that_was_silent_is_not_waited_for_by_the_next_receive() -> None:
    with contextlib.ExitStack() as stack:
        try:
            links = Links([100, 100])
        except NotPermitted as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        stack.callback(links.remove)
        source = Agent(links.source, "serve", LIGHT, kib=64)
        stack.callback(source.end)
        receiver = Agent(links.receiver, "receive", LIGHT)
        stack.callback(receiver.end)
        [metadata] = source.next()["metadata"]

        def receive_lightly() -> tuple[int, int]:
            """Returns how many connections a receive began, and over which link it came."""
            before = connections_begun(links.receiver)
            answer = receiver.ask(metadata=[metadata])
            assert answer["right"]
            [(here, _, _)] = answer["by_route"]
            return connections_begun(links.receiver) - before, int(here.split(".")[2])

        begun, link = receive_lightly()
        assert begun == 1
        links.cut(link)
        begun, other = receive_lightly()
        assert begun == 2
        assert other != link
        assert receive_lightly() == (1, other)
