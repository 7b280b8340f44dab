"""The resource `{step}.safetensors` of our server is a valid safetensors file."""

from __future__ import annotations

import json
import shutil
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from leaves import ALONE, CATALOGUE, Leaf, cases

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMEOUT = timedelta(seconds=30)
OWN = "__tensorferry__/"

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


@pytest.fixture
def download(open_transport: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    def fetch(state: Any, **options: Any) -> Path:
        transport = open_transport(**options)
        transport.send_checkpoint([1], 12, state, TIMEOUT)
        file = tmp_path / "12.safetensors"
        with (
            urllib.request.urlopen(f"{transport.metadata()}12.safetensors", timeout=30) as body,
            file.open("wb") as out,
        ):
            shutil.copyfileobj(body, out)
        return file

    return fetch


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """Returns the names of the entries that are tensors of the state, in the order of the header."""
    with safetensors.safe_open(file, framework="pt") as opened:
        names = [name for name in header_of(file) if not name.startswith((OWN, "__metadata__"))]
        assert set(names) | {name for name in opened.keys() if name.startswith(OWN)} == set(opened.keys())  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}


def test_plain_tensors_lie_under_their_key_paths(download: Callable[..., Path]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = {
        "user": {"model": model.state_dict(), "scale": nn.Parameter(torch.tensor(2.5))},
        "layers": [torch.ones(2), (torch.zeros(1, dtype=torch.int64), "not a tensor")],
        "empty": torch.empty(0, 5),
        "torchft": {"step": 12},
    }
    found = tensors_of(download(state))
    expected = {
        **{f"user.model.{name}": tensor for name, tensor in model.state_dict().items()},
        "user.scale": state["user"]["scale"].detach(),
        "layers.0": state["layers"][0],
        "layers.1.0": state["layers"][1][0],
        "empty": state["empty"],
    }
    assert list(found) == list(expected), "tree order"
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("leaf", cases(ALONE))
def test_every_state_is_a_file_that_opens(leaf: Leaf, download: Callable[..., Path]) -> None:
    file = download(leaf.state(leaf.value()))
    found = tensors_of(file)
    safetensors.torch.load_file(file)
    if not leaf.root:
        assert torch.equal(found["user.model.weight"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(found["user.last"], torch.ones(3))


def test_layout(download: Callable[..., Path]) -> None:
    """There are no holes, every tensor is aligned in the file, and whole pages come first, then falling alignments."""
    state = {
        f"{i}.{d}": CATALOGUE[f"dtype {d}"].value() for i in range(3) for d in ("int8", "float64", "bfloat16", "int32")
    }
    state["pages"] = torch.zeros(2 * 4096, dtype=torch.uint8)
    file = download({**state, "object": {1, 2}, "view": torch.arange(9.0)[::2]})
    data, header = file.read_bytes(), header_of(file)
    assert header.pop("__metadata__") == {"format": "pt", "tensorferry.version": "1"}
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert start + end == len(data)
    for name, tensor in state.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.element_size() == 0
    order = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert order[:3] == [f"{OWN}manifest", f"{OWN}pickle", "pages"]


def test_shared_bytes_are_in_the_file_once(download: Callable[..., Path]) -> None:
    base = torch.arange(1 << 16, dtype=torch.float32)
    file = download({"w": base, "tied": base, "half": base[: 1 << 15], "as ints": base.view(torch.int32)})
    assert file.stat().st_size < base.nbytes + (16 << 10)
