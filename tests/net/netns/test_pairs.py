"""Cards of several hosts, joined in several ways: each has its share, and ranks of one host begin at different ones."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fabric import Fabric
from network import NotPermitted

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(120),
    pytest.mark.beyond_torchft,
]

LARGE_KIB = 32 << 10


@contextlib.contextmanager
def fabric(kind: str, cards: list[list[int]]) -> Iterator[Fabric]:
    try:
        made = Fabric(kind, cards)
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        yield made
    finally:
        made.remove()


def receive(agent: Any, metadata: list[str], **order: Any) -> tuple[dict[tuple[str, str], int], dict[str, Any]]:
    """Returns the bytes by route, and the whole answer."""
    answer = agent.ask(metadata=metadata, **order)
    assert answer["right"]
    return {(here, there): nbytes for here, there, nbytes in answer["by_route"]}, answer


@pytest.mark.parametrize("kind", ["rails", "ipv6", "shared", "routed"])
def test_every_card_on_either_side_has_a_share(kind: str) -> None:
    with fabric(kind, [[0, 1], [0, 1]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        by_route, _ = receive(receiver, source.next()["metadata"])
        for number, way in ((0, "tx"), (1, "rx")):
            carried = [made.carried(number, rail, way) for rail in (0, 1)]
            assert min(carried) > (LARGE_KIB << 10) // 4, (number, carried)
    assert {there for _, there in by_route} == {made.address(0, rail) for rail in (0, 1)}
    assert {here for here, _ in by_route} == {made.address(1, rail) for rail in (0, 1)}


def test_a_receive_from_two_sources_uses_the_cards_of_both() -> None:
    with fabric("rails", [[0, 1], [2, 3], [0, 1, 2, 3]]) as made:
        # The sources have no network in common: each is reached by the receiver alone.
        sources = [made.agent(number, "serve", kib=LARGE_KIB) for number in (0, 1)]
        receiver = made.agent(2, "receive")
        by_route, _ = receive(receiver, [source.next()["metadata"][0] for source in sources])
    expected = {made.address(number, rail) for number, rails in ((0, (0, 1)), (1, (2, 3))) for rail in rails}
    assert {there for _, there in by_route} == expected
    assert min(by_route.values()) > (LARGE_KIB << 10) // 16, by_route


def test_a_container_with_one_card_of_several_names_none() -> None:
    with fabric("rails", [[1], [0, 1, 2]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        metadata = source.next()["metadata"]
        assert "~" not in metadata[0]
        by_route, _ = receive(receiver, metadata)
    assert by_route.keys() == {(made.address(1, 1), made.address(0, 1))}


def named_by(metadata: str) -> list[str]:
    """Returns the addresses that metadata names besides the host, the preferred one first."""
    found = re.search(r"/[0-9a-f]{32}~([^/]+)/", metadata)
    assert found is not None, metadata
    return found[1].split("~")


def card_of(metadata: str) -> str:
    return named_by(metadata)[0]


def test_servers_of_one_host_spread_over_its_cards_and_small_receives_begin_there() -> None:
    with fabric("rails", [[0, 1, 2, 3], [0, 1, 2, 3], [0]]) as made:
        cards = {made.address(0, rail) for rail in range(4)}
        two_each = Counter(dict.fromkeys(cards, 2))
        # They start at the same time: the cards are shared out among all servers, not within each process.
        first, second = (made.agent(0, "serve", kib=64, servers=4) for _ in range(2))
        metadata = first.next()["metadata"]
        more = second.next()["metadata"]
        assert Counter(map(card_of, metadata + more)) == two_each
        for one in metadata:
            # The host is one of the addresses, too.
            host = one.partition("//")[2].partition(":")[0]
            assert {*named_by(one), host} == cards
            assert len(named_by(one)) == (4 if card_of(one) == host else 3)
        receiver = made.agent(1, "receive")
        for one in metadata:
            by_route, _ = receive(receiver, [one])
            assert {there for _, there in by_route} == {card_of(one)}
        # One that is killed gives its seats back.
        first.kill()
        third = made.agent(0, "serve", kib=64, servers=4)
        assert Counter(map(card_of, more + third.next()["metadata"])) == two_each
        # A host with one card takes the way that there is, at once.
        lone = made.agent(2, "receive")
        for one in more:
            by_route, answer = receive(lone, [one])
            assert {there for _, there in by_route} == {made.address(0, 0)}
            assert answer["troubles"] == []


def test_each_card_can_be_measured_by_itself() -> None:
    with fabric("rails", [[0, 1], [0, 1]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        _, answer = receive(receiver, source.next()["metadata"], measured=True)
    found = {there: (nbytes, seconds, here) for there, nbytes, seconds, here in answer["measured"]}
    assert found.keys() == {made.address(0, rail) for rail in (0, 1)}
    for there, (nbytes, seconds, here) in found.items():
        assert here.split(".")[2] == there.split(".")[2]
        assert nbytes > 0
        assert seconds > 0
