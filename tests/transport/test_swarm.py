"""Receivers that send each other what they have: in processes, with members that die, freeze and lie."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch

from child import Child
from nights import mostly_at_night
from tensorferry._native import HttpAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 1 << 20
BLOCKS = 48
SLOW = 16 * BLOCK
TIMEOUT = timedelta(seconds=100)
OPTIONS: dict[str, Any] = {"interface": "127.0.0.1", "same_host": False, "relay": True}

pytestmark = [pytest.mark.timeout(180), pytest.mark.beyond_torchft]

MEMBER = """
import hashlib, json, sys, urllib.request
from tensorferry import TensorferryError
told = json.loads(sys.stdin.readline())
half = []
def progress(done, total):
    if done >= total // 3 and not half:
        half.append(done)
        print(json.dumps({"third": True}), flush=True)
transport = HTTPTransport(LONG, 2, interface="127.0.0.1", same_host=False, relay=True, progress=progress)
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
try:
    state = transport.recv_checkpoint(0, told["metadata"], 7, LONG)
except TensorferryError as error:
    print(json.dumps({"error": type(error).__name__}), flush=True)
else:
    report = transport.last_report
    figures = urllib.request.urlopen(transport.metrics_url()).read().decode()
    sha = hashlib.sha256(state["w"].numpy()).hexdigest()
    print(json.dumps({"sha": sha, "relayed": report.relayed_bytes, "relays": report.relays, "bytes": report.bytes,
                      "figures": figures}), flush=True)
transport.shutdown()
"""


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"w": torch.randint(0, 255, (BLOCKS * BLOCK,), dtype=torch.uint8)}


def sha_of(values: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(values["w"].numpy()).hexdigest()


class Member:
    """A receiver in a process of its own."""

    def __init__(self, metadata: str) -> None:
        self.process = Child(forks=True).start(MEMBER, listens=True)
        self.tell(metadata=metadata)

    def tell(self, **what: Any) -> None:
        assert self.process.stdin
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def hear(self, what: str) -> dict[str, Any]:
        """Returns the first line with ``what``, or with an error."""
        assert self.process.stdout
        for line in self.process.stdout:
            told = json.loads(line)
            if what in told or "error" in told:
                return told
        raise AssertionError(f"it ended without {what}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def start() -> Iterator[Callable[[str, int], list[Member]]]:
    """Starts receivers, which all begin when each is ready."""
    started: list[Member] = []

    def start_all(metadata: str, count: int) -> list[Member]:
        members = [Member(metadata) for _ in range(count)]
        started.extend(members)
        for member in members:
            member.hear("ready")
        for member in members:
            member.tell()
        return members

    yield start_all
    for member in started:
        member.end()


def figure(text: str, name: str) -> float:
    found = re.search(rf"^tensorferry_{name} ([\d.]+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def figures(transport: Any) -> str:
    with contextlib.closing(
        HttpAnswer.open(transport.metrics_url().removesuffix("metrics"), "metrics", timeout=10)
    ) as answer:
        return answer.read(BLOCK).decode()


@pytest.mark.process
def test_four_receivers_take_little_more_than_one_copy(open_transport: Any, start: Any) -> None:
    source, values = open_transport(max_bandwidth=SLOW, **OPTIONS), state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    members = start(source.metadata(), 4)
    told = [member.hear("sha") for member in members]
    assert [one["sha"] for one in told] == [sha_of(values)] * 4
    total = BLOCKS * BLOCK
    sent = source._server.bytes_served
    assert sent < 2.5 * total, f"{sent / total} copies have left the source"
    relayed = sum(one["relayed"] for one in told)
    assert relayed > 1.5 * total
    assert all(one["relays"] <= 3 for one in told)
    assert sum(figure(one["figures"], "relayed_bytes_total") for one in told) >= 0.9 * relayed
    for one in told:
        assert figure(one["figures"], "received_relayed_bytes_total") == one["relayed"]
        assert figure(one["figures"], "receive_refused_blocks_total") == 0
    # Nothing is read once a receive has returned, so the source withdraws at once.
    source.disallow_checkpoint()


@pytest.mark.process
@pytest.mark.parametrize("how", mostly_at_night([signal.SIGKILL, signal.SIGSTOP]))
def test_a_relay_that_stops_in_the_middle_is_done_without(how: signal.Signals, open_transport: Any, start: Any) -> None:
    source, values = open_transport(max_bandwidth=SLOW, **OPTIONS), state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    first, *others = start(source.metadata(), 4)
    assert "third" in first.hear("third")
    first.process.send_signal(how)
    assert [member.hear("sha").get("sha") for member in others] == [sha_of(values)] * 3


class Liar(BaseHTTPRequestHandler):
    """A relay that claims to have every block, and sends noise."""

    protocol_version = "HTTP/1.1"
    total = 0
    asked = 0

    def do_GET(self) -> None:
        if "/have" in self.path:
            bits = BLOCKS + 1
            body = bits.to_bytes(8, "little") + b"\xff" * (bits // 8) + bytes([2 ** (bits % 8) - 1])
            body += bytes(8 + 8 * -(-bits // 64) - len(body))
            self.send_response(200)
        else:
            Liar.asked += 1
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            body = bytes(last + 1 - first)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{Liar.total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Is silent."""


