"""Saves and loads of one process with ``torch.distributed.checkpoint``."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter, own_errors


def save(state, place, **how):
    with own_errors():
        dcp.save(state, storage_writer=FileWriter(place, **how), no_dist=True)


def load(state, place, **how):
    """Returns what is saved under the names of ``state``, in new tensors that are like those."""
    into = {name: torch.zeros_like(one) for name, one in state.items()}
    with own_errors():
        dcp.load(into, storage_reader=FileReader(place, **how), no_dist=True)
    return into
