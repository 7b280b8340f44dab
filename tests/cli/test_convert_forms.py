"""``convert`` from every form of a checkpoint to every other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from commands import FORMS, copied, damage, make_state, same_values
from equality import assert_same_state
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli import exits
from tensorferry.cli.states import state_of_container
from tensorferry.dcp import FileReader

if TYPE_CHECKING:
    from collections.abc import Callable

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
    assert run("verify", tmp_path / "tensorferry").status == 0
    for to in ("dcp", "torch-dcp"):
        assert run("convert", forms[form], tmp_path / to, "--to", to).status == 0
        target = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
        reader = FileReader(tmp_path / to) if to == "dcp" else dcp.FileSystemReader(tmp_path / to)
        dcp.load(target, storage_reader=reader)
        assert all(torch.equal(target[key], state[key]) for key in target)
        assert run("diff", tmp_path / to, forms[form]).status == 0
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


@pytest.mark.parametrize("to", ["tensorferry", "torch", "safetensors", "checkpoint", "dcp"])
def test_an_output_may_have_the_longest_name(
    to: str, forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("y" * 255, ".new"):
        dropping = ["--drop-objects"] if to == "safetensors" else []
        done = run("convert", forms["file"], tmp_path / name, "--to", to, *dropping)
        assert done.status == 0, done.err
        assert run("inspect", tmp_path / name).status == 0
    assert len(os.listdir(tmp_path)) == 2


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


@pytest.mark.process
def test_a_curled_container_becomes_a_state_again(run: Callable[..., Any], publish: Any, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    url = f"{publish(make_state())}5.safetensors"
    subprocess.run([curl, "-sfo", tmp_path / "5.safetensors", url], check=True, timeout=30)
    assert_same_state(load_file(tmp_path / "5.safetensors"), make_state())
    assert "model.weight" in run("inspect", tmp_path / "5.safetensors").out
    assert run("verify", tmp_path / "5.safetensors").status == exits.NO
    assert run("convert", tmp_path / "5.safetensors", tmp_path / "a.safetensors").status == 0
    assert run("verify", tmp_path / "a.safetensors").status == 0
    assert run("convert", tmp_path / "5.safetensors", tmp_path / "a.pt").status == 0
    same_values(torch.load(tmp_path / "a.pt", weights_only=True), make_state())


def test_tools_that_read_with_torch_get_what_they_need(
    forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    assert run("convert", forms["distributed"], tmp_path / "torch", "--to", "torch-dcp").status == 0
    dcp_to_torch_save(tmp_path / "torch", tmp_path / "a.pt")
    same_values(torch.load(tmp_path / "a.pt", weights_only=True), make_state())


@pytest.mark.parametrize("form", ["file", "archive", "checkpoint"])
def test_damage_is_not_converted(form: str, forms: dict[str, Path], run: Callable[..., Any], tmp_path: Path) -> None:
    path = copied(forms[form], tmp_path)
    damage(next(path.glob("rank*")) if path.is_dir() else path, 100_000)
    done = run("convert", path, tmp_path / "a.pt")
    assert done.status == 4
    assert "is damaged" in done.err
    assert not (tmp_path / "a.pt").exists()
    assert run("convert", path, tmp_path / "a.pt", "--unverified").status == 0


def test_damage_in_one_of_several_files_is_neither_converted_nor_served(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Of files that have checksums, which those of other programs have not."""
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"w": torch.arange(5000.0)}, tmp_path / "w.pt")
    assert run("convert", tmp_path / "w.pt", folder / "model-1.safetensors").status == 0
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    assert run("convert", folder, tmp_path / "whole.safetensors").status == 0
    damage(folder / "model-1.safetensors", 10_000)
    assert run("verify", folder).status == 4
    assert run("convert", folder, tmp_path / "a.safetensors").status == 4
    assert not (tmp_path / "a.safetensors").exists()
    assert run("convert", folder, tmp_path / "a.safetensors", "--unverified").status == 0


@pytest.mark.nightly
def test_memory_stays_bounded(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(8)}
    sources = {}
    for form in ("archive", "checkpoint", "distributed"):
        sources[form] = tmp_path / FORMS[form][1]
        FORMS[form][0](state, sources[form])
    jobs = [("archive", "tensorferry"), ("distributed", "torch"), ("checkpoint", "safetensors")]
    if not hasattr(torch._C.PyTorchFileReader, "get_record_size"):
        # Torch 2.8 reads a record to say how long it is; docs/reference/cli.md tells of that.
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
