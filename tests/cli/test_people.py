"""``doctor``, ``bench`` and ``top``."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import tensorferry
from tensorferry.cli import app, fleet
from tensorferry.cli.verbs import doctor
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


class TestDoctor:
    def found(self, run, *arguments):
        status, lines, _ = run("doctor", "--quick", "--json", *arguments)
        assert len(lines) == 1
        return status, {one["about"]: one for one in json.loads(lines[0])}

    def test_it_says_what_a_transport_would_do(self, run, open_transport):
        status, found = self.found(run)
        assert status == int(any(one["verdict"] == "bad" for one in found.values()))
        assert {"torch", "listens", "name lookup", "advertises", "interface", "memory", "huge pages"} <= found.keys()
        address = open_transport().metadata().split("//")[1].rpartition(":")[0]
        assert found["advertises"]["text"].startswith(address.split(":")[0])
        for one in found.values():
            assert one["verdict"] == "ok" or one["remedy"], one

    def test_a_name_server_that_says_nothing_is_bad(self, run, monkeypatch):
        def silent(name, *, timeout):
            from tensorferry import FetchTimeout

            raise FetchTimeout(f"{name}: timed out after {timeout} s")

        monkeypatch.setattr(addresses, "_resolve", silent)
        status, found = self.found(run)
        assert status == 1
        assert found["name lookup"]["verdict"] == "bad"
        assert "TENSORFERRY_ADVERTISE" in found["name lookup"]["remedy"]
        assert "default route" in found["advertises"]["text"]

    def test_a_slow_one_is_worth_a_warning(self, run, monkeypatch):
        def slow(*_, **__):
            time.sleep(0.25)
            return ["10.1.2.3"]

        monkeypatch.setattr(addresses, "_resolve", slow)
        assert self.found(run)[1]["name lookup"]["verdict"] == "warn"

    def test_settings_that_cannot_be_used_are_named(self, run, monkeypatch):
        monkeypatch.setenv("TENSORFERRY_PORT", "90-80")
        monkeypatch.setenv("TENSORFERRY_ADVERTISE", "http://x")
        status, found = self.found(run)
        assert status == 1
        assert "TENSORFERRY_PORT" in found["ports"]["remedy"]
        assert found["advertises"]["verdict"] == "bad"

    def test_a_port_that_the_system_gives_away_is_worth_a_warning(self, run, monkeypatch):
        monkeypatch.setenv("TENSORFERRY_PORT", "1024-65535")
        assert self.found(run)[1]["ports"]["verdict"] == "warn"

    @pytest.mark.waits
    def test_a_peer_that_has_never_published_is_worth_a_warning(self, run, open_transport):
        transport = open_transport(interface="127.0.0.1", same_host=False)
        _, found = self.found(run, transport.metadata(), "--timeout", "2")
        assert "it has never published anything" in found["peer"]["text"]
        assert found["peer"]["verdict"] == "warn"
        assert "so this is normal there" in found["peer"]["remedy"]

    @pytest.mark.waits
    def test_the_way_to_a_peer(self, run, source, monkeypatch):
        monkeypatch.setattr(addresses, "interface_speed", lambda _: ("eth0", 1e15))
        status, lines, _ = run("doctor", "--quick", source.metadata(), "--no-same-host")
        text = "\n".join(lines)
        assert "step 7, opened in" in text
        assert "the state is too small to say" in text
        monkeypatch.setattr(addresses, "interface_speed", lambda _: ("eth0", 1e3))
        _, lines, _ = run("doctor", "--quick", source.metadata())
        assert "eth0 here is rated at 1.0 kB/s" in "\n".join(lines)
        source.disallow_checkpoint()
        status, lines, _ = run("doctor", "--quick", source.metadata(), "--timeout", "2")
        assert any(line.startswith("warn  peer") and "publishes nothing now" in line for line in lines), lines
        assert "so this is normal there" in "\n".join(lines)
        source.shutdown()
        status, lines, _ = run("doctor", "--quick", source.metadata(), "--timeout", "2")
        assert status == 1
        assert "docs/guides/ports.md" in "\n".join(lines)
        assert any(line.startswith("bad   peer") and "ConnectError" in line for line in lines)

    @pytest.mark.parametrize("more", [(), ("--seconds", "0.5")])
    def test_a_source_with_a_limit(self, run, open_transport, monkeypatch, more):
        monkeypatch.setattr(addresses, "interface_speed", lambda _: ("eth0", 1e10))
        transport = open_transport(interface="127.0.0.1", same_host=False, max_bandwidth=10_000_000)
        transport.send_checkpoint([1], 7, {"w": torch.zeros(1 << 20)}, TIMEOUT)
        _, lines, _ = run("doctor", "--quick", transport.metadata(), *more)
        [line] = [line for line in lines if "limited by" in line]
        assert line.endswith("limited by the source's max_bandwidth of 10.0 MB/s")
        assert not any("eth0 here" in line for line in lines)

    def test_a_part_of_the_state_is_enough(self, run, source):
        _, lines, _ = run("doctor", "--quick", source.metadata(), "--seconds", "0.1")
        assert any("/s from 127.0.0.1" in line for line in lines), lines
        status, _, told = run("doctor", "--quick", source.metadata(), "--seconds", "0")
        assert (status, "--seconds must be between" in told) == (2, True)

    @pytest.mark.parametrize(
        ("version", "specifier", "fits"),
        [
            ("2.8.0", ">=2.8,<2.16", True),
            ("2.15.0+cu130", ">=2.8,<2.16", True),
            ("2.16.0", ">=2.8,<2.16", False),
            ("2.7.1", ">=2.8,<2.16", False),
            ("0.2.0", "==0.2.0", True),
            ("0.2.1", "==0.2.0", False),
            ("1.0", "~=1.0", False),
        ],
    )
    def test_versions(self, version, specifier, fits):
        assert doctor._fits(version, specifier) == fits

    def test_the_port_for_counters_and_a_bare_address_are_called_what_they_are(self, run, source):
        port = source.metrics_url().split("/")[2]
        _, lines, _ = run("doctor", "--quick", f"http://{port}/{'0' * 32}/checkpoint/", "--no-same-host")
        assert "this is the port for figures" in "\n".join(lines)
        _, lines, _ = run("doctor", "--quick", port)
        assert "http://node1:29600/5f0c.../checkpoint/: pass what metadata() returns there" in "\n".join(lines)

    def test_a_check_that_fails_stops_no_other(self, run, monkeypatch):
        monkeypatch.setattr(addresses, "interfaces", lambda: 1 / 0)
        _, found = self.found(run)
        assert "ZeroDivisionError" in found["interfaces"]["text"]
        assert "huge pages" in found


def test_bench_measures_every_route(run):
    status, lines, _ = run("bench", "--size", "2M", "--rounds", "1", "--json")
    assert status == 0
    (result,) = map(json.loads, lines)
    routes = {(one["route"], one["into"]) for one in result["receives"]}
    assert routes == {(r, i) for r in ("shared memory", "loopback", "loopback, TLS") for i in ("place", "fresh")}
    assert all(0 < one["least"] <= one["median"] <= one["most"] for one in result["receives"])
    for wrong in (["--size", "0"], ["--size", "1Q"], ["--size", "4000000T"], ["--rounds", "0"]):
        assert run("bench", *wrong)[0] != 0


class TestTop:
    @pytest.mark.process
    def test_who_serves_and_who_heals(self, run, source, open_transport):
        healing = open_transport(interface="127.0.0.1", same_host=False)
        source.send_checkpoint([1], 7, {"w": torch.zeros(1 << 18)}, TIMEOUT)
        healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
        port = source.metrics_url().removesuffix("/metrics").removeprefix("http://")
        status, lines, _ = run("top", "--once", f"{source.metadata()} {healing.metadata()}", port)
        assert status == 0
        head, first, second, third = lines
        assert head.split()[:3] == ["at", "step", "gate"]
        assert first.split()[1:3] == third.split()[1:3] == ["7", "open"]
        assert "closed" in second
        assert "step 7 in " in second
        assert third.startswith(port)
        # The part of the metadata that gives access is nowhere.
        assert not [line for line in lines if source.metadata().split("/")[3] in line]

    @pytest.mark.process
    def test_a_receive_that_runs(self, run, open_transport):
        source = open_transport(interface="127.0.0.1", same_host=False, max_bandwidth=1 << 20)
        healing = open_transport(interface="127.0.0.1")
        source.send_checkpoint([1], 7, {"w": torch.zeros(1 << 20)}, TIMEOUT)

        def receive():
            with contextlib.suppress(tensorferry.TensorferryError):  # The source goes before the receive is over.
                healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)

        thread = threading.Thread(target=receive)
        thread.start()
        shown = {}
        for _ in range(200):
            _, lines, _ = run("top", "--once", "--json", source.metadata(), healing.metadata())
            sender, shown = json.loads(lines[0])
            if shown["receiving_bytes"] and sender["receivers"]:
                break
            time.sleep(0.01)
        assert shown["receiving"] == shown["receiving_phase{fetch}"] == sender["receivers"] == 1
        assert 0 < shown["receiving_bytes"] < shown["receiving_total_bytes"]
        source.shutdown()
        thread.join()

    @pytest.mark.process
    def test_it_asks_over_tls_and_past_a_secret(self, run, open_transport):
        secured = open_transport(interface="127.0.0.1", tls=True, secret="a secret of thirty-two characters")
        assert run("top", "--once", secured.metadata())[0] == 0

    @pytest.mark.process
    @pytest.mark.parametrize(
        "answer",
        [
            b"tensorferry_allowed 1\ntensorferry_step 1\x1b]0;owned\x07\n\x1b[2Jtensorferry_step 9e999999\n",
            b"tensorferry_allowed{x=\"\x1b[31m\"} 1\n",
            b"\xff\xfe" * 1000,
            b"",
            b"x" * (2 << 20),
        ],
    )  # fmt: skip
    def test_a_hostile_transport_writes_nothing_on_the_terminal(self, run, answer):
        class Hostile(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200, "\x1b[2Jowned")
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            for how in ([], ["--json"]):
                status, lines, err = run("top", "--once", *how, f"127.0.0.1:{server.server_port}")
                assert status in (0, 1)
                assert "\x1b" not in "".join(lines) + err
            server.shutdown()
            thread.join()

    @pytest.mark.process
    @pytest.mark.parametrize("width", [40, 80, 250])
    def test_a_narrow_terminal_gets_fewer_columns_and_whole_lines(self, width):
        from rich.console import Console

        from tensorferry.cli.verbs import top

        peers = [fleet.Peer(f"node{number}.example:9400", "http://x/") for number in range(2)]
        peers[0].values = {("allowed", ""): 1.0, ("step", ""): 7.0, ("receives_total", "healed"): 3.0}
        peers[0].values |= {("last_receive_step", ""): 7.0, ("receive_failures_total", "WrongStep"): 2.0}
        peers[0].rates = (5e8, 0.0)
        peers[1].values = {("allowed", ""): 0.0, ("keeper_memory_limit_bytes", ""): 8e9}
        peers[1].values |= {("keeper_buddy_up", "node3"): 0.0, ("keeper_refused_total", "memory"): 1.0}
        console = Console(file=io.StringIO(), width=width)
        console.print(top._table(peers, width))
        lines = console.file.getvalue().splitlines()
        assert lines[0].split()[:1] == ["at"]
        if width == 250:
            assert all(head in lines[0] for head in top._HEADS)
            assert "not shown" not in console.file.getvalue()
        else:
            assert f"not shown in {width} columns: " in console.file.getvalue().replace("\n", " ")
        if width >= 80:
            assert "…" not in console.file.getvalue()
            assert [head for head in ("at", "gate", "does", "errors") if head not in lines[0]] == []
            assert "2 WrongStep" in lines[1]
            assert lines[2].rstrip().endswith("1 snapshots refused")

    @pytest.mark.process
    def test_requests_that_lack_the_secret_are_errors_and_those_of_strangers_are_not(self):
        from tensorferry.cli.verbs import top

        peer = fleet.Peer("node1.example:9400", "http://x/")
        peer.values = {("refused_total", "path"): 9.0}
        assert top._errors(peer) == "-"
        peer.values |= {("refused_total", "other_secret"): 3.0, ("refused_total", "no_secret"): 1.0}
        assert top._errors(peer) == "4 requests refused"

    @pytest.mark.process
    def test_one_that_is_gone_or_says_nothing_stops_no_other(self, run, source, monkeypatch):
        monkeypatch.setattr(fleet, "_PATIENCE_S", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            gone, quiet = "127.0.0.1:1", f"127.0.0.1:{silent.getsockname()[1]}"
            status, lines, _ = run("top", "--once", gone, source.metadata(), quiet)
        assert status == 1
        assert "ConnectError: " in lines[1]
        assert lines[1].endswith("Connection refused (os error 111)")
        assert lines[2].split()[1:3] == ["7", "open"]
        # The class first, and the cause to its end; nobody has received anything.
        cause = r"FetchTimeout: no answer within 0\.3 s: .*(accepts connections|has not begun to answer)"
        assert re.search(cause, lines[3]), lines[3]
        assert "receive" not in lines[3]

    @pytest.mark.process
    def test_the_error_of_who_does_not_answer_is_a_field_of_the_json(self, run):
        status, lines, _ = run("top", "--once", "--json", "127.0.0.1:1")
        assert status == 1
        ((shown,),) = map(json.loads, lines)
        assert shown["error"] == "ConnectError"
        assert "refused" in shown["trouble"]

    @pytest.mark.process
    def test_failed_receives_are_shown_by_the_class_of_their_errors(self, run, source, open_transport):
        healing = open_transport(interface="127.0.0.1", secret="a secret of thirty-two characters")
        source.send_checkpoint([1], 7, {"w": torch.zeros(8)}, TIMEOUT)
        for _ in range(2):
            with pytest.raises(tensorferry.UnprovenSource):
                healing.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
        with pytest.raises(tensorferry.ConnectError):
            healing.recv_checkpoint(0, "http://127.0.0.1:1/x/checkpoint/", 7, TIMEOUT)
        _, lines, _ = run("top", "--once", healing.metadata())
        assert lines[1].endswith("2 UnprovenSource, 1 ConnectError")
        _, lines, _ = run("top", "--once", "--json", healing.metadata())
        ((shown,),) = map(json.loads, lines)
        assert shown["receive_failures_total{UnprovenSource}"] == 2
        assert shown["receives_total{failed}"] == 3

    @pytest.mark.process
    def test_a_cause_is_whole_in_a_narrow_terminal(self):
        from rich.console import Console

        from tensorferry.cli.verbs import top

        peer = fleet.Peer("127.0.0.1:29700", "http://127.0.0.1:29700/x/")
        peer.error, peer.trouble = "FetchTimeout", " ".join(f"word{n}" for n in range(30))
        console = Console(width=100, file=io.StringIO())
        console.print(top._table([peer], console.width))
        told = console.file.getvalue().split()
        assert "FetchTimeout" in told
        cause = told[told.index("127.0.0.1:29700:") :]
        assert cause == ["127.0.0.1:29700:", "FetchTimeout:", *(f"word{n}" for n in range(30))]

    @pytest.mark.process
    def test_one_that_drips_is_given_up(self, run, monkeypatch):
        monkeypatch.setattr(fleet, "_PATIENCE_S", 0.3)
        ended = threading.Event()

        def drip(listener):
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.02):
                    connection.sendall(b"x: y\r\n")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=drip, args=(listener,))
            thread.start()
            status, lines, _ = run("top", "--once", f"127.0.0.1:{listener.getsockname()[1]}")
            ended.set()
            thread.join(10)
        assert status == 1
        assert lines[1].endswith("FetchTimeout: no answer within 0.3 s: has not sent all of its answer")

    @pytest.mark.process
    def test_a_redirect_is_not_followed(self, run, source):
        class Elsewhere(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(302)
                self.send_header("Location", source.metrics_url())
                self.end_headers()

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            status, lines, _ = run("top", "--once", f"127.0.0.1:{server.server_port}")
            server.shutdown()
            thread.join()
        assert status == 1
        assert "it answers 302" in lines[1]

    @pytest.mark.process
    @pytest.mark.parametrize(
        "wrong", [[], ["no port"], ["http://"], ["x:99999"], ["a\x1b:80"], ["--every", "0", "a:1"]]
    )
    def test_what_names_no_transport_is_refused(self, run, wrong):
        assert run("top", "--once", *wrong)[0] == 2

    @pytest.mark.process
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
    def test_the_live_table_ends_with_a_signal(self, number, status):
        second = threading.Event()

        class Counted(BaseHTTPRequestHandler):
            looks = 0

            def do_GET(self):
                Counted.looks += 1
                if Counted.looks == 2:  # The table has what the first look found.
                    second.set()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"tensorferry_allowed 1\ntensorferry_step 7\n")

            def log_message(self, *_):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Counted) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            where = f"127.0.0.1:{server.server_port}"
            process = subprocess.Popen(
                [sys.executable, "-m", "tensorferry", "top", "--every", "0.1", where], stdout=subprocess.PIPE, text=True
            )
            try:
                assert second.wait(110)
                process.send_signal(number)
                out, _ = process.communicate(timeout=20)
            finally:
                process.kill()
                process.wait()
                server.shutdown()
                thread.join()
        assert process.returncode == status
        assert "open" in out
