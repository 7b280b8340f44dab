"""A sender refuses what it cannot send, a receiver what it must not unpickle, and both name it."""

from __future__ import annotations

import collections
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
import tensorferry.dcp
from equality import assert_same_state
from exchange import TIMEOUT, send_and_receive
from leaves import CARRIED, CATALOGUE, REFUSED, Leaf, cases
from tensorferry import errors
from tensorferry.checkpointing import load_file
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state.snapshot import StateSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


@pytest.mark.parametrize("leaf", cases(REFUSED))
def test_what_cannot_be_carried_is_refused_by_the_sender(leaf: Leaf, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(trust_pickle=True)
    with pytest.raises(errors.UnsupportedLeaf, match=r"\buser\.leaf\b"):
        transport.send_checkpoint([1], 1, leaf.state(leaf.value()), TIMEOUT)
    good = CATALOGUE["Adam.state_dict()"].value()
    assert_same_state(send_and_receive(transport, transport, good, step=2), good)


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"user": {"model": {"lock": lambda: 0}}}, r"\buser\.model\.lock\b"),
        ({"a": collections.OrderedDict(b=(1, 2, lambda: 0))}, r"\ba\.b\.2\b"),
        ({"a": {"b": torch.ones(1), "c": lambda: 0, "d": torch.ones(1)}}, r"\ba\.c\b"),
    ],
)
def test_refusal_names_the_path(state: Any, path: str, open_transport: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedLeaf, match=path) as caught:
        open_transport().send_checkpoint([1], 1, state, TIMEOUT)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, tensorferry.TensorferryError)


@pytest.mark.parametrize(
    "leaf", cases([leaf for leaf in CARRIED if leaf.trust and leaf.name in {
        "tensor subclass", "enum", "function, module-level", "class", "dataclass", "object with slots", "namedtuple",
        "wrapper subclass, __reduce_ex__", "dict subclass", "registered node", "defaultdict, own factory", "enum keys",
        "root is an object",
    }])
)  # fmt: skip
def test_a_class_off_the_allow_list_is_refused_by_name(leaf: Leaf, open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    with pytest.raises(errors.UnsafePickle, match=r"\bpickled_classes\b") as caught:
        send_and_receive(transport, transport, leaf.state(leaf.value()))
    assert isinstance(caught.value, tensorferry.TensorferryError)
    assert isinstance(caught.value, pickle.UnpicklingError)
    # The tensors of the state are not the reason: without the object the state can be sent.
    assert_same_state(send_and_receive(transport, transport, {"w": torch.ones(2)}, step=2), {"w": torch.ones(2)})


def test_a_refused_archive_leaves_nothing_behind_in_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "o": Unlisted()}, tmp_path / "a.pt")
    with pytest.raises(errors.UnsafePickle, match="Unlisted"):
        load_file(tmp_path / "a.pt", map_location=lambda storage, _: storage)
    # With a function here, torch unpickles no DTensor.
    assert torch.serialization._serialization_tls.map_location is None


def write(state: Any, path: Path) -> None:
    """Writes a state into a file, without the door of any framework."""
    snapshot = StateSnapshot(state, HostStager(ACCELERATOR), "borrow")
    snapshot.container().write(path, partial=path.with_name(f"{path.name}.partial"))


def test_what_is_refused_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write({"w": torch.ones(1), "o": Unlisted()}, path)
    with pytest.raises(errors.UnsafePickle, match=r"^\S*/a\.safetensors: .*safe_globals=\[\S*Unlisted\]"):
        load_file(path)
    write({"w": torch.ones(1)}, path)
    with pytest.raises(tensorferry.StateMismatch, match="in the checkpoint") as caught:
        load_file(path, {"w": torch.ones(2)})
    assert "at the source" not in str(caught.value)


@pytest.mark.usefixtures("process_group")
def test_a_rank_of_a_distributed_checkpoint_says_what_loads_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1)}, storage_writer=tensorferry.dcp.FileWriter(tmp_path))
    (path,) = tmp_path.glob("rank*.safetensors")
    with pytest.raises(errors.ProtocolError, match=r"^\S*/rank00000-.* with a tensorferry\.dcp\.FileReader"):
        load_file(path)


class Unlisted:
    """A class that no allow-list has."""
