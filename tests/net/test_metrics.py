"""The counters as Prometheus reads them; the page of their names, the dashboard and the alerts name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tensorferry
from tensorferry import errors

parser = pytest.importorskip("prometheus_client.parser")

TIMEOUT = timedelta(seconds=30)
ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
ALERTS = ROOT / "deploy/prometheus-alerts.yml"
CASES = ROOT / "tests/net/alerts.yml"

pytestmark = pytest.mark.beyond_torchft


def scraped(transport):
    with urllib.request.urlopen(transport.metrics_url()) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {family.name: family for family in parser.text_string_to_metric_families(answer.read().decode())}


@pytest.fixture
def families(open_transport):
    """What a transport shows that has served a receive and healed itself."""
    source = open_transport(interface="127.0.0.1")
    healed = open_transport(interface="127.0.0.1", same_host=False, max_bandwidth=1 << 40)
    source.send_checkpoint([1], 3, {"w": torch.zeros(1 << 18)}, TIMEOUT)
    healed.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
    healed.send_checkpoint([1], 4, {"w": torch.zeros(1 << 18)}, TIMEOUT)
    source.recv_checkpoint(0, healed.metadata(), 4, TIMEOUT)
    with pytest.raises(Exception, match="invalid checkpoint requested"):
        source.recv_checkpoint(0, healed.metadata(), 2, TIMEOUT)
    return scraped(healed)


def names(families):
    return {sample.name for family in families.values() for sample in family.samples}


def described():
    """The series in the page of their names. The keeper's own tests compare those of a keeper."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    return {
        f"tensorferry_{name}"
        for row in re.findall(r"^\| (`.*?) \|", page, re.M)
        for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", row)
    }


def test_a_scraper_reads_every_line(families):
    for family in families.values():
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge"), family.name
        assert family.samples, family.name
    value = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert value["tensorferry_step"] == 4
    assert value["tensorferry_last_receive_step"] == 3
    assert value["tensorferry_last_receive_bytes"] == value["tensorferry_received_bytes_total"] > 1 << 20
    seconds = {s.labels["phase"]: s.value for s in families["tensorferry_last_receive_seconds"].samples}
    assert 0 < value["tensorferry_receive_verify_seconds_total"] < seconds["fetch"]


def failures(transport):
    return {s.labels["error"]: s.value for s in scraped(transport)["tensorferry_receive_failures"].samples}


@pytest.mark.waits
def test_failed_receives_are_counted_by_the_classes_of_the_error_reference(open_transport):
    class OfTheUser(Exception):
        pass

    class Special(tensorferry.errors.SystemRefused):
        pass

    source = open_transport(interface="127.0.0.1")
    source.send_checkpoint([1], 3, {"w": torch.zeros(1 << 18)}, TIMEOUT)
    raised = [OfTheUser(), Special("no room"), KeyError("x")]

    def progress(*_):
        raise raised[0]

    receiver = open_transport(interface="127.0.0.1", progress=progress)
    assert failures(receiver) == {"other": 0}
    while raised:
        with pytest.raises(type(raised[0])):
            receiver.recv_checkpoint(0, source.metadata(), 3, TIMEOUT)
        raised.pop(0)
    # Classes of users would be labels without end.
    assert failures(receiver) == {"other": 2, "SystemRefused": 1}
    with pytest.raises(tensorferry.errors.WrongStep):
        receiver.recv_checkpoint(0, source.metadata(), 4, TIMEOUT)
    assert failures(receiver) == {"other": 2, "SystemRefused": 1, "WrongStep": 1}
    assert failures(receiver).keys() <= {*errors.__all__, "other"}
    with urllib.request.urlopen(receiver.status_url() + "?json") as answer:
        assert '"error":"OfTheUser' in answer.read().decode()


def test_reference_dashboard_and_alerts_name_the_series_that_there_are(families):
    assert {name for name in described() if not name.startswith("tensorferry_keeper_")} == names(families)
    shown = names(families) | {name for name in described() if name.startswith("tensorferry_keeper_")}
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    alerts = "\n".join(line for line in ALERTS.read_text().splitlines() if not line.lstrip().startswith("#"))
    for text in ("\n".join(asked), alerts):
        assert set() < set(re.findall(r"\btensorferry_\w+", text)) <= shown
    # Each alert has a case in which it fires.
    cases = CASES.read_text()
    assert [alert for alert in re.findall(r"- alert: (\w+)", alerts) if alert not in cases] == []


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: no alert was tried (apt install prometheus)"
)
def test_prometheus_itself_accepts_alerts_and_counters(open_transport):
    source = open_transport(interface="127.0.0.1")
    source.send_checkpoint([1], 3, {"w": torch.zeros(8)}, TIMEOUT)
    with urllib.request.urlopen(source.metrics_url()) as answer:
        text = answer.read()
    # Each alert where it has to fire, and where it must not.
    for command in (["check", "rules", ALERTS], ["test", "rules", CASES], ["check", "metrics"]):
        checked = subprocess.run(["promtool", *command], input=text, capture_output=True, timeout=60)
        assert checked.returncode == 0, checked.stdout + checked.stderr
