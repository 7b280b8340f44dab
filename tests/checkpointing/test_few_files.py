"""At the limit of open files: an error of our own that names the limit, nothing leaked, and the next call works."""

from __future__ import annotations

import gc
import pickle
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp

from few_files import descriptors, few_files
from keepers import KeeperAtWork
from nights import mostly_at_night
from tensorferry import HTTPTransport
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.dcp import FileReader, FileWriter, PeerWriter, own_errors
from tensorferry.errors import SystemRefused

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]
STATE = {"w": torch.ones(1000), "step": 1}
#: More descriptors than any of the calls needs.
ENOUGH = 40
#: Buffers that a checkpointer may have made for a save that failed, and keeps for the next one.
KEPT = 2


class Calls:
    """One call of each kind, each with what it makes and closes."""

    def __init__(self, folder) -> None:
        self._folder, self._count = folder, 0
        self.checkpointer: AsyncCheckpointer | None = None

    def path(self):
        self._count += 1
        return self._folder / str(self._count)

    def async_checkpointer(self) -> None:
        AsyncCheckpointer().close()

    def async_save(self) -> None:
        if self.checkpointer is None:
            self.checkpointer = AsyncCheckpointer()
        self.checkpointer.save(self.path(), STATE)[1].result(60)

    def sync_save(self) -> None:
        SyncCheckpointer().save(self.path(), STATE)

    def file_writer(self) -> None:
        with own_errors():
            dcp.save(STATE, storage_writer=FileWriter(self.path()))

    def file_reader(self) -> None:
        found = {"w": torch.zeros(1000), "step": 0}
        with own_errors():
            dcp.load(found, storage_reader=FileReader(self._folder / "first"))
        assert found["step"] == 1

    def transport(self) -> None:
        with HTTPTransport(timedelta(seconds=5)) as transport:
            transport.metadata()

    def peer_writer(self) -> None:
        PeerWriter().shutdown()


@pytest.mark.parametrize(
    "name", mostly_at_night([name for name in vars(Calls) if not name.startswith("_") and name != "path"], by_day=2)
)
def test_a_call_without_descriptors_names_the_limit_leaks_nothing_and_works_again(name, tmp_path):
    calls = Calls(tmp_path)
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "first"))
    call = getattr(calls, name)
    call()
    told = []
    for left in range(ENOUGH):
        gc.collect()
        before = descriptors()
        try:
            with few_files(left):
                call()
        except SystemRefused as e:
            told.append(str(e))
        else:
            break
        finally:
            # Threads may be about to close what they had.
            deadline = time.monotonic() + 10
            while len(descriptors()) > len(before) + KEPT:
                assert time.monotonic() < deadline, descriptors() - before
                gc.collect()
                time.sleep(0.01)
    assert told, "the limit was never met"
    assert all("ulimit -n" in one for one in told), told
    assert left < ENOUGH - 1
    call()
    if calls.checkpointer is not None:
        calls.checkpointer.close()


def test_an_offer_and_a_question_to_a_keeper_without_descriptors_are_refused_and_work_again(folder, tmp_path):
    with KeeperAtWork(folder) as keeper:
        check_keeper(keeper, tmp_path)


def check_keeper(keeper, tmp_path):
    connection = Keeper(keeper.name)
    with few_files(0):
        for ask in (connection.held, connection.status):
            with pytest.raises(SystemRefused, match="ulimit -n"):
                ask()
    assert connection.held() == []
    checkpointer = AsyncCheckpointer(keeper=Keeper(keeper.name))
    checkpointer.save(tmp_path / "a", STATE)[1].result(60)
    checkpointer.close()
    assert len(connection.held()) == 1
    connection.close()


def test_an_error_names_the_limit_once_and_survives_being_sent_on():
    error = SystemRefused("no socket: Too many open files (os error 24)")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).count("ulimit -n") == 1
    assert str(SystemRefused("the disk is full")) == "the disk is full"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SystemRefused(24, "Too many open files").errno == 24
