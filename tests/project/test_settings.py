"""The environment variables: one list, which the docs repeat, and a warning about misspelt ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorferry import _settings

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/tensorferry"

#: Reads settings three times: two transports, and the folder of a keeper.
READS = """
import logging
from datetime import timedelta
from tensorferry import HTTPTransport
from tensorferry.checkpointing.keeper.place import folders

for _ in range(2):
    HTTPTransport(timedelta(seconds=5)).shutdown()
folders()
print("trains on")
"""


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has read no setting yet, and whose environment has none."""
    for name in list(os.environ):
        if "TENSORFERRY" in name.upper():
            monkeypatch.delenv(name)
    monkeypatch.setattr(_settings, "_first", iter((True,)))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "tensorferry"):
        for _ in range(2):
            _settings.setting(_settings.SECRET)
    return [record.getMessage() for record in caplog.records if record.name == "tensorferry"]


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TENSORFERRY_SECRTE", "TENSORFERRY_SECRET"),
        ("tensorferry_port", "TENSORFERRY_PORT"),
    ],
)
def test_a_misspelt_setting_is_named_once_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "the value, which may be a secret")
    assert warnings_of(caplog) == [
        f"the environment variable {name!r} is ignored: tensorferry has no such setting; did you mean {meant}?"
    ]


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "name",
    [
        *_settings.SETTINGS,
        "OTHER_PORT",
        "TENSORFERRY_SERVICE_HOST",
        "TENSORFERRY_PORT_9400_TCP_ADDR",
    ],
)
def test_what_is_right_or_not_ours_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    assert warnings_of(caplog) == []


@pytest.mark.process
def test_a_trainer_with_misspelt_settings_trains_on_and_shows_one_warning_for_each(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "TENSORFERRY" not in name.upper()}
    environment |= {"TENSORFERRY_SECRTE": "0123456789abcdef", "TENSORFERRY_KEEPERDIR": str(tmp_path)}
    # A name need not be text.
    raw = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()} | {b"TENSORFERRY_\xff": b"1"}
    done = subprocess.run(
        [sys.executable, "-c", READS], env=raw, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "trains on\n"
    lines = [line for line in done.stderr.splitlines() if "no such setting" in line]
    assert [line.split("'")[1] for line in lines] == [
        "TENSORFERRY_KEEPERDIR",
        "TENSORFERRY_SECRTE",
        "TENSORFERRY_\\udcff",
    ]
    assert "0123456789abcdef" not in done.stderr
