"""The runbook: a section for each alert, to which the alert leads; its commands run, and name what there is."""

from __future__ import annotations

import re
import shlex
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorferry import cli, errors
from tensorferry.cli import exits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/runbook.md").read_text()
ALERTS = {name: (ROOT / name).read_text() for name in ("deploy/prometheus-alerts.yml", "docs/guides/observability.md")}
AT = "https://github.com/tensorferry/tensorferry/blob/main/docs/guides/runbook.md#"
TIMEOUT = timedelta(seconds=30)

pytestmark = pytest.mark.beyond_torchft


def sections() -> dict[str, str]:
    return dict(re.findall(r"^## (Tensorferry\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize("file", ALERTS)
def test_every_alert_leads_to_its_section(file: str) -> None:
    rules = re.findall(r"- alert: (\w+)(.*?)(?=- alert:|```|\Z)", ALERTS[file], re.S)
    assert rules
    for name, rule in rules:
        assert f'runbook_url: "{AT}{name.lower()}"' in rule, name
        assert name in sections()


def test_every_section_is_of_an_alert_and_says_what_to_look_at_and_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS["deploy/prometheus-alerts.yml"])
    assert list(sections()) == alerts
    for name, text in sections().items():
        for part in ("**Meaning.**", "**Look first.**", "**Do.**"):
            assert text.count(part) == 1, (name, part)


def test_the_commands_run_and_the_series_exist(open_transport: Any, capsys: pytest.CaptureFixture[str]) -> None:
    transports = [open_transport(interface="127.0.0.1", metrics_port="0") for _ in range(2)]
    transports[0].send_checkpoint([1], 3, {"w": torch.zeros(8)}, TIMEOUT)
    transports[1].recv_checkpoint(0, transports[0].metadata(), 3, TIMEOUT)
    # The receiver is the one that an alert would name.
    node1, node2 = (t.metrics_url().removeprefix("http://").removesuffix("/metrics") for t in reversed(transports))
    commands = {line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ")}
    assert len(commands) >= 4
    series = ""
    for command in commands:
        words = shlex.split(command.replace("node1:9400", node1).replace("node2:9400", node2))
        if words[0] == "tensorferry":
            assert cli.main(words[1:]) == exits.OK, capsys.readouterr()
        else:
            (_, url) = words
            with urllib.request.urlopen(url, timeout=30) as answer:
                series += answer.read().decode()
    for name in re.findall(r"`((?:receiv|last_receive|waiting)\w+)", PAGE):
        assert f"tensorferry_{name}" in series, name


def test_the_classes_of_failed_heals_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|", sections()["TensorferryHealsFail"], re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named <= set(errors.__all__)
    assert {"ConnectError", "FetchTimeout", "UnprovenSource"} <= named
