"""What a save and a load report while they run, and what a save warns of."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is:UserWarning", "ignore::FutureWarning"
)


class Calls(list):
    """Keeps what it is called with."""

    def __call__(self, done, total):
        assert threading.current_thread() is threading.main_thread()
        self.append((done, total))


class Own:
    """A class that no allow-list has."""

    def __init__(self):
        self.value = 1


def small():
    return {"w": torch.arange(300_000.0), "t": torch.arange(600.0).reshape(20, 30).t(), "n": 3}


def blank():
    return {name: torch.zeros_like(value) if name != "n" else 0 for name, value in small().items()}


@contextlib.contextmanager
def publication(state, **options):
    """Serves what a save has published; the metadata."""
    writer = PeerWriter(interface="127.0.0.1", **options)
    try:
        dcp.save(state, storage_writer=writer)
        yield writer.metadata()
    finally:
        writer.shutdown()


def check(calls):
    """Checks that calls report one total, never less than before, and at their end all of it."""
    assert len({total for _, total in calls}) == 1
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] >= 300_000 * 4


def test_saves_and_loads_report_their_progress(tmp_path):
    calls = Calls()
    dcp.save(small(), storage_writer=FileWriter(tmp_path / "c", progress=calls))
    check(calls)
    dcp.save(small(), checkpoint_id=tmp_path / "torchs")
    with publication(small()) as metadata:
        for make in (
            lambda calls: FileReader(tmp_path / "c", progress=calls),
            lambda calls: FileReader(tmp_path / "torchs", progress=calls),
            lambda calls: PeerReader(metadata, progress=calls),
        ):
            calls, state = Calls(), blank()
            dcp.load(state, storage_reader=make(calls))
            check(calls)
            assert torch.equal(state["t"], small()["t"])


class Enough(Exception):
    """Raised by a callback."""


def enough(*_):
    raise Enough


def test_an_exception_of_the_callback_ends_the_save_or_load(tmp_path):
    dcp.save(small(), storage_writer=FileWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="Enough"):
        dcp.save(small(), storage_writer=FileWriter(tmp_path / "d", progress=enough))
    assert "index.safetensors" not in os.listdir(tmp_path / "d")
    with pytest.raises(CheckpointException, match="Enough"):
        dcp.load(blank(), storage_reader=FileReader(tmp_path / "c", progress=enough))
    with publication(small()) as metadata, pytest.raises(CheckpointException, match="Enough"):
        dcp.load(blank(), storage_reader=PeerReader(metadata, progress=enough))
    dcp.load(blank(), storage_reader=FileReader(tmp_path / "c"))


def warnings_of(caplog):
    """The warnings of the package, which are then forgotten."""
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return [message for message in found if "allow-list" in message]


def own_class(name):
    """A class that was not warned of before."""
    kind = type(name, (Own,), {"__module__": __name__})
    globals()[name] = kind
    return kind


def test_files_warn_once_of_what_a_load_refuses(tmp_path, caplog):
    state = {"n": 1, "deep": {"own": [own_class("InFile")()]}}
    for name in "ab":
        dcp.save(state, storage_writer=FileWriter(tmp_path / name))
    (told,) = warnings_of(caplog)
    assert told.startswith(
        f"a load will refuse this state: the checkpoint's pickle names {__name__}.InFile for 'deep.own"
    )
    with pytest.raises(CheckpointException, match="InFile"):
        dcp.load(state, storage_reader=FileReader(tmp_path / "a"))


def test_what_a_load_is_given_is_not_warned_of(tmp_path, caplog):
    listed, trusted = own_class("Listed"), own_class("Trusted")
    dcp.save({"o": listed()}, storage_writer=FileWriter(tmp_path / "a", safe_globals=[listed]))
    dcp.save({"o": trusted()}, storage_writer=FileWriter(tmp_path / "b", trust_pickle=True))
    with publication({"o": listed()}, safe_globals=[listed]), publication({"o": trusted()}, trust_pickle=True):
        pass
    # Neither are the objects that a load allows, nor text that looks like a global.
    plain = {"t": torch.ones(3).to_sparse(), "d": torch.float32, "s": "cos\nsystem\n", "b": b"cos\nsystem\n."}
    # torch pickles them by the names that Python 2 had.
    plain |= {"builtins": ({1}, frozenset({2}), 3j, range(4), bytearray(b"5"), collections.defaultdict(list), list)}
    dcp.save(plain, storage_writer=FileWriter(tmp_path / "c"))
    assert warnings_of(caplog) == []
    found = dict.fromkeys(plain) | {"t": torch.zeros(3).to_sparse()}
    dcp.load(found, storage_reader=FileReader(tmp_path / "c"))
    assert found["builtins"] == plain["builtins"]
    dcp.save({"o": [print]}, storage_writer=FileWriter(tmp_path / "d"))
    (told,) = warnings_of(caplog)
    assert "names builtins.print for 'o" in told
