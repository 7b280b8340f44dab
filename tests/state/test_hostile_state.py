"""Malformed manifests and pickles: each raises an error of ours, whichever part of it is wrong."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorferry
from hostile_pickles import Raw, read, say, whole
from tensorferry.errors import ProtocolError
from tensorferry.state import manifest, snapshot
from tensorferry.state.shards import described as described_shards
from tensorferry.state.shards import why_incomplete
from tensorferry.storage import reserved

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

TIMEOUT = timedelta(seconds=20)
MANIFESTS: dict[str, dict[str, Any]] = {
    "no keys": {"keys": None},
    "keys that are not text": {"keys": {"0": 7}},
    "no tensors": {"tensors": None},
    "tensors of other length": {"tensors": [[-1, "t", "torch.float32"]]},
    "a tensor that is named by a list": {"tensors": [["x", [], {}, 1]]},
    "kinds without numbers": {"kinds": {"a": "nested"}},
    "a namedtuple of a class that is none": {"tree": {"a": ["n", 1, -1]}},
    "attributes that are a number": {"tree": ["a", 0, ["o", {}]]},
    "a key that cannot be one": {"tree": ["d", "d", [[["r", 2], -1]]]},
}
OBJECTS = [3, dict, [1]]


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_manifest_that_makes_no_sense_is_a_protocol_error(
    name: str, in_place: bool, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = {"a": torch.ones(3)}

    def control(packed: Any) -> list[tuple[str, bytes]]:
        made = json.loads(packed.manifest())
        changes = {key: value for key, value in MANIFESTS[name].items() if value is not None}
        made = {key: value for key, value in made.items() if MANIFESTS[name].get(key, 0) is not None}
        made |= {**changes, "objects": len(OBJECTS)}
        return [
            (reserved.MANIFEST, snapshot._padded(json.dumps(made).encode(), b" ")),
            (reserved.PICKLE, snapshot._padded(pickle.dumps(OBJECTS, 4), b"\0")),
        ]

    monkeypatch.setattr(snapshot.StateSnapshot, "_control", control)
    live = {"a": torch.zeros(3)}
    source = open_transport()
    source.send_checkpoint([1], 1, published, TIMEOUT)
    receiver = open_transport(**({"state_dict": lambda: live} if in_place else {}))
    only_for_places = not {"tree"} & MANIFESTS[name].keys()
    if only_for_places and not in_place:
        assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)["a"], torch.ones(3))
        return
    with pytest.raises((ProtocolError, tensorferry.StateMismatch)):
        receiver.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert not live["a"].any()


@pytest.mark.parametrize(
    "to", [("leaf", 2), ("leaf", -1), ("leaf", "0"), ("typed", 0, "load"), ("typed", 0), ("other", 0), 7, [], "leaf"]
)
def test_references_to_what_is_not_there_are_protocol_errors(to: Any) -> None:
    with pytest.raises(tensorferry.errors.ProtocolError):
        read(whole(Raw(say(to) + b"Q")))


#: Objects that the pickle has where the manifest announces float32 [3, 3], or no tensor at all.
NOT_AS_ANNOUNCED: dict[str, Callable[[], Any]] = {
    "no tensor": lambda: {1, 2},
    "another shape": lambda: torch.ones(6)[::2],
    "another dtype": lambda: torch.ones(6, 3, dtype=torch.complex64)[::2],
    "on the meta device": lambda: torch.ones(3, 3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NOT_AS_ANNOUNCED)
@pytest.mark.parametrize("announced", [True, False])
def test_what_is_not_as_announced_is_written_nowhere(
    name: str, announced: bool, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = NOT_AS_ANNOUNCED[name]()
    described = manifest._described

    def lie(flat: Any) -> list[list[Any]]:
        honest = [row for row in json.loads(described(flat)) if row[1] != "o"]
        return [*honest, [flat.object_paths.index("o"), "o", "torch.float32", [3, 3]]] if announced else honest

    live = {"late": torch.zeros(2), "o": torch.zeros(3, 3)}
    source, receiver = open_transport(), open_transport(state_dict=lambda: live)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_described", lambda flat: json.dumps(lie(flat)).encode())
        patch.setattr(manifest, "_kinds", lambda _: {})
        # A view, so that it is copied after everything has arrived.
        source.send_checkpoint([1], 1, {"late": torch.ones(4)[::2], "o": value}, TIMEOUT)
    error, why = (ProtocolError, "sent something else") if announced else (tensorferry.StateMismatch, "a value at the")
    with pytest.raises(error, match=rf"\bo\b.*{why}"):
        receiver.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert not live["late"].any()
    assert not live["o"].any()


@pytest.mark.parametrize(
    ("shape", "parts", "fits"),
    [
        ([4], [([0], [2]), ([1], [2])], False),
        ([2, 4], [([0, 0], [2, 2]), ([0, 1], [2, 2])], False),
        ([2, 2], [([0, 0], [2, 1]), ([0, 0], [1, 2])], False),
        ([4], [([0], [2]), ([0], [2]), ([2], [2]), ([1], [0])], True),
        ([2, 4], [([0, 2], [2, 2]), ([0, 0], [1, 2]), ([1, 0], [1, 2])], True),
        ([], [([], []), ([], [])], True),
    ],
)
def test_parts_that_overlap_and_could_hide_a_hole_are_refused(shape, parts, fits):
    fields = {
        "dtype": "torch.float32",
        "global_shape": shape,
        "parts": [
            {"rank": n, "offsets": at, "shape": size, "stride": [1] * len(shape), "storage": 0, "storage_offset": 0}
            for n, (at, size) in enumerate(parts)
        ],
    }
    _, found, shards = described_shards("x", "p", fields)
    assert found == shape
    assert (why_incomplete(shape, shards) is None) == fits


def test_a_description_of_parts_that_makes_no_sense_is_a_protocol_error() -> None:
    good = {"dtype": "torch.float32", "global_shape": [1], "parts": []}
    half = [{"rank": 0, "offsets": [0]}]
    for wrong in ({"dtype": "torch.load"}, {"global_shape": [-1]}, {"global_shape": [2**61]}, {"parts": half}):
        with pytest.raises(ProtocolError, match="its index has no valid description of p"):
            described_shards("x", "p", good | wrong)
