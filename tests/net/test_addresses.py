"""The address in the metadata, the one on which a transport listens, and those that a source names besides."""

from __future__ import annotations

import socket
import urllib.parse
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from tensorferry import ConnectError, FetchTimeout, Network
from tensorferry.errors import InvalidArgument, SystemRefused
from tensorferry.net import addresses, rails
from tensorferry.net.rails import advertised_rails, first_card

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = timedelta(seconds=30)
HOST = [
    ("lo", "127.0.0.1"),
    ("lo", "::1"),
    ("eth0", "192.168.7.3"),
    ("ib0", "10.1.2.3"),
    ("ib0", "fe80::1"),
    ("v6", "fd00::7"),
]
#: Two cards, a bridge of containers with a port, one with a card, a tunnel, and a bond with a part.
CARDS = [
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


@pytest.fixture
def host(monkeypatch):
    """Simulates a host with several interfaces and no route out, whose name resolves only to loopback."""
    monkeypatch.setattr(addresses, "_interfaces", lambda: HOST)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(addresses, "_resolve", lambda *_, **__: ["127.0.1.1"])

    def no_route(*_):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(addresses.socket.socket, "connect", no_route)
    for name in ("TENSORFERRY_INTERFACE", "TENSORFERRY_ADVERTISE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def listening(interface=None):
    return addresses.listening_addresses(Network(interface=interface).interface)


def advertised(advertise=None, listening=None):
    return addresses.advertised_host(Network(advertise=advertise).advertise, listening)


@pytest.mark.parametrize(
    ("interface", "address"),
    [("ib0", "10.1.2.3"), ("v6", "fd00::7"), ("10.0.0.0/8", "10.1.2.3"), ("192.168.7.3", "192.168.7.3")],
)
def test_an_interface_is_chosen_by_name_address_or_network(host, interface, address):
    assert listening(interface) == [address]
    host.setenv("TENSORFERRY_INTERFACE", interface)
    assert listening(None) == [address]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("interface", ["eth7", "172.16.0.0/12", "10.1.2.4", "not an address"])
def test_one_that_is_not_there_is_named_beside_those_that_are(interface):
    with pytest.raises(InvalidArgument, match=r"ib0 10\.1\.2\.3") as caught:
        listening(interface)
    assert repr(interface) in str(caught.value)


def test_the_default_is_reachable_from_elsewhere(host):
    assert listening(None) == []
    # Neither the name, which leads to itself, nor loopback.
    assert advertised(None, None) == "192.168.7.3"
    host.setattr(addresses, "_resolve", lambda *_, **__: ["10.1.2.3"])
    assert advertised(None, None) == "node"
    for failure in (ConnectError("unknown"), FetchTimeout("timed out")):

        def unknown(*_, failure=failure, **__):
            raise failure

        host.setattr(addresses, "_resolve", unknown)
        assert advertised(None, None) == "192.168.7.3"
    host.setattr(addresses, "_interfaces", lambda: HOST[:2])
    assert advertised(None, None) == "127.0.0.1"


def test_what_is_advertised_can_be_said(host):
    assert advertised(None, "10.1.2.3") == "10.1.2.3"
    for advertise, told in (("gateway.example",) * 2, ("192.168.0.0/16", "192.168.7.3"), ("ib0", "10.1.2.3")):
        assert advertised(advertise, None) == told
    host.setenv("TENSORFERRY_ADVERTISE", "elsewhere")
    assert advertised(None, None) == "elsewhere"


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("interface", ["lo", "127.0.0.0/8", "::1"])
def test_a_transport_listens_on_the_chosen_interface(open_transport, interface):
    if interface == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    source = open_transport(interface=interface)
    url = urllib.parse.urlsplit(source.metadata())
    assert url.hostname in ("127.0.0.1", "::1")
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert open_transport().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
    outside = advertised(None, None)
    if outside not in ("127.0.0.1", "::1"):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((outside, url.port), timeout=10)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulates a host with :data:`CARDS`."""
    for name in ("eth0", "eth1", "docker0/brif/veth1", "br0/brif/eth2", "eth2/device", "veth1/brport", "tun0"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bond0", "slave0/device", "slave0/master/bonding"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tun0" / "tun_flags").write_text("0x1001")
    for module in (addresses, rails):
        monkeypatch.setattr(module, "interfaces", lambda: CARDS)
        monkeypatch.setattr(module, "link_speed", lambda name: 25_000 if name == "eth0" else 0)
    monkeypatch.setattr(rails, "_INTERFACES", tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("advertise", "listening", "named"),
    [
        # One address of each card.
        (None, [], ["10.0.0.7", "10.0.1.7", "10.0.2.7", "10.0.3.7"]),
        # Those that are listened on.
        (None, ["10.0.1.7", "10.0.0.7"], ["10.0.1.7", "10.0.0.7"]),
        # One choice means one address.
        (None, ["10.0.1.7"], []),
        ("10.0.1.7", [], []),
        ("10.0.1.7", ["10.0.1.7", "10.0.0.7"], []),
        ("node-7", [], []),
        # A list is what is named; a name is that of the first item alone.
        ("192.0.2.1,192.0.2.2", ["10.0.1.7"], ["192.0.2.1", "192.0.2.2"]),
        ("eth1, 10.0.0.0/24,192.0.2.1", [], ["10.0.1.7", "10.0.0.7", "192.0.2.1"]),
        ("node-7.example,10.0.0.7,10.0.1.7", [], ["10.0.0.7", "10.0.1.7"]),
        ("node-7.example,10.0.0.7", [], ["10.0.0.7"]),
    ],
)
@pytest.mark.usefixtures("cards")
def test_addresses_that_are_named_besides_the_host(advertise, listening, named) -> None:
    expected = [(address, 25_000 if address == "10.0.0.7" else 0) for address in named]
    assert advertised_rails(Network(advertise=advertise).advertise, listening) == expected


def test_what_leads_nowhere_is_not_named(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state in (("eth0", "up"), ("eth1", "down"), ("bond0", "unknown")):
        (cards / name / "operstate").write_text(state + "\n")
    assert [address for address, _ in advertised_rails((), [])] == ["10.0.0.7", "10.0.2.7", "10.0.3.7"]
    # A bridge that goes while it is looked at.
    members, real = cards / "br0" / "brif", type(cards).iterdir

    def gone(path: Path) -> object:
        if path == members:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(type(cards), "iterdir", gone)
    assert [address for address, _ in advertised_rails((), [])] == ["10.0.0.7", "10.0.3.7"]
    # With one card there is nothing to name.
    monkeypatch.setattr(rails, "interfaces", lambda: CARDS[:3])
    assert advertised_rails((), []) == []

    def refused() -> list[tuple[str, str]]:
        raise SystemRefused("no")

    monkeypatch.setattr(rails, "interfaces", refused)
    assert advertised_rails((), []) == []


@pytest.mark.usefixtures("cards")
def test_lists_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_INTERFACE", "eth1, 10.0.0.0/24,10.0.1.7")
    assert listening(None) == ["10.0.1.7", "10.0.0.7"]
    assert advertised("eth1, 10.0.0.0/24", None) == "10.0.1.7"
    assert advertised("node-7.example,10.0.0.7", None) == "node-7.example"
    with pytest.raises(InvalidArgument, match="interface='eth0,' must have an address between"):
        listening("eth0,")
    for wanted in ("10.0.0.7,", ",10.0.0.7", "10.0.0.7,,10.0.1.7", "10.0.0.7,node-7", "eth0,10.9.0.0/24"):
        with pytest.raises(InvalidArgument, match=r"advertise|10\.9\.0\.0"):
            advertised_rails(Network(advertise=wanted).advertise, [])


def test_ranks_begin_at_different_cards_of_those_that_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [(f"10.0.{n}.7", 25_000) for n in range(4)]

    def chosen(named: list[tuple[str, int]], count: int = 5, advertise: tuple[str, ...] = ()) -> list[str | None]:
        found = []
        for rank in range(count):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            found.append(first_card(named, advertise))
        return found

    a, b, c, d = (address for address, _ in fast)
    assert chosen(fast) == [a, b, c, d, a]
    assert chosen([(a, 12_499), *fast[1:]]) == [b, c, d, b, c]
    assert chosen([(a, 12_500), (b, 0), *fast[2:]]) == [a, b, c, d, a]
    assert chosen(fast[:1], 2) == chosen(fast, 2, (c, b)) == [None, None]
    for unknown in ("", "x"):
        monkeypatch.setenv("LOCAL_RANK", unknown)
        assert first_card(fast, ()) == a
