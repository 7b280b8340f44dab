"""Invalid arguments of every public function raise an error of ours that names the argument."""

from __future__ import annotations

import copy
import functools
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorferry
from exchange import TIMEOUT
from networked import networked
from tensorferry import HTTPTransport, Network, join_metadata
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter
from tensorferry.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

#: For each argument, values that it does not take.
CONSTRUCTOR: dict[str, list[Any]] = {
    "timeout": [5, None, timedelta(seconds=-1)],
    "num_chunks": [1.5, "4", -1, 2**70],
    "snapshot": [None, "later"],
    "max_bandwidth": [0, 0.5, float("nan"), float("inf"), "1e9", 2**64],
    "reuse_bytes": ["1 GiB", -1, 2**64],
    "tls": ["yes", 1, ("one.pem",), ("one.pem", "one.key", "two"), ("one.pem", 1)],
    "same_host": [1],
    "relay": ["yes"],
    "trust_pickle": ["no"],
    "safe_globals": [int, "torch.nn.Linear", [5]],
    "state_dict": [{}],
    "strict": [True],
    "progress": [5],
    "interface": [5],
    "advertise": [5],
    "network": [{"port": 5}],
    "secret": [32, ["0123456789abcdef"], "\ud800" * 20],
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_names_it(name: str) -> None:
    for value in CONSTRUCTOR[name]:
        with pytest.raises(InvalidArgument, match=rf"\b{name}\b"):
            HTTPTransport(**{"timeout": TIMEOUT, **networked({name: value})})


def test_the_constructor_takes_torchfts_arguments_and_whole_numbers_as_floats() -> None:
    for made in (HTTPTransport(TIMEOUT, 2), HTTPTransport(timeout=TIMEOUT, num_chunks=2)):
        made.shutdown()
    HTTPTransport(TIMEOUT, network=Network(max_bandwidth=1e9), reuse_bytes=2e6).shutdown()
    with pytest.raises(TypeError):
        HTTPTransport(TIMEOUT, 2, None)  # type: ignore[misc]


@pytest.mark.parametrize(
    "advertise", ["a b", "h\nx", " ", "http://node", "node:80", "0.0.0.0", "::", "n\u00f6de", "-x"]
)
def test_what_no_peer_can_reach_is_not_advertised(advertise: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be advertised"):
        HTTPTransport(TIMEOUT, network=Network(advertise=advertise))


@pytest.mark.parametrize(
    ("name", "value"), [("SAME_HOST", "false"), ("RELAY", "2"), ("TLS", "yes"), ("PORT", "90-80"), ("INTERFACE", "lo,")]
)
def test_a_variable_with_another_value_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TENSORFERRY_{name}", value)
    with pytest.raises(InvalidArgument, match=rf"(TENSORFERRY_{name}|{name.lower()}=\S+) must"):
        Network()


@pytest.mark.parametrize(
    ("make", "name"),
    [(functools.partial(HTTPTransport, TIMEOUT), "tls"), (PeerWriter, "interface"), (PeerReader, "secret")],
)
def test_a_network_and_its_shortcuts_exclude_each_other(make: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}= and network= exclude each other"):
        make(network=Network(), **{name: "anything of 16 bytes"})


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 1.5, "7", None])
def test_steps(step: Any, open_transport: Callable[..., Any]) -> None:
    source, receiver = open_transport(), open_transport()
    source.send_checkpoint([1], 7, {"a": 1}, TIMEOUT)
    for call in (
        lambda: source.send_checkpoint([1], step, {"a": 1}, TIMEOUT),
        lambda: source.allow_checkpoint(step),
        lambda: receiver.recv_checkpoint(0, source.metadata(), step, TIMEOUT),
    ):
        with pytest.raises(InvalidArgument, match=r"\bstep\b"):
            call()
    assert receiver.recv_checkpoint(0, source.metadata(), 7, TIMEOUT) == {"a": 1}
    for step in (2**63 - 1, -(2**63)):
        source.send_checkpoint([1], step, {"a": step}, TIMEOUT)
        assert receiver.recv_checkpoint(0, source.metadata(), step, TIMEOUT) == {"a": step}


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "garbage",
        "x" * 100_000,
        None,
        5,
        b"http://127.0.0.1:1/0f/checkpoint/",
        "http://",
        "http://127.0.0.1:99999/checkpoint/",
        "file:///etc/passwd",
        "https://127.0.0.1:1/0f/checkpoint/",
    ],
)
def test_metadata_that_names_no_source(metadata: Any, secured: bool, open_transport: Callable[..., Any]) -> None:
    receiver = open_transport(tls=secured)
    with pytest.raises((InvalidArgument, tensorferry.errors.UnprovenSource) if secured else InvalidArgument) as caught:
        receiver.recv_checkpoint(0, metadata, 1, TIMEOUT)
    assert len(str(caught.value)) < 1000


def test_the_deadline_of_a_receive(open_transport: Callable[..., Any]) -> None:
    source = open_transport()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    for timeout in (5, 5.0, "5"):
        with pytest.raises(InvalidArgument, match=r"\btimeout\b"):
            open_transport().recv_checkpoint(0, source.metadata(), 1, timeout)
    # With None, that of the transport.
    for timeout in (timedelta.max, None):
        assert open_transport().recv_checkpoint(0, source.metadata(), 1, timeout) == {"a": 1}


@pytest.mark.parametrize(
    "joined", ["http://h:1/0f/checkpoint/", None, [], [5], ["http://"], ["http://:/x"], ["http://h:1/x"]]
)
def test_join_metadata(joined: Any) -> None:
    with pytest.raises(InvalidArgument):
        join_metadata(joined)
    first, second = (f"http://h:{port}/{'0' * 32}/checkpoint/" for port in (1, 2))
    assert join_metadata([join_metadata([first]), second, first]) == f"{first} {second}"


def test_a_transport_stays_in_its_process(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="HTTPTransport serves the memory of its own process"):
            copied(transport)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("path", lambda: FileWriter(None)),  # type: ignore[arg-type]
        ("path", lambda: FileReader(5)),  # type: ignore[arg-type]
        ("timeout", lambda: PeerWriter(60)),  # type: ignore[arg-type]
        ("metadata", lambda: PeerReader(5)),  # type: ignore[arg-type]
        ("safe_globals", lambda: FileReader("x", safe_globals=[5])),
    ],
)
def test_checkpoints_name_it_too(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument, match=name):
        make()


def test_the_default_device_is_not_where_bytes_go(open_transport: Callable[..., Any]) -> None:
    """Jobs call `torch.set_default_device("cuda")`; the meta device shows as well where the default is used."""
    base = torch.arange(4096.0)
    state = {"plain": torch.ones(3), "empty": torch.ones(0, 2), "view": base[1:9], "copied": base[:64].clone().t()}
    with torch.device("meta"):
        source, target = open_transport(3, snapshot="copy"), open_transport(3)
        source.send_checkpoint([1], 1, state, TIMEOUT)
        got = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert all(torch.equal(got[name], value) and got[name].device.type == "cpu" for name, value in state.items())


@pytest.mark.parametrize("step", ["99999999999999999999", "9" * 5000, "\u0663", "-1", "x"])
def test_the_metadata_of_peers(step: str) -> None:
    with pytest.raises(InvalidArgument):
        PeerReader(f"tensorferry-dcp/1 {step} http://127.0.0.1:1/0f/checkpoint/").read_metadata()
