"""What transports send is loaded by a ``PeerReader`` as a distributed checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry import HTTPTransport
from tensorferry.dcp import PeerReader
from tensorferry.errors import UnsafePickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def odd_state() -> dict:
    weight = torch.nn.Parameter(torch.arange(600.0).reshape(20, 30))
    base = torch.arange(64.0)
    return {
        "model": OrderedDict(weight=weight, tied=weight, bias=torch.ones(30, dtype=torch.bfloat16)),
        "optimizer": {
            "state": {0: {"exp_avg": torch.arange(600.0).reshape(30, 20).t(), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "views": [base[:8], base[8:16:2], base.as_strided((3, 3), (1, 4))],
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "sparse": torch.eye(4).to_sparse(),
        "pair": (torch.full((5,), 7.0), "text"),
        "empty": torch.zeros(0, 3),
        "numbers": [1, 2, 3],
        "none": None,
    }


def blank(value):
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return torch.zeros(value.shape).to_sparse()
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, list) and any(isinstance(one, (dict, torch.Tensor)) for one in value):
        return [blank(one) for one in value]
    return 0


def same(found, expected) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            torch.equal(found.to_dense(), expected.to_dense()) if expected.is_sparse else torch.equal(found, expected)
        )
    if isinstance(expected, dict):
        return all(same(found[key], one) for key, one in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def asked_of(state: dict) -> dict:
    return {**blank(state), "pair": 0}


@pytest.mark.nightly
def test_all_kinds_of_leaves_of_a_transport_are_a_distributed_checkpoint():
    state = odd_state()
    with HTTPTransport(timedelta(seconds=20)) as transport:
        transport.send_checkpoint([0], 7, state, timedelta(seconds=20))
        reader = PeerReader(f"tensorferry-dcp/1 7 {transport.metadata()}")
        # The sparse tensor cannot be built before its indices are there; without it, they are not fetched.
        for left_out in ((), ("sparse",)):
            sent = {key: value for key, value in state.items() if key not in left_out}
            transport.send_checkpoint([0], 7, sent, timedelta(seconds=20))
            asked = asked_of(sent)
            dcp.load(asked, storage_reader=reader)
            for key, value in sent.items():
                assert same(asked[key], value), (key, asked[key])
        # Only what is asked for travels: one view, and not all of its storage.
        asked = {"views": [torch.zeros(8)]}
        dcp.load(asked, storage_reader=reader)
        assert torch.equal(asked["views"][0], torch.arange(8.0))
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
