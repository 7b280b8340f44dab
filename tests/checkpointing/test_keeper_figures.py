"""What a keeper shows of itself, of peers it refused and of its buddies; what trainers with another secret are told."""

from __future__ import annotations

import logging
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from keepers import KeeperAtWork, eventually, offered
from tensorferry import cli
from tensorferry.checkpointing.keeper import index, same_secret
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.checkpointing.keeper.stranger_log import StrangerLog
from tensorferry.net.secret import shared_secret

pytestmark = pytest.mark.process


SECRET = "a secret of more than sixteen bytes"
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def state_of(nbytes: int = MIB) -> dict:
    return {"w": torch.ones(nbytes // 4)}


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, none of them twice."""
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()


def text_of(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.read().decode()


def series_of(port: int) -> dict[str, float]:
    lines = [line for line in text_of(port).splitlines() if line.startswith("tensorferry_keeper_")]
    pairs = (line.removeprefix("tensorferry_keeper_").rsplit(" ", 1) for line in lines)
    return {name: float(value) for name, value in pairs}


def test_a_keeper_shows_what_it_holds_refuses_and_copies(folder, monkeypatch, capsys):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    ports = free_ports(3)
    there, buddy = f"127.0.0.1:{ports[1]}", ["--port", str(ports[1])]
    options = ["--memory", "8M", "--metrics-port", str(ports[0]), "--port", str(ports[2]), "--buddy", there]
    with (
        KeeperAtWork(folder, *options, name="one", secret=SECRET) as process,
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        begun = eventually(
            "it shows itself",
            lambda: found if 'snapshots{origin="own"}' in (found := series_of(ports[0])) else None,
        )
        assert begun['snapshots{origin="own"}'] == 0 == begun['refused_total{reason="memory"}']
        assert "last_kept_timestamp_seconds" not in begun
        offered(one, state_of(), "/data/of-somebody/run/step-7", step=7)
        offered(one, state_of(), "/data/of-somebody/run/step-9", step=9)
        offered(one, state_of(32 * MIB), "/data/of-somebody/run/step-10", step=10)
        shown = eventually(
            "all is counted",
            lambda: found if (found := series_of(ports[0]))['refused_total{reason="memory"}'] else None,
        )
        assert shown['snapshots{origin="own"}'] == shown['kept_total{origin="own"}'] == 2
        assert shown['newest_step{job="run",rank="0"}'] == 9
        assert 2 * MIB < shown["memory_used_bytes"] == shown['snapshot_bytes{origin="own"}'] < 3 * MIB
        assert shown["memory_limit_bytes"] == 8 * MIB
        assert shown[f'buddy_up{{buddy="{there}"}}'] == 0
        assert shown["clients"] == 1
        assert abs(shown["last_kept_timestamp_seconds"] - shown['newest_timestamp_seconds{job="run",rank="0"}']) < 60
        # The buddy comes, is copied from, and goes; the log says each of it, and no step where there is none.
        eventually("the buddy is missed", lambda: "cannot connect" in process.said())
        with KeeperAtWork(folder, *buddy, name="two", secret=SECRET):
            offered(two, state_of(), "/data/other/1")
            shown = eventually(
                "it is copied", lambda: found if (found := series_of(ports[0]))['snapshots{origin="buddy"}'] else None
            )
            assert shown[f'buddy_up{{buddy="{there}"}}'] == 1
            assert shown[f'copied_bytes_total{{buddy="{there}"}}'] >= MIB
            assert shown[f'buddy_answer_timestamp_seconds{{buddy="{there}"}}'] > 1e9
            page = text_of(ports[0], "/")
            for what in ("tensorferry: keeper one", "3 snapshots, 1 of them of buddies", "snapshots refused: 1", there):
                assert what in page, what
            assert "gate" not in page.partition("</style>")[2].replace('id="gate"', "")
            assert "of-somebody" not in page, "a path's folders are nobody's business"
            assert cli.main(["top", f"127.0.0.1:{ports[0]}", "--once"]) == 0
            (row,) = [line for line in capsys.readouterr().out.splitlines() if f":{ports[0]}" in line]
            assert "keeper" in row
            assert "3 snapshots" in row
            assert "1 of 1 buddies" in row
        eventually("it is missed", lambda: series_of(ports[0])[f'buddy_up{{buddy="{there}"}}'] == 0)
        said = process.said()
        assert f"buddy {there} answers again" in said
        assert "step 0" not in said
        # Every series has its row, and no other.
        named = re.findall(r"`(keeper_\w+)", (ROOT / "docs/reference/metrics.md").read_text())
        assert {f"tensorferry_{name}" for name in named} == set(
            re.findall(r"tensorferry_keeper_\w+", text_of(ports[0]))
        )


def test_a_keeper_logs_who_was_refused_once_in_a_while(folder):
    (port,) = free_ports(1)
    with KeeperAtWork(folder, "--port", str(port), secret=SECRET) as process:
        for _ in range(40):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/keeper/checkpoint/0.safetensors", timeout=30)
        eventually("they are named", lambda: "requests were refused" in process.said())
        assert "of 127.0.0.1 (right path, no proof of the shared secret" in process.said()
        assert process.said().count("requests were refused") == 1


def test_the_log_of_refusals_is_bounded_whoever_asks(caplog):
    class Crowded:
        def __init__(self):
            self.known = []

        def strangers(self):
            return self.known

    log = StrangerLog(server := Crowded())  # type: ignore[arg-type]
    log.look(0.0)
    assert not caplog.records
    server.known = [(f"10.0.0.{number}", "why", 7) for number in range(48)]
    log.look(1.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.count("7 of 10.0.0.") == 5
    assert line.endswith("and of 43 other addresses")
    server.known = [("10.0.0.9", "why", 9), ("10.0.0.5", "why", 3)]
    for now in range(2, 60):
        log.look(float(now))
    assert len(caplog.records) == 1
    log.look(62.0)
    assert caplog.records[1].getMessage() == "requests were refused: 2 of 10.0.0.9 (why), 3 of 10.0.0.5 (why)"
    log.look(200.0)
    assert len(caplog.records) == 2, "nobody was refused meanwhile"


@pytest.mark.parametrize(
    ("of_trainer", "of_keeper", "said"),
    [
        (None, SECRET, "this trainer has no shared secret and its keeper has one"),
        ("another secret of sixteen bytes", SECRET, "this trainer has another shared secret than its keeper"),
        (SECRET, None, "this trainer has a shared secret and its keeper has none"),
        (SECRET, SECRET, None),
        (None, None, None),
    ],
)
def test_a_trainer_with_another_secret_than_its_keeper_is_told(of_trainer, of_keeper, said):
    fields = same_secret.described(shared_secret(of_keeper), 1)
    wrong = same_secret.difference(shared_secret(of_trainer), fields)
    assert (wrong is None) if said is None else wrong.startswith(said)
    assert same_secret.difference(shared_secret(of_trainer), {**fields, "buddies": 0}) is None, "nothing is fetched"
    for hostile in ({}, {"buddies": 1, "secret": 7}, {"buddies": 1, "secret": ["zz", 1]}, {"buddies": "x"}):
        same_secret.difference(shared_secret(SECRET), hostile)


def test_a_trainer_without_the_secret_is_warned_once_when_it_saves(folder, caplog):
    (port,) = free_ports(1)
    with (
        KeeperAtWork(folder, "--buddy", f"127.0.0.1:{port}", secret=SECRET),
        Keeper() as keeper,
        caplog.at_level(logging.WARNING, "tensorferry"),
    ):
        offered(keeper, state_of(), "/ckpt/run/step-1")
        offered(keeper, state_of(), "/ckpt/run/step-2")
        warnings = [r.getMessage() for r in caplog.records if "shared secret" in r.getMessage()]
    assert len(warnings) == 1
    assert "TENSORFERRY_SECRET_FILE" in warnings[0]


def test_messages_name_what_to_do(monkeypatch):
    monkeypatch.delenv("TENSORFERRY_SECRET", raising=False)
    from tensorferry.errors import ConnectError, InvalidArgument
    from tensorferry.net.options import ServerOptions

    options = ServerOptions(
        secret=None, tls=None, same_host=None, interface=None, advertise=None, max_bandwidth=None, port=None,
        metrics_port=None,
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="neither TENSORFERRY_SECRET nor TENSORFERRY_SECRET_FILE is set here"):
        index.keeper_url("node2:7070", options)
    url = "http://node2:7070/keeper/checkpoint/"
    assert index.message_about(url, ConnectError("step 0 from node2:7070: cannot connect")) == "cannot connect"
