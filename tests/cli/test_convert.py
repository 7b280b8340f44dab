"""``convert`` from every form of a checkpoint, or a part of one, to every other."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from commands import (
    FORMS,
    make_state,
    same_values,
    write_archive,
)
from equality import assert_same_state
from kinds import KINDS, written
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits
from tensorferry.cli.states import state_of_container
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


@pytest.mark.parametrize("form", ["file", "archive", "checkpoint", "distributed", "torch"])
def test_every_form_becomes_every_other(
    form: str, forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    state = make_state()
    readers: dict[str, Callable[[Path], Any]] = {
        "tensorferry": load_file,
        "torch": lambda path: torch.load(path, weights_only=True),
        "checkpoint": lambda path: SyncCheckpointer().load(path),
    }
    for to, read in readers.items():
        done = run("convert", forms[form], tmp_path / to, "--to", to)
        assert done.status == 0, done.err
        same_values(read(tmp_path / to), state)
        assert run("convert", forms[form], tmp_path / "model", "--to", to, "--only", "model").status == 0
        same_values(read(tmp_path / "model"), state["model"])
        (shutil.rmtree if to == "checkpoint" else os.unlink)(tmp_path / "model")
    assert run("verify", tmp_path / "tensorferry").status == 0
    for to in ("dcp", "torch-dcp"):
        assert run("convert", forms[form], tmp_path / to, "--to", to).status == 0
        target = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
        reader = FileReader(tmp_path / to) if to == "dcp" else dcp.FileSystemReader(tmp_path / to)
        dcp.load(target, storage_reader=reader)
        assert all(torch.equal(target[key], state[key]) for key in target)
        assert run("diff", tmp_path / to, forms[form]).status == 0
        model = {name: torch.zeros_like(value) for name, value in state["model"].items()}
        assert run("convert", forms[form], tmp_path / "model", "--to", to, "--only", "model").status == 0
        dcp.load(model, storage_reader=(FileReader if to == "dcp" else dcp.FileSystemReader)(tmp_path / "model"))
        same_values(model, state["model"])
        shutil.rmtree(tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == sorted([*readers, "dcp", "torch-dcp"])


def test_an_archive_without_checksums_is_not_damaged(run: Callable[..., Any], tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(make_state(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    verified = run("verify", tmp_path / "a.pt")
    assert verified.status == exits.NO
    assert "it has no checksums" in verified.out
    assert run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "tensorferry").status == 0
    assert run("diff", tmp_path / "a.pt", tmp_path / "b").status == 0


def test_safetensors_for_other_programs(forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    out = tmp_path / "a.safetensors"
    refused = run("convert", forms["file"], out, "--to", "safetensors")
    assert refused.status == exits.UNREADABLE
    assert "--drop-objects" in refused.err
    assert os.listdir(tmp_path) == []
    done = run("convert", forms["file"], out, "--to", "safetensors", "--drop-objects")
    assert done.status == 0
    assert "3 leaves are not tensors, and were left out: list.1, step, name" in done.err
    found = safetensors.load_file(out)
    state = make_state()
    assert torch.equal(found["model.weight"], state["model"]["weight"])
    assert torch.equal(found["view"], state["view"])
    assert not any(name.startswith("__tensorferry__") for name in found)
    # And back.
    assert run("convert", out, tmp_path / "b.safetensors").status == 0
    assert_same_state(
        load_file(tmp_path / "b.safetensors"), {name: found[name] for name in load_file(tmp_path / "b.safetensors")}
    )


def test_keys_with_dots_lose_nothing(run: Callable[..., Any], tmp_path: Path) -> None:
    state = {"a": {"b": 1, "c": torch.ones(2)[1:]}, "a.b": torch.zeros(3), "a.c": torch.arange(2)}
    torch.save(state, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "a", "--to", "safetensors", "--drop-objects")
    assert done.status == 0
    (told,) = run("inspect", tmp_path / "a", "--json").json
    assert sorted(leaf["bytes"] for leaf in told["leaves"]) == [4, 12, 16]
    other = {**state, "a": {**state["a"], "b": 2}}
    torch.save(other, tmp_path / "b.pt")
    assert run("diff", tmp_path / "a.pt", tmp_path / "b.pt").status == exits.NO
    assert run("diff", tmp_path / "a.pt", tmp_path / "a.pt").status == 0


def test_names_that_the_format_reserves_take_that_of_no_other_leaf(run: Callable[..., Any], tmp_path: Path) -> None:
    names = ["", "~", "__metadata__", "~__metadata__", "~~__metadata__", "__tensorferry__/x"]
    # A view has its path for a name, and no name of its own in a container.
    torch.save({name: torch.full((3,), float(n))[:2] for n, name in enumerate(names)}, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "a.safetensors", "--to", "safetensors").status == 0
    found = state_of_container(tmp_path / "a.safetensors")
    assert sorted(float(value[0]) for value in found.values()) == [0, 1, 2, 3, 4, 5]
    assert {name: float(found[name][0]) for name in names if name in found} == {
        name: float(n) for n, name in enumerate(names) if name.startswith("~")
    }
    assert float(found["~__tensorferry__/x"][0]) == 5


def test_a_downloaded_container_becomes_a_state_again(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    urllib.request.urlretrieve(f"{publish(make_state())}5.safetensors", tmp_path / "5.safetensors")
    assert_same_state(load_file(tmp_path / "5.safetensors"), make_state())
    assert "model.weight" in run("inspect", tmp_path / "5.safetensors").out
    assert run("verify", tmp_path / "5.safetensors").status == exits.NO
    assert run("convert", tmp_path / "5.safetensors", tmp_path / "a.safetensors").status == 0
    assert run("verify", tmp_path / "a.safetensors").status == 0
    assert run("convert", tmp_path / "5.safetensors", tmp_path / "a.pt").status == 0
    same_values(torch.load(tmp_path / "a.pt", weights_only=True), make_state())


@pytest.mark.nightly
def test_memory_stays_bounded(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(8)}
    sources = {}
    for form in ("archive", "checkpoint", "distributed"):
        sources[form] = tmp_path / FORMS[form][1]
        FORMS[form][0](state, sources[form])
    jobs = [("archive", "tensorferry"), ("distributed", "torch"), ("checkpoint", "safetensors")]
    if not hasattr(torch._C.PyTorchFileReader, "get_record_size"):
        # Torch 2.8 reads a record to say how long it is.
        del jobs[0]
    block = f"""
