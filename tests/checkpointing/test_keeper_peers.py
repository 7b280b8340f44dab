"""What keepers hold, and what transports send, is loaded by a ``PeerReader`` as a distributed checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpoint_loads import load_state
from checkpoint_ranks import run
from keepers import KeeperAtWork, eventually
from rank_worker import SHARDED, TENSORS
from tensorferry import HTTPTransport, cli
from tensorferry.checkpointing import Keeper, load_file, make_async_checkpointer, peer_metadata
from tensorferry.dcp import PeerReader
from tensorferry.errors import IncompleteCheckpoint, UnsafePickle

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SECRET = "a secret of sixteen or more characters"


def kept(count: int) -> str:
    with Keeper() as keeper:
        eventually("it is kept", lambda: len(keeper.held()) == count)
        return peer_metadata(keeper.held())


def test_a_job_whose_trainers_were_killed_is_a_source_for_other_ranks(folder, tmp_path, monkeypatch):
    with KeeperAtWork(folder):
        run("keep", 2, tmp_path / "step-1", -signal.SIGKILL)
        metadata = kept(2)
        monkeypatch.setenv("KEPT", metadata)
        run("fetch", 3, tmp_path / "other")
        # In a process without ranks, into whole tensors.
        asked = {name: torch.zeros_like(value[0]) for name, value in TENSORS.items()}
        asked["sharded"] = torch.zeros_like(SHARDED)
        reader = PeerReader(metadata)
        dcp.load(asked, storage_reader=reader)
        assert torch.equal(asked.pop("sharded"), SHARDED)
        for name, (value, *_) in TENSORS.items():
            assert torch.equal(asked[name], value), name
        # Each part is fetched once, and no replica of one.
        assert reader.report["wanted"] == SHARDED.nbytes + sum(value[0].nbytes for value in TENSORS.values())
        # With one of two ranks, half of the tensors would be missing.
        scheme, step, first, _ = metadata.split()
        with pytest.raises(CheckpointException, match="must name all ranks"):
            dcp.load({"rows": torch.zeros(10, 7)}, storage_reader=PeerReader(f"{scheme} {step} {first}"))


@pytest.mark.nightly
def test_a_job_of_several_ranks_is_backed_up_from_its_keeper_and_restored_when_all_is_gone(folder, tmp_path):
    with KeeperAtWork(folder) as keeper:
        run("keep", 2, tmp_path / "step-1", -signal.SIGKILL)
        metadata = kept(2)
        assert cli.main(["pull", metadata, "--into-folder", str(tmp_path / "backup"), "--quiet"]) == 0
        keeper.kill()
    assert cli.main(["verify", str(tmp_path / "backup")]) == 0
    # By the ranks of a new job of the same size.
    for rank in range(2):
        state = load_state(tmp_path / "backup", rank=rank, world_size=2)
        assert state.keys() >= TENSORS.keys()
        assert state["note"] == rank
    # And whole, for anybody.
    assert cli.main(["convert", str(tmp_path / "backup"), str(tmp_path / "whole.safetensors")]) == 0
    whole = load_file(tmp_path / "whole.safetensors")
    for name, (value, *_) in TENSORS.items():
        assert torch.equal(whole[name], value), name


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


def test_a_keeper_with_a_secret_serves_those_who_know_it(folder, tmp_path):
    with KeeperAtWork(folder, secret=SECRET):
        checkpointer = make_async_checkpointer(keeper="default")
        checkpointer.save(tmp_path / "run" / "1", {"w": torch.arange(9)}, step=4)[1].result()
        metadata = kept(1)
        checkpointer.close()
        asked = {"w": torch.zeros(9, dtype=torch.int64)}
        dcp.load(asked, storage_reader=PeerReader(metadata, secret=SECRET))
        assert torch.equal(asked["w"], torch.arange(9))
        with pytest.raises(CheckpointException, match="secret"):
            dcp.load(asked, storage_reader=PeerReader(metadata))


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


@pytest.mark.nightly
def test_the_metadata_is_that_of_a_save_of_all_ranks(folder, tmp_path):
    with KeeperAtWork(folder) as process:
        with Keeper() as keeper, pytest.raises(IncompleteCheckpoint, match="all ranks"):
            peer_metadata(keeper.held())
        checkpointer = make_async_checkpointer(keeper="default")
        for number in (1, 2):
            checkpointer.save(tmp_path / "run" / str(number), {"n": torch.tensor(number)})[1].result()
        metadata = kept(2)
        status = subprocess.run(
            [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--status"], capture_output=True, text=True
        )
        assert metadata in status.stdout
        # A keeper has no torch, and cannot make the pickles of a stock torchft peer.
        _, step, url = metadata.split()
        for name in ("full", "metadata", "0"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{url}{step}/{name}", timeout=20)
            refused.value.close()
        asked = {"n": torch.tensor(0)}
        dcp.load(asked, storage_reader=PeerReader(metadata))
        assert asked["n"] == 2
        checkpointer.close()
        process.end()
        with pytest.raises(CheckpointException, match=r"cannot connect"):
            dcp.load(asked, storage_reader=PeerReader(metadata))
