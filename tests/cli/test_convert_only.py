"""``convert --only``: one part of a state, with the names that ``load_state_dict`` takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from checkpoint_ranks import run as run_ranks
from commands import FORMS, write_archive, write_checkpoint, write_distributed, write_torch_distributed
from rank_worker import SHARDED, TENSORS
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits
from tensorferry.dcp import FileReader
from tensorferry.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SOURCES = {
    "archive": write_archive,
    "checkpoint": write_checkpoint,
    "dcp": write_distributed,
    "torch-dcp": write_torch_distributed,
}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_fits(found: dict[str, Any]) -> None:
    """Loads a part into a new model, by all its names, and compares the two models."""
    model, _ = trained()
    new = network()
    new.load_state_dict(found)
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_has_the_model_alone(source: str, run: Callable[..., Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    SOURCES[source](state, tmp_path / "ck")
    for name, to, load in (
        ("m.pt", "torch", lambda path: torch.load(path, weights_only=True)),
        ("m.safetensors", "safetensors", load_safetensors),
        ("own.safetensors", "tensorferry", load_file),
        ("folder", "checkpoint", SyncCheckpointer().load),
    ):
        done = run("convert", tmp_path / "ck", tmp_path / name, "--to", to, "--only", "model")
        assert done.status == exits.OK, done.err
        assert "7 tensors" in done.out
        assert_fits(load(tmp_path / name))
    for to, reader in (("dcp", FileReader), ("torch-dcp", dcp.FileSystemReader)):
        assert run("convert", tmp_path / "ck", tmp_path / to, "--to", to, "--only", "model").status == exits.OK
        found = network().state_dict()
        dcp.load(found, storage_reader=reader(tmp_path / to), no_dist=True)
        assert_fits(found)


@pytest.mark.parametrize("source", SOURCES)
def test_an_optimizer_alone_is_loaded(source: str, run: Callable[..., Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    SOURCES[source]({"job": {"model": model.state_dict(), "optim": optimizer.state_dict()}}, tmp_path / "ck")
    assert run("convert", tmp_path / "ck", tmp_path / "o.pt", "--only", "job.optim").status == exits.OK
    new = torch.optim.Adam(network().parameters())
    new.load_state_dict(torch.load(tmp_path / "o.pt"))
    assert len(new.state) == len(optimizer.state) == 4


def test_names_with_dots_are_a_part_too(run: Callable[..., Any], tmp_path: Path) -> None:
    """A file of another program has one dict, whose names have the prefix."""
    model, _ = trained()
    tensors = {f"net.model.{name}": value for name, value in model.state_dict().items()}
    save_file(tensors | {"net.models": torch.ones(1), "other": torch.ones(1)}, tmp_path / "all.safetensors")
    done = run("convert", tmp_path / "all.safetensors", tmp_path / "m.pt", "--only", "net.model")
    assert done.status == exits.OK, done.err
    assert_fits(torch.load(tmp_path / "m.pt"))


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("modl", "there is no such part: the state has model, step"),
        ("model.0", "that is a Tensor"),
        ("step", "that is a int"),
        ("model.0.x", "there is no such part"),
        ("", "must name a part"),
    ],
)
def test_what_is_no_part_is_refused(only: str, words: str, run: Callable[..., Any], tmp_path: Path) -> None:
    write_archive({"model": {"0": torch.ones(2)}, "step": 3}, tmp_path / "ck")
    done = run("convert", tmp_path / "ck", tmp_path / "o.pt", "--only", only)
    assert done.status == exits.STATUS[InvalidArgument]
    assert words in done.err
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tensors_that_are_spread_over_ranks_are_whole(run: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks("save-below", 2, tmp_path / "ck")
    done = run("convert", tmp_path / "ck", tmp_path / "m.pt", "--only", "model")
    assert done.status == exits.OK, done.err
    found = torch.load(tmp_path / "m.pt")
    for name, value in ({name: value for name, (value, *_) in TENSORS.items()} | {"sharded": SHARDED}).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_out_may_be_of_any_class(form: str, run: Callable[..., Any], tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(4.0)}, "args": argparse.Namespace(a=1), "version": [torch.__version__]}
    write, name = FORMS[form]
    write(state, tmp_path / name)
    assert run("convert", tmp_path / name, tmp_path / "model.pt", "--only", "model").status == 0
    assert torch.load(tmp_path / "model.pt")["w"].tolist() == [0, 1, 2, 3]
    done = run("convert", tmp_path / name, tmp_path / "w", "--to", "safetensors", "--drop-objects", "--json")
    assert done.status == 0, done
    assert {leaf.partition(".")[0] for leaf in done.json["dropped"]} == {"args", "version"}
    assert load_safetensors(tmp_path / "w")["model.w"].tolist() == [0, 1, 2, 3]
    done = run("convert", tmp_path / name, tmp_path / "all.pt")
    assert done.status == exits.UNREADABLE
    assert "argparse.Namespace" in done.err
    shown = run("inspect", tmp_path / name)
    assert shown.status == 0
    assert ("argparse.Namespace, not on the allow-list" in shown.out) == (form == "archive")
