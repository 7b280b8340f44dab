"""Fixed ports, ranges of them, and the port on which counters alone are served."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import torch

from tensorferry import Network
from tensorferry.errors import InvalidArgument, SystemRefused
from tensorferry.net.network import port_range

TIMEOUT = timedelta(seconds=30)
SECRET = "a secret of thirty-two characters"

pytestmark = pytest.mark.beyond_torchft


@pytest.fixture
def taken():
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def port_of(url):
    return urlsplit(url).port


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


@pytest.mark.parametrize("given", ["7-80", 29500, "29500", "29500-29500", 0, "0"])
def test_a_port_or_a_range(given):
    first, _, last = str(given).partition("-")
    assert port_range("port", given, "NO_SUCH_VARIABLE") == (int(first), int(last or first))


@pytest.mark.parametrize("bad", [-1, 65536, "80-", "90-80", "0-80", "a", "80 - 90", "", "\uff18\uff10", 80.0, "1-2-3"])
def test_anything_else_is_refused_by_name(bad):
    for name in ("port", "metrics_port"):
        with pytest.raises(InvalidArgument, match=rf"^{name} must be a"):
            Network(**{name: bad})


def test_a_port_in_use_says_what_to_do(taken, open_transport):
    with pytest.raises(
        SystemRefused, match=rf"on port {taken}: .*in use.* Choose another port with port=, --port or TENSORFERR"
    ):
        open_transport(interface="127.0.0.1", port=taken)
    with pytest.raises(SystemRefused, match=r"in use.* Choose another port with metrics_port="):
        open_transport(interface="127.0.0.1", metrics_port=taken)
    # Nothing is left behind by the one that failed.
    port = free_port()
    with pytest.raises(SystemRefused):
        open_transport(interface="127.0.0.1", port=port, metrics_port=taken)
    assert port_of(open_transport(interface="127.0.0.1", port=port).metadata()) == port


def test_the_transports_of_a_host_share_a_range(taken, open_transport, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_PORT", f"{taken}-{taken + 30}")
    source, other = open_transport(interface="127.0.0.1"), open_transport()
    ports = [port_of(source.metadata()), port_of(other.metadata())]
    assert taken < ports[0] < ports[1] <= taken + 30
    state = {"w": torch.arange(1000)}
    source.send_checkpoint([1], 3, state, TIMEOUT)
    assert torch.equal(other.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)["w"], state["w"])
    with pytest.raises(SystemRefused, match=f"on any port from {ports[0]} to {ports[1]}: "):
        open_transport(interface="127.0.0.1", port=f"{ports[0]}-{ports[1]}")
    assert port_of(open_transport(port=0).metadata()) not in ports, "an argument goes before the variable"


@pytest.mark.parametrize("options", [{}, {"secret": SECRET}, {"tls": True}])
def test_a_scraper_has_an_address_that_gives_counters_alone(open_transport, options):
    transport = open_transport(interface="127.0.0.1", metrics_port=0, **options)
    transport.send_checkpoint([1], 3, {"w": torch.arange(1000)}, TIMEOUT)
    url, token = transport.metrics_url(), urlsplit(transport.metadata()).path.split("/")[1]
    assert url.startswith("http://127.0.0.1:")
    assert port_of(url) != port_of(transport.metadata())
    assert transport.status_url() == url.removesuffix("metrics")
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    assert "\ntensorferry_step 3\n" in text
    with urllib.request.urlopen(transport.status_url() + "?json") as answer:
        figures = answer.read().decode()
    assert '"step":3,' in figures
    assert token not in figures + text
    for path in (f"{token}/metrics", f"{token}/checkpoint/3.safetensors", "checkpoint/3.safetensors", "3/full"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port_of(url)}/{path}")


def test_without_a_port_of_their_own_the_counters_are_below_the_random_part(open_transport):
    transport = open_transport(interface="127.0.0.1")
    assert transport.metrics_url() == transport.metadata().replace("checkpoint/", "metrics")
    for url in (transport.metrics_url(), transport.status_url()):
        urllib.request.urlopen(url).close()
