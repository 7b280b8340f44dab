"""The addresses that a source names besides the one in its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tensorferry.errors import InvalidArgument, SystemRefused
from tensorferry.net import addresses, cards, rails
from tensorferry.net.rails import advertised_rails

if TYPE_CHECKING:
    from pathlib import Path

OWN = [
    ("lo", "127.0.0.1"),
    ("eth0", "fd00::7"),
    ("eth0", "10.0.0.7"),
    ("eth1", "10.0.1.7"),
    ("eth1", "fe80::7"),
    ("docker0", "172.17.0.1"),
    ("br0", "10.0.2.7"),
    ("tun0", "10.8.0.2"),
    ("veth1", "10.11.0.1"),
    ("bond0", "10.0.3.7"),
    ("slave0", "10.0.4.7"),
]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with two cards, a bridge of containers with a port, one with a card, a tunnel, and a bond with a part."""
    for name in ("eth0", "eth1", "docker0/brif/veth1", "br0/brif/eth2", "eth2/device", "veth1/brport", "tun0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bond0", "slave0/device", "slave0/master/bonding"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tun0" / "tun_flags").write_text("0x1001")
    speeds = {"eth0": 25_000}
    for module in (addresses, rails):
        monkeypatch.setattr(module, "interfaces", lambda: OWN)
        monkeypatch.setattr(module, "link_speed", lambda name: speeds.get(name, 0))
    monkeypatch.setattr(cards, "_INTERFACES", tmp_path)
    return tmp_path


def test_one_address_of_each_card_is_named() -> None:
    assert advertised_rails(None, []) == [
        ("10.0.0.7", 25_000),
        ("10.0.1.7", 0),
        ("10.0.2.7", 0),
        ("10.0.3.7", 0),
    ]


def test_a_card_without_a_link_is_not_named(host: Path) -> None:
    (host / "eth0" / "operstate").write_text("up\n")
    (host / "eth1" / "operstate").write_text("down\n")
    (host / "bond0" / "operstate").write_text("unknown\n")
    assert [address for address, _ in advertised_rails(None, [])] == ["10.0.0.7", "10.0.2.7", "10.0.3.7"]


def test_one_choice_means_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised_rails("10.0.1.7", []) == []
    assert advertised_rails("node-7", []) == []
    assert advertised_rails(None, ["10.0.1.7"]) == []
    monkeypatch.setenv("TENSORFERRY_ADVERTISE", "eth0")
    assert advertised_rails(None, []) == []


def test_the_addresses_that_are_listened_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = addresses.listening_addresses("eth1, 10.0.0.0/24,10.0.1.7")
    assert listening == ["10.0.1.7", "10.0.0.7"]
    assert advertised_rails(None, listening) == [("10.0.1.7", 0), ("10.0.0.7", 25_000)]
    assert addresses.advertised_host(None, listening[0]) == "10.0.1.7"
    assert advertised_rails("10.0.1.7", listening) == []
    assert advertised_rails("192.0.2.1,192.0.2.2", listening[:1]) == [("192.0.2.1", 0), ("192.0.2.2", 0)]
    monkeypatch.setenv("TENSORFERRY_INTERFACE", "eth0,eth1")
    assert addresses.listening_addresses(None) == ["10.0.0.7", "10.0.1.7"]
    with pytest.raises(InvalidArgument, match="interface='eth0,' must have an address between"):
        addresses.listening_addresses("eth0,")
    with pytest.raises(InvalidArgument, match="no interface or address 'eth9'"):
        addresses.listening_addresses("eth0,eth9")


def test_a_list_is_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised_rails("eth1, 10.0.0.0/24,192.0.2.1", []) == [
        ("10.0.1.7", 0),
        ("10.0.0.7", 25_000),
        ("192.0.2.1", 0),
    ]
    assert addresses.advertised_host("eth1, 10.0.0.0/24", None) == "10.0.1.7"
    assert advertised_rails("node-7.example,10.0.0.7,10.0.1.7", []) == [("10.0.0.7", 25_000), ("10.0.1.7", 0)]
    assert addresses.advertised_host("node-7.example,10.0.0.7", None) == "node-7.example"
    assert advertised_rails("node-7.example,10.0.0.7", []) == [("10.0.0.7", 25_000)]
    monkeypatch.setenv("TENSORFERRY_ADVERTISE", "10.0.1.7,10.0.0.7")
    assert advertised_rails(None, []) == [("10.0.1.7", 0), ("10.0.0.7", 25_000)]


@pytest.mark.parametrize(
    "wanted", ["10.0.0.7,", ",10.0.0.7", "10.0.0.7,,10.0.1.7", "10.0.0.7,node-7", "eth0,10.9.0.0/24"]
)
def test_a_list_with_something_else_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidArgument, match=r"advertise|10\.9\.0\.0"):
        advertised_rails(wanted, [])


def test_a_host_that_does_not_list_its_interfaces_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> list[tuple[str, str]]:
        raise SystemRefused("no")

    monkeypatch.setattr(rails, "interfaces", refused)
    assert advertised_rails(None, []) == []


def test_with_one_card_there_is_nothing_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "interfaces", lambda: OWN[:3])
    assert advertised_rails(None, []) == []
