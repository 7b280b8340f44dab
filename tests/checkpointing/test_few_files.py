"""At the limit of open files: an error of our own that names the limit, nothing leaked, and the next call works."""

from __future__ import annotations

import gc
import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from few_files import descriptors, few_files

from nights import mostly_at_night
from tensorferry import HTTPTransport
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter, own_errors
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


@pytest.mark.parametrize(
    "name", mostly_at_night(["async save", "file reader", "sync save", "file writer", "transport"], by_day=2)
)
def test_a_call_without_descriptors_names_the_limit_leaks_nothing_and_works_again(name, tmp_path):
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "first"))
    checkpointer = AsyncCheckpointer() if name == "async save" else SyncCheckpointer()
    paths = (tmp_path / str(number) for number in itertools.count())

    def call():
        with own_errors():
            match name:
                case "async save":
                    checkpointer.save(next(paths), STATE)[1].result(60)
                case "sync save":
                    checkpointer.save(next(paths), STATE)
                case "file writer":
                    dcp.save(STATE, storage_writer=FileWriter(next(paths)))
                case "file reader":
                    dcp.load({"w": torch.zeros(1000)}, storage_reader=FileReader(tmp_path / "first"))
                case "transport":
                    HTTPTransport(timedelta(seconds=5)).shutdown()

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
    checkpointer.close()
