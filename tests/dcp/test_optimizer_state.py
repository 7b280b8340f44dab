"""A load that leaves an optimizer without its state says so, once, and no other load does."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.state import optimizers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch):
    monkeypatch.setattr(optimizers, "_warned", False)


def trained(steps=1, cls=torch.optim.Adam):
    model = torch.nn.Linear(3, 3)
    optimizer = cls(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "state of an optimizer" in record.getMessage()]


@pytest.mark.parametrize("inside", [True, False])
def test_a_fresh_optimizer_that_is_loaded_by_its_state_dict_is_warned_of_once(tmp_path, caplog, inside):
    def state(optimizer):
        return {"optim": optimizer.state_dict()} if inside else optimizer.state_dict()

    dcp.save(state(trained()[1]), storage_writer=FileWriter(tmp_path))
    with caplog.at_level(logging.WARNING, "tensorferry"):
        for _ in range(2):
            dcp.load(state(trained(steps=0)[1]), storage_reader=FileReader(tmp_path))
    [text] = said(caplog)
    assert ("optim.state.*" if inside else "(state.*)") in text
    assert "get_state_dict" in text


DOORS = {
    "a checkpointer's": lambda path, state: SyncCheckpointer().load(path, state, strict=True),
    "torch.save": lambda path, state: load_file(path / "checkpoint_0.pt", state),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_checkpointer_warns_of_a_fresh_optimizer_too(tmp_path, caplog, door):
    def state(optimizer):
        return {"m": torch.zeros(2), "of": [torch.zeros(1), {"o": optimizer.state_dict()}]}

    if door == "torch.save":
        torch.save(state(trained()[1]), tmp_path / "checkpoint_0.pt")
    else:
        SyncCheckpointer().save(tmp_path, state(trained()[1]))
    DOORS[door](tmp_path, state(trained()[1]))
    # None takes whatever there is.
    DOORS[door](tmp_path, {"of": [torch.zeros(1), {"o": {"param_groups": None, "state": None}}]})
    # A list without tensors is a value, and so is the optimizer in it.
    DOORS[door](tmp_path, {"m": torch.zeros(2), "of": [trained(steps=0)[1].state_dict()]})
    assert said(caplog) == []
    for _ in range(2):
        DOORS[door](tmp_path, state(trained(steps=0)[1]))
    [text] = said(caplog)
    assert "(of[1].o.state.*)" in text


def test_megatrons_keys(caplog):
    there = ["m.w", "optimizer.fp32_param.w", "optimizer.state.exp_avg.w"]
    optimizers.warn_of_missing(["m.w"], lambda: there)
    optimizers.warn_of_missing(there, lambda: there)
    assert said(caplog) == []
    optimizers.warn_of_missing(there[:2], lambda: there)
    assert "(optimizer.state.*)" in said(caplog)[0]


def test_loads_that_need_no_warning_get_none(tmp_path, caplog):
    model, optimizer = trained()
    dcp.save({"m": model.state_dict(), "o": optimizer.state_dict()}, storage_writer=FileWriter(tmp_path / "a"))
    dcp.load({"m": trained()[0].state_dict()}, storage_reader=FileReader(tmp_path / "a"))
    dcp.load({"o": trained()[1].state_dict()}, storage_reader=FileReader(tmp_path / "a"))
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), storage_writer=FileWriter(tmp_path / "b"))
    fresh = dict(zip("mo", get_state_dict(*trained(steps=0)), strict=True))
    dcp.load(fresh, storage_reader=FileReader(tmp_path / "b"))
    # SGD without momentum has no state on either side.
    plain = {"o": trained(cls=torch.optim.SGD)[1].state_dict()}
    dcp.save(plain, storage_writer=FileWriter(tmp_path / "c"))
    dcp.load({"o": trained(0, torch.optim.SGD)[1].state_dict()}, storage_reader=FileReader(tmp_path / "c"))
    assert said(caplog) == []