@contextlib.contextmanager
def joined(source: Any, port: int) -> Iterator[None]:
    """Is a member that relays at ``port`` in the swarm of ``source``, for as long as its connection is open."""
    url = urllib.parse.urlsplit(source.metadata())
    member = http.client.HTTPConnection(url.netloc, timeout=10)
    with contextlib.closing(member):
        member.request("GET", f"{url.path}7.safetensors", headers={"Range": "bytes=0-0"})
        answer = member.getresponse()
        answer.read()
        assert answer.headers["Tensorferry-Swarm"] == "1"
        Liar.total, tag = int(answer.headers["Content-Range"].rsplit("/")[-1]), answer.headers["ETag"]
        member.request("GET", f"{url.path}7/swarm?port={port}&token={'0' * 32}", headers={"If-Match": tag})
        answer = member.getresponse()
        answer.read()
        assert answer.status == 200
        yield


@pytest.mark.process
def test_what_a_liar_sends_is_fetched_again_and_named(open_transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    source, healing, values = open_transport(max_bandwidth=SLOW, **OPTIONS), open_transport(**OPTIONS), state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    Liar.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with joined(source, server.server_port), caplog.at_level("INFO", "tensorferry"):
            received = healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
        server.shutdown()
    assert torch.equal(received["w"], values["w"])
    report = healing.last_report
    assert Liar.asked > 0
    assert report.refused_blocks > 0
    assert report.relays == 1
    assert f"127.0.0.1:{server.server_port}" in report.troubles
    assert figure(figures(healing), "receive_refused_blocks_total") == report.refused_blocks
    line = caplog.records[-1].getMessage()
    assert f"bytes from the source and {report.relayed_bytes} from 1 other receiver" in line
    assert "1 other receivers" in urllib.request.urlopen(healing.status_url(), timeout=10).read().decode()


def test_the_source_shows_its_members(open_transport: Any) -> None:
    source = open_transport(**OPTIONS)
    source.send_checkpoint([1], 7, state(), TIMEOUT)
    assert figure(figures(source), "swarm_members") == 0
    with joined(source, 4001), joined(source, 4002):
        assert figure(figures(source), "swarm_members") == 2
        with urllib.request.urlopen(source.status_url(), timeout=10) as page:
            text = page.read().decode()
        assert "127.0.0.1:4001" in text
        assert "127.0.0.1:4002" in text
    source.disallow_checkpoint()
    assert figure(figures(source), "swarm_members") == 0


@pytest.mark.parametrize("who", ["source", "receiver", "both by the environment"])
def test_both_sides_have_to_agree(who: str, open_transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "environment" in who:
        monkeypatch.setenv("TENSORFERRY_RELAY", "0")
    off = OPTIONS | {"relay": None if "environment" in who else False}
    source = open_transport(**(OPTIONS if who == "receiver" else off))
    healing = open_transport(**(OPTIONS if who == "source" else off))
    values = state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    assert torch.equal(healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)["w"], values["w"])
    assert figure(figures(source), "swarm_members") == 0


@pytest.mark.parametrize(
    ("options", "values"),
    [({"same_host": True}, None), ({}, {"w": torch.arange(1000.0)})],
    ids=["shared memory", "a small state"],
)
def test_what_takes_no_part_says_nothing(
    options: dict[str, Any], values: Any, open_transport: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, healing = (open_transport(**OPTIONS | options) for _ in range(2))
    values = values or state()
    source.send_checkpoint([1], 7, values, TIMEOUT)
    with caplog.at_level("WARNING"):
        assert torch.equal(healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)["w"], values["w"])
    assert not caplog.records
    assert figure(figures(source), "swarm_members") == 0
    assert healing.last_report.relays == 0


@pytest.mark.waits
@pytest.mark.parametrize(
    ("options", "bandwidth", "expected"),
    [
        ({"tls": True}, SLOW, 1),
        ({"secret": "at least sixteen bytes"}, SLOW, 1),
        # Unasked, where the source is slow, and only there.
        ({"relay": None}, SLOW, 1),
        ({"relay": None}, None, 0),
    ],
)
def test_who_takes_part(options: dict[str, Any], bandwidth: int | None, expected: int, open_transport: Any) -> None:
    seen: list[float] = []
    chosen = OPTIONS | options
    source = open_transport(**chosen, max_bandwidth=bandwidth)
    healing = open_transport(**chosen, progress=lambda *_: seen.append(figure(figures(source), "swarm_members")))
    source.send_checkpoint([1], 7, state(), TIMEOUT)
    healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
    assert max(seen) == expected
