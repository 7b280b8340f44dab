"""``doctor``, ``bench`` and ``top``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

import tensorferry
from hostile_servers import answer, answering, constant, dripping, redirecting, silent
from tensorferry.cli import app, peers
from tensorferry.net import addresses

TIMEOUT = timedelta(seconds=30)

pytestmark = pytest.mark.beyond_torchft


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command in this process; returns the status, the lines of its output and what went to standard error."""
    # SIGTERM is the business of the test runner.
    monkeypatch.setattr(app.signal, "signal", lambda *_: None)

    def call(*arguments):
        status = app.run([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return status, told.out.splitlines(), told.err

    return call


@pytest.fixture
def source(open_transport):
    transport = open_transport(interface="127.0.0.1", metrics_port=0, same_host=False)
    transport.send_checkpoint([1], 7, {"w": torch.zeros(1 << 19)}, TIMEOUT)
    return transport


def counting(text: bytes):
    """The metadata of a server that answers with these counters."""
    return answering(constant(answer("200 OK", text)))


class TestDoctor:
    def found(self, run, *arguments):
        status, lines, _ = run("doctor", "--json", *arguments)
        assert len(lines) == 1
        return status, {one["about"]: one for one in json.loads(lines[0])}

    def test_it_says_what_a_transport_would_do(self, run, open_transport):
        status, found = self.found(run)
        assert status == int(any(one["verdict"] == "bad" for one in found.values()))
        assert {"torch", "listens", "name lookup", "advertises"} <= found.keys()
        address = open_transport().metadata().split("//")[1].rpartition(":")[0]
        assert found["advertises"]["text"].startswith(address.split(":")[0])
        for one in found.values():
            assert one["verdict"] == "ok" or one["remedy"], one

    @pytest.mark.parametrize(
        ("resolve", "verdict"), [(lambda: 1 / 0, "bad"), (lambda: time.sleep(0.25) or ["10.1.2.3"], "warn")]
    )
    def test_a_name_server_that_is_silent_or_slow(self, run, monkeypatch, resolve, verdict):
        def resolved(name, *, timeout):
            try:
                return resolve()
            except ZeroDivisionError:
                raise tensorferry.FetchTimeout(f"{name}: timed out after {timeout} s") from None

        monkeypatch.setattr(addresses, "_resolve", resolved)
        status, found = self.found(run)
        assert (status, found["name lookup"]["verdict"]) == (int(verdict == "bad"), verdict)
        assert "TENSORFERRY_ADVERTISE" in found["name lookup"]["remedy"]

    @pytest.mark.parametrize(
        ("variable", "value", "about", "verdict"),
        [
            ("PORT", "90-80", "ports", "bad"),
            ("PORT", "1024-65535", "ports", "warn"),
            ("ADVERTISE", "http://x", "advertises", "bad"),
            ("ADVERTISE", "localhost", "advertises", "warn"),
        ],
    )
    def test_settings_that_cannot_be_used_are_named(self, run, monkeypatch, variable, value, about, verdict):
        monkeypatch.setenv(f"TENSORFERRY_{variable}", value)
        status, found = self.found(run)
        assert (status, found[about]["verdict"]) == (int(verdict == "bad"), verdict)

    @pytest.mark.parametrize(("version", "verdict"), [("2.15.0+cu130", "ok"), ("2.16.0", "bad"), ("2.7.1", "bad")])
    def test_versions(self, run, monkeypatch, version, verdict):
        from importlib import metadata

        monkeypatch.setattr(metadata, "version", lambda _: version)
        monkeypatch.setattr(metadata, "requires", lambda _: ["torch<2.16,>=2.8"])
        assert self.found(run)[1]["torch"]["verdict"] == verdict

    @pytest.mark.waits
    def test_the_way_to_a_peer(self, run, source, monkeypatch):
        for speed, verdict in ((1e15, "bad"), (1e3, "ok")):
            monkeypatch.setattr(addresses, "interface_speed", lambda _, speed=speed: ("eth0", speed))
            status, found = self.found(run, source.metadata(), "--seconds", "0.1")
            assert (status, found["address"]["verdict"]) == (int(verdict == "bad"), verdict)
            assert "of eth0 here" in found["address"]["text"]
            assert found["peer"]["text"].startswith("step 7, opened in")
        source.disallow_checkpoint()
        status, found = self.found(run, source.metadata(), "--timeout", "1")
        assert (status, found["peer"]["verdict"]) == (0, "warn")
        assert "so this is normal there" in found["peer"]["remedy"]
        source.shutdown()
        status, found = self.found(run, source.metadata(), "--timeout", "1")
        assert (status, found["peer"]["verdict"]) == (1, "bad")
        assert "ConnectError" in found["peer"]["text"]
        assert "docs/reference/errors.md" in found["peer"]["remedy"]

    def test_a_source_with_a_limit_is_not_slow(self, run, open_transport, monkeypatch):
        monkeypatch.setattr(addresses, "interface_speed", lambda _: ("eth0", 1e10))
        transport = open_transport(interface="127.0.0.1", same_host=False, max_bandwidth=10_000_000)
        transport.send_checkpoint([1], 7, {"w": torch.zeros(1 << 20)}, TIMEOUT)
        status, found = self.found(run, transport.metadata(), "--seconds", "0.5")
        assert (status, "of the source's max_bandwidth: 9.5 MiB/s" in found["address"]["text"]) == (0, True), found

    def test_a_check_that_fails_stops_no_other(self, run, monkeypatch):
        monkeypatch.setattr(addresses, "advertised_host", lambda *_: 1 / 0)
        _, found = self.found(run)
        assert "ZeroDivisionError" in found["address"]["text"]
        assert "torch" in found
        assert run("doctor", "--seconds", "0")[0] == 2


def test_bench_measures_every_route(run):
    status, lines, _ = run("bench", "--size", "2M", "--rounds", "1", "--json")
    assert status == 0
    (result,) = map(json.loads, lines)
    routes = {(one["route"], one["into"]) for one in result["receives"]}
    assert routes == {(r, i) for r in ("shared memory", "loopback", "loopback, TLS") for i in ("place", "fresh")}
    assert all(0 < one["least"] <= one["median"] <= one["most"] for one in result["receives"])
    for wrong in (["--size", "0"], ["--size", "1Q"], ["--size", "4000000T"], ["--rounds", "0"]):
        assert run("bench", *wrong)[0] != 0


@pytest.mark.process
class TestTop:
    def test_who_serves_who_heals_and_what_has_failed(self, run, source, open_transport):
        healing = open_transport(interface="127.0.0.1", secret="a secret of thirty-two characters", same_host=False)
        with pytest.raises(tensorferry.errors.UnprovenSource):
            healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
        port = source.metrics_url().removesuffix("/metrics").removeprefix("http://")
        status, lines, _ = run("top", "--once", f"{source.metadata()} {healing.metadata()}", port)
        assert status == 0
        head, first, second, third = lines
        assert head.split()[:3] == ["at", "step", "gate"]
        assert first.split()[1:3] == third.split()[1:3] == ["7", "open"]
        assert "closed" in second
        assert second.endswith("1 UnprovenSource")
        # The part of the metadata that gives access is nowhere.
        assert not [line for line in lines if source.metadata().split("/")[3] in line]

    def test_counters_of_a_keeper_and_of_refusals(self, run):
        values = {"allowed": 0, "keeper_memory_limit_bytes": 8 << 30, 'keeper_snapshots{job="a"}': 3}
        values |= {'refused_total{reason="path"}': 9, 'refused_total{reason="other_secret"}': 4}
        text = "".join(f"tensorferry_{name} {value}\n" for name, value in values.items()).encode()
        with counting(text) as metadata:
            _, lines, _ = run("top", "--once", metadata)
        assert "keeper  3 snapshots, 0 bytes of 8.0 GiB" in lines[1]
        assert lines[1].endswith("4 requests refused")

    def test_one_that_is_gone_or_says_nothing_stops_no_other(self, run, source, monkeypatch):
        monkeypatch.setattr(peers, "_PATIENCE_S", 0.3)

        drip = dripping(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100)
        with answering(silent) as quiet, redirecting(source.metadata()) as other, answering(drip) as slow:
            status, lines, _ = run("top", "--once", "127.0.0.1:1", source.metadata(), quiet, other, slow)
        assert status == 1
        assert "ConnectError: " in lines[1]
        assert lines[2].split()[1:3] == ["7", "open"]
        assert "FetchTimeout: " in lines[3]
        assert "it answers 302" in lines[4]
        assert "FetchTimeout: " in lines[5]

    @pytest.mark.parametrize(
        "wrong", [[], ["no port"], ["http://"], ["x:99999"], ["a\x1b:80"], ["--every", "0", "a:1"]]
    )
    def test_what_names_no_transport_is_refused(self, run, wrong):
        assert run("top", "--once", *wrong)[0] == 2

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
    def test_the_live_table_ends_with_a_signal(self, number, status):
        looks = threading.Semaphore(0)

        def look(connection):
            looks.release()
            constant(answer("200 OK", b"tensorferry_allowed 1\ntensorferry_step 7\n"))(connection)

        with answering(look) as metadata:
            arguments = [sys.executable, "-m", "tensorferry", "top", "--every", "0.1", metadata]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
            try:
                assert looks.acquire(timeout=110)
                assert looks.acquire(timeout=110)  # The table has what the first look found.
                process.send_signal(number)
                out, _ = process.communicate(timeout=20)
            finally:
                process.kill()
                process.wait()
        assert process.returncode == status
        assert "open" in out
