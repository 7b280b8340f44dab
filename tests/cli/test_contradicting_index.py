"""An index that says something else than the files: it is not verified, and not committed by a pull."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.cli import exits
from tensorferry.dcp import FileWriter, PeerWriter, index
from tensorferry.errors import ProtocolError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def set_entry(at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["w"][4][0][2].__setitem__(at, value)


#: What is wrong with the index of a float32 tensor of 6 elements.
WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "another dtype": lambda state: state["w"].__setitem__(1, "bfloat16"),
    "a dtype of the same size": lambda state: state["w"].__setitem__(1, "int32"),
    "another shape": lambda state: state["w"][4][0].__setitem__(1, [5]),
    "another entry": set_entry(1, "v"),
    "a length that no entry has": set_entry(3, 28),
    "no file": set_entry(0, 1),
    "no entry": lambda state: state["w"][4][0].__setitem__(2, None),
}


def contradicting(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    encode = index.encode

    def wrong(*arguments: Any) -> bytes:
        fields = json.loads(encode(*arguments))
        WRONG[how](fields["state"])
        return json.dumps(fields).encode()

    monkeypatch.setattr(index, "encode", wrong)


STATE = {"w": torch.arange(6.0), "n": 5}


@pytest.mark.parametrize("how", WRONG)
def test_it_is_not_verified(how: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(STATE, storage_writer=FileWriter(tmp_path))
    assert run("verify", tmp_path).status == exits.OK
    contradicting(monkeypatch, how)
    dcp.save(STATE, storage_writer=FileWriter(tmp_path))
    done = run("verify", tmp_path)
    assert done.status == exits.STATUS[ProtocolError], done
    assert " w" in done.err


def test_it_is_not_committed_by_a_pull(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PeerWriter(interface="127.0.0.1")
    try:
        contradicting(monkeypatch, "another dtype")
        dcp.save(STATE, storage_writer=writer)
        done = run("pull", writer.metadata(), "--into-folder", tmp_path / "d")
    finally:
        writer.shutdown()
    assert done.status == exits.STATUS[ProtocolError], done
    assert os.listdir(tmp_path) == []
