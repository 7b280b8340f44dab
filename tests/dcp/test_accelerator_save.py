"""State on an accelerator, saved with torch.distributed.checkpoint (with a simulated device)."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from exchange import in_background, until
from stand_in import StandIn, parts, stand_in
from tensorferry import dcp as ours
from tensorferry.memory import late, staging
from tensorferry.storage import container

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
        for module in ("peer_writer", "file_writer", "load_plan"):
            monkeypatch.setattr(f"tensorferry.dcp.{module}.ACCELERATOR", device)
        yield device


@pytest.fixture(autouse=True)
def _simulated(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs saves and loads in the simulation, which sees every use of the device's memory by torch."""
    for name in ("save", "load"):
        monkeypatch.setattr(dcp, name, device.simulated(getattr(dcp, name)))


@pytest.fixture
def writer(device: StandIn) -> Iterator[ours.PeerWriter]:
    writer = ours.PeerWriter(TIMEOUT, interface="127.0.0.1")
    yield writer
    device.release()
    writer.shutdown()


def weights(seed: float = 1.0) -> dict[str, Any]:
    """Returns four tensors for devices, and one on the host."""
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


@pytest.mark.parametrize("how", ["peers", "file_writer"])
@pytest.mark.waits
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
        device.trainer.release()
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


class Measured:
    """Reads the device while it is pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return list, (self.tensor.cpu().tolist(),)


def odd(how: str) -> tuple[Any, torch.Tensor, Any, Any]:
    """A value other than a dense tensor, the tensor of its memory, what 7 there makes of it, and what it comes into."""
    base = torch.zeros(6, 4)
    if how == "transposed":
        return base.t(), base, torch.full((4, 6), 7.0), torch.zeros(4, 6)
    if how == "sparse":
        value = torch.eye(4).to_sparse()
        return value, value._values(), 7 * torch.eye(4), torch.zeros(4, 4).to_sparse()
    return Measured(base[0]), base, [7.0] * 4, None


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("how", ["transposed", "sparse", "read"])
@pytest.mark.waits
def test_queued_work_is_saved_for_tensors_that_are_not_dense(
    how: str, own_stream: bool, device: StandIn, tmp_path: Path
) -> None:
    """torch makes the value dense, or pickles it, on the caller's stream, which does not wait for the trainer's."""
    value, memory, expected, target = odd(how)
    device.adopt(*parts(value) if isinstance(value, torch.Tensor) else [memory])
    device.trainer.hold()
    device.trainer.queue(functools.partial(memory.fill_, 7))

    def write() -> None:
        with device.on_stream() if own_stream else contextlib.nullcontext():
            save({"w": value}, ours.FileWriter(tmp_path))

    with in_background(write) as saving:
        until(lambda: device.followed > 0 or saving.done(), "it is about to read")
        # This fails only if the save does not wait; a slow machine cannot make it fail.
        with pytest.raises(TimeoutError):
            saving.result(0.3)
        device.trainer.release()
        saving.result(30)
    found = {"w": target}
    dcp.load(found, storage_reader=ours.FileReader(tmp_path, trust_pickle=True))
    assert found["w"] == expected if how == "read" else torch.equal(found["w"].to_dense(), expected)


class Copying(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy does not follow torch
    """Has tensors read into host memory, and copies them to the device itself."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.target = super().resolve_tensor(read_item)
        return torch.zeros(self.target.shape)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        del read_item
        self.target.copy_(tensor)


