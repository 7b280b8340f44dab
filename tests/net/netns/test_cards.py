"""Cards of two hosts, joined in several ways: each has its share, and none is needed."""

from __future__ import annotations

import contextlib
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


def receive(agent: Any, metadata: list[str], early: Callable[[], object] | None = None) -> dict[tuple[str, str], int]:
    """Returns the bytes by route; ``early`` is called when a third has come."""
    answer = agent.ask(metadata=metadata, watched=early is not None)
    while "right" not in answer:
        if early is not None and answer["done"] * 3 > answer["total"]:
            early()
            early = None
        answer = agent.next()
    assert early is None, "it was over before anything could happen to it"
    assert answer["right"]
    return {(here, there): nbytes for here, there, nbytes in answer["by_route"]}


@pytest.mark.parametrize("kind", ["rails", "ipv6", "shared", "routed"])
def test_every_card_on_either_side_has_a_share(kind: str) -> None:
    with fabric(kind, [[0, 1], [0, 1]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        by_route = receive(receiver, source.next()["metadata"])
        for number, way in ((0, "tx"), (1, "rx")):
            carried = [made.carried(number, rail, way) for rail in (0, 1)]
            assert min(carried) > (LARGE_KIB << 10) // 4, (number, carried)
    assert {there for _, there in by_route} == {made.address(0, rail) for rail in (0, 1)}
    assert {here for here, _ in by_route} == {made.address(1, rail) for rail in (0, 1)}


@pytest.mark.parametrize("how", ["cut", "swallow"])
@pytest.mark.parametrize("rail", [0, 1])
def test_a_link_that_fails_in_the_middle_is_done_without(rail: int, how: str) -> None:
    with fabric("rails", [[0, 1, 2], [0, 1, 2]]) as made:
        source, receiver = made.agent(0, "serve", kib=LARGE_KIB), made.agent(1, "receive")
        by_route = receive(receiver, source.next()["metadata"], lambda: getattr(made, how)(0, rail))
        carried = {there: nbytes for (_, there), nbytes in by_route.items()}
        failed = carried.pop(made.address(0, rail), 0)
    assert failed < min(carried.values()), carried
