"""The address in the metadata, and the one on which a transport listens."""

import socket
import urllib.parse
from datetime import timedelta

import pytest

from tensorferry import ConnectError, FetchTimeout, InvalidArgument
from tensorferry.net import addresses

TIMEOUT = timedelta(seconds=30)
HOST = [
    ("lo", "127.0.0.1"),
    ("lo", "::1"),
    ("eth0", "192.168.7.3"),
    ("ib0", "10.1.2.3"),
    ("ib0", "fe80::1"),
    ("v6", "fd00::7"),
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


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("ib0", "10.1.2.3"),
        ("eth0", "192.168.7.3"),
        ("v6", "fd00::7"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("192.168.7.3", "192.168.7.3"),
        ("fd00::/8", "fd00::7"),
    ],
)
def test_an_interface_is_chosen_by_name_address_or_network(host, interface, address):
    assert addresses.listening_addresses(interface) == [address]
    host.setenv("TENSORFERRY_INTERFACE", interface)
    assert addresses.listening_addresses(None) == [address]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("interface", ["eth7", "172.16.0.0/12", "10.1.2.4", "not an address"])
def test_one_that_is_not_there_is_named_beside_those_that_are(interface):
    with pytest.raises(InvalidArgument, match=r"ib0 10\.1\.2\.3") as caught:
        addresses.listening_addresses(interface)
    assert repr(interface) in str(caught.value)


def test_the_default_is_reachable_from_elsewhere(host):
    assert addresses.listening_addresses(None) == []
    assert (
        addresses.advertised_host(None, None) == "192.168.7.3"
    )  # neither the name, which leads to itself, nor loopback
    host.setattr(addresses, "_resolve", lambda *_, **__: ["10.1.2.3"])
    assert addresses.advertised_host(None, None) == "node"

    for failure in (ConnectError("unknown"), FetchTimeout("timed out")):

        def unknown(*_, failure=failure, **__):
            raise failure

        host.setattr(addresses, "_resolve", unknown)
        assert addresses.advertised_host(None, None) == "192.168.7.3"
    host.setattr(addresses, "_interfaces", lambda: HOST[:2])
    assert addresses.advertised_host(None, None) == "127.0.0.1"


def test_what_is_advertised_can_be_said(host):
    assert addresses.advertised_host(None, "10.1.2.3") == "10.1.2.3"
    assert addresses.advertised_host("gateway.example", "10.1.2.3") == "gateway.example"
    assert addresses.advertised_host("192.168.0.0/16", None) == "192.168.7.3"
    assert addresses.advertised_host("ib0", None) == "10.1.2.3"
    host.setenv("TENSORFERRY_ADVERTISE", "elsewhere")
    assert addresses.advertised_host(None, None) == "elsewhere"


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
    outside = addresses.advertised_host(None, None)
    if outside not in ("127.0.0.1", "::1"):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((outside, url.port), timeout=10)


@pytest.mark.beyond_torchft
def test_proxies_of_the_environment_are_not_used(open_transport, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    source = open_transport()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert open_transport().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