@pytest.mark.parametrize("how", ["dense", "transposed", "by the planner"])
@pytest.mark.parametrize("source", ["peers", "file_writer"])
@pytest.mark.waits
def test_a_load_comes_after_what_is_queued_and_is_over_when_it_returns(
    source: str, how: str, device: StandIn, writer: ours.PeerWriter, tmp_path: Path
) -> None:
    base = torch.zeros(6, 4)
    live = base.t() if how == "transposed" else base
    sent = torch.arange(float(live.numel())).view(live.shape)
    save({"w": sent}, writer if source == "peers" else ours.FileWriter(tmp_path))
    reader = ours.PeerReader(writer.metadata()) if source == "peers" else ours.FileReader(tmp_path)
    device.adopt(base)
    device.trainer.hold()
    device.trainer.queue(functools.partial(base.fill_, -1))

    def read() -> list[float]:
        with device.on_stream():
            dcp.load({"w": live}, storage_reader=reader, planner=Copying() if how.endswith("planner") else None)
        found: list[float] = []
        device.trainer.queue(lambda: found.extend(live.flatten().tolist()))
        device.synchronize(device.trainer)
        return found

    with in_background(read) as reading:
        until(lambda: device.followed > 0 or reading.done(), "it is about to write")
        with pytest.raises(TimeoutError):
            reading.result(0.3)
        # The copies are queued on this stream, which runs them late.
        device.callers[0].hold()
        device.trainer.release()
        until(lambda: "aten::copy_" in device.touched or reading.done(), "it writes")
        with pytest.raises(TimeoutError):
            reading.result(0.3)
        device.callers[0].release()
        assert reading.result(30) == sent.flatten().tolist()


def test_a_graph_that_is_captured_is_left_alone(device: StandIn, tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 6).t()}
    device.adopt(state["w"])
    device.captures = True
    with pytest.raises(dcp.api.CheckpointException, match="graph is being captured on cuda:0"):
        save(state, ours.FileWriter(tmp_path))
    device.captures = False
    save(state, ours.FileWriter(tmp_path))
    device.captures = True
    with pytest.raises(dcp.api.CheckpointException, match="graph is being captured on cuda:0"):
        dcp.load(state, storage_reader=ours.FileReader(tmp_path))


def test_a_copy_that_fails_ends_the_save_and_leaves_what_was_there(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "SLOT", MIB)
    monkeypatch.setattr(container, "_STEP", MIB)
    save(weights(), ours.FileWriter(tmp_path))
    files, state = sorted(tmp_path.iterdir()), weights(50.0)
    device.adopt(*(state[f"w{i}"] for i in range(4)))
    device.fails = lambda number: number == 3
    with pytest.raises(dcp.api.CheckpointException, match="the device is lost"):
        save(state, ours.FileWriter(tmp_path))
    assert sorted(tmp_path.iterdir()) == files
    assert_equal(load(ours.FileReader(tmp_path)), weights())
    device.fails = lambda _: False
    device.side[0].error = None
    save(state, ours.FileWriter(tmp_path))
    assert_equal(load(ours.FileReader(tmp_path)), weights(50.0))


def test_files_are_written_through_one_buffer_that_is_kept(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much lies on devices; a tensor that is longer than the buffer is written a part at a time."""
    monkeypatch.setattr(late, "SLOT", MIB)
    monkeypatch.setattr(container, "_STEP", MIB)
    state = {**weights(), "long": torch.arange(5 * MIB // 4), "short": torch.arange(100.0), "none": torch.zeros(0, 3)}
    state["sparse"] = torch.full((3 * MIB // 4,), 1.0).to_sparse()
    for i, value in enumerate(value for name, value in state.items() if name != "host"):
        device.adopt(*parts(value), device=i % 2)
    for seed in (1.0, 2.0, 3.0):
        for name, value in weights(seed).items():
            state[name].copy_(value)
        save(state, ours.FileWriter(tmp_path))
        found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
        found["sparse"] = found["sparse"].to_sparse()
        dcp.load(found, storage_reader=ours.FileReader(tmp_path))
        assert_equal({k: v.to_dense() for k, v in found.items()}, {k: v.to_dense() for k, v in state.items()})
    assert len(device.pinned_bytes) == 1
    assert device.pinned_bytes[0] <= MIB + 4096
    # No copy is longer than the buffer.
    assert max(nbytes for nbytes, _ in device.copies) <= MIB + 4096
