"""Which network card of several a server prefers: by an imitated tree of the system, and with the seats of this one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tensorferry.net import addresses, cards, rails
from tensorferry.net.rails import preferred_card

if TYPE_CHECKING:
    from pathlib import Path

#: Two nodes with two cards and two accelerators each; a card and an accelerator of a kind share a switch.
BRIDGES = {0: "pci0000:00/0000:00:01.0", 1: "pci0000:00/0000:00:02.0", 2: "pci0000:80/0000:80:01.0"}
BRIDGES[3] = "pci0000:80/0000:80:02.0"
NAMES = {f"10.0.{n}.7": f"nic{n}" for n in range(4)}
RAILS = [(address, 25_000) for address in NAMES]


def accelerator(number: int) -> str:
    return f"0000:{0x3B + number:02x}:00.0"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with four cards and four accelerators."""
    interfaces, pci, nodes = (tmp_path / name for name in ("net", "pci", "node"))
    for folder in (interfaces, pci, nodes):
        folder.mkdir()
    for number, bridge in BRIDGES.items():
        node = number // 2
        for device in (f"0000:{0x10 + number:02x}:00.0", accelerator(number)):
            at = tmp_path / "devices" / bridge / device
            at.mkdir(parents=True)
            (at / "numa_node").write_text(f"{node}\n")
            (pci / device).symlink_to(at)
        (interfaces / f"nic{number}").mkdir()
        (interfaces / f"nic{number}" / "device").symlink_to(pci / f"0000:{0x10 + number:02x}:00.0")
        (nodes / f"node{node}").mkdir(exist_ok=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{node * 4}-{node * 4 + 2},{node * 4 + 3}\n")
    monkeypatch.setattr(cards, "_INTERFACES", interfaces)
    monkeypatch.setattr(cards, "_PCI", pci)
    monkeypatch.setattr(cards, "_NODES", nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(rails, "interfaces", lambda: [(name, address) for address, name in NAMES.items()])
    # Seats are shared by all processes of this machine.
    monkeypatch.setattr(rails, "cards_below", lambda name: [f"{name}-{tmp_path.name}-{os.getpid()}"])
    return tmp_path


def chosen(count: int, near: str | None = None, named: list[tuple[str, int]] = RAILS) -> list[str]:
    """Returns the cards that so many servers prefer, one after the other."""
    held = [preferred_card(named, None, near) for _ in range(count)]
    return [NAMES[one[0]] for one in held if one is not None]


def test_eight_servers_and_four_cards_mean_two_each() -> None:
    found = chosen(8)
    assert sorted(found) == sorted([f"nic{n}" for n in range(4)] * 2)
    # Of those that have ended nothing is left.
    assert chosen(4) == found[:4]


@pytest.mark.parametrize("number", range(4))
def test_the_card_behind_the_accelerator_s_own_bridge_is_the_nearest(number: int) -> None:
    assert chosen(2, accelerator(number)) == [f"nic{number}"] * 2


def test_a_card_of_the_same_node_is_nearer_than_one_of_another(host: Path) -> None:
    (host / "net" / "nic0" / "device").unlink()
    (host / "net" / "nic0" / "device").symlink_to(host / "pci" / "0000:12:00.0")
    near, other, far = (cards.distance(name, accelerator(0)) for name in ("nic1", "nic1", "nic2"))
    assert near == other < far
    assert cards.distance("nic0", accelerator(0)) > near
    assert chosen(2, accelerator(0)) == ["nic1", "nic1"]


def test_without_an_accelerator_the_processors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert chosen(4) == ["nic2", "nic3", "nic2", "nic3"]


def test_what_the_system_does_not_say_makes_no_difference(host: Path) -> None:
    for number in range(4):
        (host / "net" / f"nic{number}" / "device").unlink()
    assert chosen(4, accelerator(0)) == ["nic0", "nic1", "nic2", "nic3"]
    assert chosen(4, "0000:ff:00.0") == ["nic0", "nic1", "nic2", "nic3"]


def test_a_card_that_is_much_slower_is_not_preferred() -> None:
    assert chosen(4, named=[("10.0.0.7", 1_000), *RAILS[1:]]) == ["nic1", "nic2", "nic3", "nic1"]
    assert chosen(4, named=[("10.0.0.7", 0), *RAILS[1:]]) == ["nic0", "nic1", "nic2", "nic3"]


def test_who_names_addresses_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preferred_card(RAILS, "10.0.2.7,10.0.1.7", None) is None
    assert preferred_card(RAILS[:1], None, None) is None
    monkeypatch.setenv("TENSORFERRY_ADVERTISE", "10.0.2.7,10.0.1.7")
    assert preferred_card(RAILS, None, None) is None


def test_bonds_and_vlans_are_their_cards(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cards, "_INTERFACES", host / "net")
    monkeypatch.setattr(cards, "_PCI", host / "pci")
    for above, below in (("bond0", "nic2"), ("bond0", "nic3"), ("bond0.7", "bond0"), ("nic1.7", "nic1")):
        (host / "net" / above).mkdir(exist_ok=True)
        (host / "net" / above / f"lower_{below}").symlink_to(host / "net" / below)
    assert cards.cards_below("bond0.7") == ["nic2", "nic3"]
    assert cards.cards_below("nic1.7") == ["nic1"]
    assert cards.cards_below("nic0") == cards.cards_below("nic0")
    assert cards.distance("bond0.7", accelerator(3)) == cards.distance("nic3", accelerator(3))
    assert addresses.link_speed("bond0.7") == 0


def test_a_bridge_that_goes_while_it_is_looked_at_leads_nowhere(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = host / "net" / "br0" / "brif"
    members.mkdir(parents=True)
    real = type(members).iterdir

    def gone(path: Path) -> object:
        if path == members:
            members.rmdir()
        return real(path)

    monkeypatch.setattr(type(members), "iterdir", gone)
    assert cards.is_internal("br0")