import threading, time
import torch, tensorferry.cli.conversion, torch.distributed.checkpoint
from tensorferry.cli import main
def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) >> 10
before, most, done = held(), 0, False
def watch():
    global most
    while not done:
        most = max(most, held())
        time.sleep(0.002)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
status = [main(["convert", source, to, "--to", to]) for source, to in {[(str(sources[a]), b) for a, b in jobs]!r}]
done = True
thread.join()
print(status, most - before, sep=";")
"""
    command_line = [sys.executable, "-W", "ignore", "-c", block]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path)
    status, grown = done.stdout.splitlines()[-1].split(";")
    # Of 128 MiB of tensors.
    assert (status, int(grown) < 80) == (str([0] * len(jobs)), True), done.stdout


def test_names_with_dots_are_a_part_too(run: Callable[..., Any], tmp_path: Path) -> None:
    """A file of another program has one dict, whose names have the prefix."""
    names = ("net.model.0.w", "net.models", "other")
    save_file({name: torch.full((2,), float(n)) for n, name in enumerate(names)}, tmp_path / "all.safetensors")
    for to, read in (("torch", torch.load), ("safetensors", load_safetensors)):
        done = run("convert", tmp_path / "all.safetensors", tmp_path / to, "--to", to, "--only", "net.model")
        assert (done.status, "1 tensor" in done.out) == (exits.OK, True), done
        assert {name: value.tolist() for name, value in read(tmp_path / to).items()} == {"0.w": [0, 0]}


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


PEER = "http://127.0.0.1:1/x/checkpoint/"
FOR_PEERS = "are for running peers"
CASES = [
    ("convert state.pt OUT --to torch --rank 0", "--rank is for a checkpointer's folder"),
    ("convert writers OUT --to torch --rank 1", "--rank is for a checkpointer's folder"),
    ("convert checkpointers OUT --to torch --step 3", "--step is for --to checkpoint"),
    ("convert state.pt OUT.safetensors --drop-objects", "--drop-objects is for --to safetensors"),
    ("convert writers OUT --to torch --unverified", "--unverified is not for"),
    ("convert megatron OUT.safetensors", "can be converted to dcp or torch-dcp, not to tensorferry"),
    ("convert megatron OUT --to dcp --rank 0", "--rank is for a checkpointer's folder"),
    ("convert megatron OUT --to dcp --step 3", "--step is for --to checkpoint"),
    ("convert megatron OUT --to dcp --drop-objects", "--drop-objects is for --to safetensors"),
    ("convert megatron OUT --to dcp --only model", "--only is not for a checkpoint of Megatron"),
    ("convert megatron OUT --to dcp --unverified", "--unverified is not for"),
    ("inspect state.pt --step 3", FOR_PEERS),
    ("serve state.pt", "run `tensorferry convert state.pt OUT --to tensorferry`"),
    ("inspect checkpointers --timeout 5", FOR_PEERS),
    ("inspect . --digests", "Name one of what is in it"),
    ("diff state.pt state.pt --timeout 5", FOR_PEERS),
    (f"pull {PEER} -o a --into-folder b", "--output and --into-folder exclude each other"),
    (f"pull {PEER} -o s3://bucket/x --force", "--force replaces nothing in an object store"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("kinds")
    for kind in KINDS.values():
        if kind.name in ("state.pt", "writers", "checkpointers", "megatron"):
            written(kind, made, with_notes=False)
    return made


@pytest.mark.parametrize(("line", "text"), CASES)
def test_refused(line: str, text: str, folder: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    done = run(*line.split())
    assert done.status == (3 if line.startswith("inspect .") else 2), done
    assert text in done.err
    assert sorted(os.listdir(folder)) == before
