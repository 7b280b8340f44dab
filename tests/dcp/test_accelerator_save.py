"""State on an accelerator, saved with torch.distributed.checkpoint: tried with a stand-in for one."""

from __future__ import annotations

import functools
import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from exchange import in_background, until
from stand_in import StandIn, stand_in
from tensorferry import dcp as ours
from tensorferry import staging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]

MIB = 1 << 20
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(staging, "PART", 2 * MIB)
    with stand_in() as device:
        for module in ("peer_writer", "files"):
            monkeypatch.setattr(f"tensorferry.dcp.{module}.ACCELERATOR", device)
        yield device


@pytest.fixture
def writer(device: StandIn) -> Iterator[ours.PeerWriter]:
    writer = ours.PeerWriter(TIMEOUT, interface="127.0.0.1")
    yield writer
    device.let_go()
    writer.shutdown()


def weights(seed: float = 1.0) -> dict[str, Any]:
    """Four for devices, and one on the host."""
    state = {f"w{i}": torch.full((3 * MIB // 4,), seed + i) for i in range(4)}
    return {**state, "host": torch.full((1000,), seed)}


def save(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer)


def load(reader: Any) -> dict[str, Any]:
    found = {name: torch.zeros_like(value) for name, value in weights().items()}
    dcp.load(found, storage_reader=reader)
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", ["peers", "files"])
def test_what_is_queued_is_saved_and_what_comes_later_is_not(
    how: str, device: StandIn, writer: ours.PeerWriter, tmp_path: Path
) -> None:
    state = weights()
    for i in range(4):
        device.adopt(state[f"w{i}"], device=i % 2)
        device.trainer.queue(functools.partial(state[f"w{i}"].add_, 100))
    device.trainer.hold()
    device.trainer.queue(functools.partial(state["w3"].add_, 1))
    with in_background(save, state, writer if how == "peers" else ours.FileWriter(tmp_path)) as saving:
        until(lambda: len(device.copies) > 0, "copies are queued")
        assert not saving.done()
        device.trainer.let_go()
        saving.result(30)
    assert len(device.side) == 2
    assert sum(nbytes for nbytes, _ in device.copies) == 12 * MIB
    for i in range(4):
        state[f"w{i}"].fill_(-1)
    expected = weights()
    for i in range(4):
        expected[f"w{i}"] += 101 if i == 3 else 100
    found = load(ours.PeerReader(writer.metadata()) if how == "peers" else ours.FileReader(tmp_path))
    assert_equal(found, expected)


def test_nothing_is_published_before_it_is_copied(device: StandIn, writer: ours.PeerWriter) -> None:
    state = weights()
    device.adopt(state["w0"], state["w1"])
    device.hold_new = True
    with in_background(save, state, writer) as saving:
        until(lambda: len(device.copies) > 0, "copies are queued")
        assert not writer._server.allowed
        device.let_go()
        saving.result(30)
    assert writer._server.allowed
    assert_equal(load(ours.PeerReader(writer.metadata())), weights())


def test_a_copy_that_fails_ends_the_save_and_leaves_what_was_published(
    device: StandIn, writer: ours.PeerWriter
) -> None:
    save(weights(), writer)
    before = writer.metadata()
    state = weights(50.0)
    device.adopt(*(state[f"w{i}"] for i in range(4)))
    device.fails = lambda number: number == 3
    with pytest.raises(dcp.api.CheckpointException, match="the device is lost"):
        save(state, writer)
    assert_equal(load(ours.PeerReader(before)), weights())
    # The device may still write to the memory: it is not used again, once nothing holds the error.
    device.fails = lambda _: False
    device.side[0].error = None
    gc.collect()
    assert writer._stager._pinned._free == []
    save(state, writer)
    assert_equal(load(ours.PeerReader(writer.metadata())), weights(50.0))


def test_page_locked_memory_is_kept_from_save_to_save(device: StandIn, writer: ours.PeerWriter) -> None:
    state = weights()
    device.adopt(*(state[f"w{i}"] for i in range(4)))
    for seed in (1.0, 2.0, 3.0):
        for name, value in weights(seed).items():
            state[name].copy_(value)
        save(state, writer)
        assert_equal(load(ours.PeerReader(writer.metadata())), weights(seed))
        writer.withdraw()
        until(lambda: len(writer._stager._pinned._free) == 1, "the memory has come back")
    assert device.pinned_bytes == [12 * MIB]
