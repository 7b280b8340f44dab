"""Cards of several hosts, joined in several ways: each has its share, none is needed, ranks begin at different ones."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import pytest
from fabric import Fabric
from network import NotPermitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def receive(
    agent: Any, metadata: list[str], early: Callable[[], object] | None = None
) -> tuple[dict[tuple[str, str], int], dict[str, Any]]:
    """Returns the bytes by route, and the whole answer; ``early`` is called when a third has come."""
    answer = agent.ask(metadata=metadata, watched=early is not None)
    while "right" not in answer:
        if early is not None and answer["done"] * 3 > answer["total"]:
            early()
            early = None
        answer = agent.next()
    assert early is None, "it was over before anything could happen to it"
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


def test_a_receive_from_two_sources_uses_the_cards_of_both_and_survives_the_end_of_one() -> None:
    with fabric("rails", [[0, 1], [2, 3], [0, 1, 2, 3]]) as made:
        # The sources have no network in common: each is reached by the receiver alone.
        sources = [made.agent(number, "serve", kib=LARGE_KIB) for number in (0, 1)]
        receiver = made.agent(2, "receive")
        metadata = [source.next()["metadata"][0] for source in sources]
        by_route, _ = receive(receiver, metadata)
        expected = {made.address(number, rail) for number, rails in ((0, (0, 1)), (1, (2, 3))) for rail in rails}
        assert {there for _, there in by_route} == expected
        assert min(by_route.values()) > (LARGE_KIB << 10) // 16, by_route
        _, answer = receive(receiver, metadata, early=sources[1].kill)
        assert answer["troubles"]


@pytest.mark.parametrize("how", ["cut", "swallow"])
@pytest.mark.parametrize("rail", [0, 1])
def test_a_link_that_fails_in_the_middle_is_done_without(rail: int, how: str) -> None:
    with fabric("rails", [[0, 1, 2], [0, 1, 2]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        by_route, _ = receive(receiver, source.next()["metadata"], lambda: getattr(made, how)(0, rail))
        carried = {there: nbytes for (_, there), nbytes in by_route.items()}
        failed = carried.pop(made.address(0, rail), 0)
    assert failed < min(carried.values()), carried


def test_links_that_swallow_everything_from_the_start_are_done_without_and_not_waited_for_again() -> None:
    with fabric("rails", [[0, 1, 2], [0, 1, 2]]) as made:
        source, receiver = made.agent(0, "serve", kib=64), made.agent(1, "receive")
        metadata = source.next()["metadata"]
        receive(receiver, metadata)
        # The link of the host, and that of the card by which a receive begins.
        for rail in (0, 1):
            made.swallow(0, rail)
        by_route, first = receive(receiver, metadata)
        assert [there for _, there in by_route] == [made.address(0, 2)]
        _, second = receive(receiver, metadata)
        # A source with one address may be silent for 15 s.
        assert first["seconds"] < 40
        assert second["seconds"] < max(first["seconds"], 1)


def test_only_the_addresses_that_are_advertised_carry() -> None:
    with fabric("rails", [[0, 1, 2], [0, 1, 2]]) as made:
        listed = made.agent(0, "serve", kib=LARGE_KIB, advertise=f"card1, {made.address(0, 2)}")
        one = made.agent(0, "serve", kib=LARGE_KIB, advertise=made.address(0, 1))
        receiver, [metadata] = made.agent(1, "receive"), listed.next()["metadata"]
        assert metadata.startswith(f"http://{made.address(0, 1)}:")
        # Receivers begin by the host, which is the first one that is advertised.
        assert f"~~{made.address(0, 2)}/" in metadata
        by_route, _ = receive(receiver, [metadata])
        assert {there for _, there in by_route} == {made.address(0, rail) for rail in (1, 2)}
        [metadata] = one.next()["metadata"]
        assert "~" not in metadata
        by_route, _ = receive(receiver, [metadata])
        assert {there for _, there in by_route} == {made.address(0, 1)}


def test_ranks_of_one_host_spread_over_its_cards_and_small_receives_begin_there() -> None:
    with fabric("rails", [[0, 1, 2, 3], [0, 1, 2, 3], [0]]) as made:
        cards = [made.address(0, rail) for rail in range(4)]
        metadata = made.agent(0, "serve", kib=64, servers=8).next()["metadata"]
        named = [re.search(r"/[0-9a-f]{32}~([^/]+)/", one)[1].split("~") for one in metadata]
        assert [one[0] for one in named] == cards * 2
        for one, addresses in zip(metadata, named, strict=True):
            # The host is one of the addresses, too.
            assert {*addresses, one.partition("//")[2].partition(":")[0]} == set(cards)
        receiver = made.agent(1, "receive")
        for one, card in zip(metadata[:4], cards, strict=True):
            by_route, _ = receive(receiver, [one])
            assert {there for _, there in by_route} == {card}
        # A host with one card takes the way that there is, at once.
        lone = made.agent(2, "receive")
        for one in metadata[:4]:
            by_route, answer = receive(lone, [one])
            assert {there for _, there in by_route} == {cards[0]}
            assert answer["troubles"] == []
