"""The stager in ``dcp.async_save``, unchanged."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import Stager
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.errors import TransportClosed

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning", "ignore:TypedStorage"),
]
WAIT_S = 60


def state_of(value: float) -> dict:
    return {"w": torch.full((1000,), float(value)), "nested": {"step": int(value)}}


def test_the_stager_is_torchs_where_torch_has_one() -> None:
    staging = pytest.importorskip("torch.distributed.checkpoint._experimental.staging")
    assert issubclass(Stager, staging.CheckpointStager)


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters, reason="this torch takes no stager"
)
def test_dcp_async_save_works_with_our_stager_and_file_writer(tmp_path) -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    stager = Stager()
    assert isinstance(stager, AsyncStager)
    state = {"a": torch.arange(1000.0), "b": {"c": torch.ones(3, 4).t(), "n": 5}}
    for n in range(3):
        state["a"].fill_(n)
        saved = dcp.async_save(state, storage_writer=FileWriter(tmp_path / str(n)), async_stager=stager, no_dist=True)
        if not hasattr(saved, "upload_completion"):
            saved.result(WAIT_S)
        else:
            saved.staging_completion.result(WAIT_S)
            state["a"].fill_(99)
            saved.upload_completion.result(WAIT_S)
    stager.close()
    for n in range(3):
        target = {"a": torch.zeros(1000), "b": {"c": torch.zeros(3, 4).t(), "n": 0}}
        dcp.load(target, storage_reader=FileReader(tmp_path / str(n)), no_dist=True)
        assert (target["a"] == n).all()
        assert target["b"]["n"] == 5


def test_a_staged_state_is_not_overwritten_by_later_ones_while_somebody_has_it() -> None:
    """torch's stager reuses its buffers: there, the first result changes with the second stage."""
    with contextlib.closing(Stager()) as stager:
        staged = [stager.stage(state_of(n)).result(WAIT_S) for n in range(4)]
        for n, state in enumerate(staged):
            assert (state["w"] == n).all()
            assert state["nested"] == {"step": n}
        kept = staged[2]["w"]
        del staged, state
        stager.stage(state_of(7)).result(WAIT_S)
        assert (kept == 2).all()
    with pytest.raises(TransportClosed):
        stager.stage(state_of(1))
