"""States that tests save and load."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter


def save(folder, value, writer=None, **options):
    """Saves a tensor of one value in a process without ranks."""
    writer = writer or FileWriter(folder)
    dcp.save({"a": torch.full((1000,), float(value))}, storage_writer=writer, no_dist=True, **options)


def loaded(folder, reader=None):
    """The value that was saved."""
    state = {"a": torch.zeros(1000)}
    dcp.load(state, storage_reader=reader or FileReader(folder), no_dist=True)
    (value,) = state["a"].unique().tolist()
    return value


def fails(call):
    """Returns the exception that the only rank raised."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]
