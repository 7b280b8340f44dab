"""What transports send is loaded by a ``PeerReader`` as a distributed checkpoint."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves, tree_map

from tensorferry import HTTPTransport
from tensorferry.dcp import PeerReader
from tensorferry.errors import UnsafePickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_all_kinds_of_leaves_of_a_transport_are_a_distributed_checkpoint():
    base, weight = torch.arange(64.0), torch.nn.Parameter(torch.arange(600.0).reshape(20, 30))
    state = {
        "model": {"weight": weight, "tied": weight, "turned": torch.arange(6.0).reshape(2, 3).t()},
        "views": [base[:8], base[8:16:2], base.as_strided((3, 3), (1, 4))],
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "sparse": torch.eye(4).to_sparse(),
        "empty": torch.zeros(0, 3),
    }
    asked = tree_map(lambda one: torch.zeros(one.shape, dtype=one.dtype), state)
    asked["sparse"] = asked["sparse"].to_sparse()
    values = {"pair": (torch.full((5,), 7.0), "text"), "numbers": [1, 2, 3], "none": None, "groups": [{"lr": 0.1}]}
    with HTTPTransport(timedelta(seconds=20)) as transport:
        transport.send_checkpoint([0], 7, {**state, **values}, timedelta(seconds=20))
        reader = PeerReader(f"tensorferry-dcp/1 7 {transport.metadata()}")
        found = {**asked, "pair": 0, "numbers": [0, 0, 0], "none": 0, "groups": [{"lr": 0}]}
        dcp.load(found, storage_reader=reader)
        for one, expected in zip(*map(tree_leaves, (found, {**state, **values})), strict=True):
            tensors = isinstance(expected, torch.Tensor)
            assert torch.equal(one.to_dense(), expected.to_dense()) if tensors else one == expected
        # Only what is asked for travels: one view, and not all of its storage.
        dcp.load({"views": [torch.zeros(8)]}, storage_reader=reader)
        assert reader.report["wanted"] == 32
        with pytest.raises(CheckpointException, match="no-such-key"):
            dcp.load({"no-such-key": torch.zeros(1)}, storage_reader=reader)


class Odd:
    pass


def test_objects_need_the_allow_list_and_a_state_has_to_be_a_dict():
    with HTTPTransport(timedelta(seconds=20)) as transport:

        def load(state, **options) -> dict:
            transport.send_checkpoint([0], 1, state, timedelta(seconds=20))
            asked = {"o": 0}
            reader = PeerReader(f"tensorferry-dcp/1 1 {transport.metadata()}", **options)
            dcp.load(asked, storage_reader=reader)
            return asked

        with pytest.raises(CheckpointException) as caught:
            load({"o": Odd()})
        assert "allow-list" in str(caught.value) or UnsafePickle.__name__ in str(caught.value)
        assert isinstance(load({"o": Odd()}, safe_globals=[Odd])["o"], Odd)
        with pytest.raises(CheckpointException, match="is a list"):
            load([torch.zeros(1)])
