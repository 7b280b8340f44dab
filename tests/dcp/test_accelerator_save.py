"""State on an accelerator, saved with torch.distributed.checkpoint (with a simulated device)."""

from __future__ import annotations

import contextlib
import functools
import gc
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from exchange import in_background, until
from nights import mostly_at_night
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


def odd(how: str) -> tuple[Any, torch.Tensor, Any]:
    """Returns a value other than a dense tensor, the tensor of its memory, and its value after 7 is written there."""
    base = torch.zeros(6, 4)
    if how == "transposed":
        return base.t(), base, torch.full((4, 6), 7.0)
    if how == "conj":
        base = torch.zeros(6, dtype=torch.complex64)
        return base.conj(), base, torch.full((6,), 7 - 0j)
    if how == "sparse":
        value = torch.eye(4).to_sparse()
        return value, value._values(), 7 * torch.eye(4)
    if how == "in an object":
        return {"nested": [base, "text"]}, base, torch.full((6, 4), 7.0)
    return Measured(base[0]), base, [7.0] * 4


@pytest.mark.parametrize(
    ("own_stream", "known", "has_default"),
    mostly_at_night([(False, True, True), (True, False, True), (True, True, False)]),
)
@pytest.mark.parametrize("how", ["transposed", "conj", "sparse", "in an object", "read"])
@pytest.mark.waits
def test_queued_work_is_saved_for_tensors_that_are_not_dense(
    how: str, own_stream: bool, known: bool, has_default: bool, device: StandIn, tmp_path: Path
) -> None:
    """torch makes the value dense, or pickles it, on the caller's stream, which does not wait for the trainer's."""
    value, memory, expected = odd(how)
    if how in ("in an object", "read") and not known:
        pytest.skip("the device is not known before the object is pickled")
    device.adopt(*parts(value) if isinstance(value, torch.Tensor) else [memory])
    device.has_default, device.known = has_default, known
    device.trainer.hold()
    device.trainer.queue(functools.partial(memory.fill_, 7))
    # An object that is not flattened: planners pass it on as bytes.
    state = {"w": Opaque(value) if how == "in an object" else value}

    def write() -> None:
        with device.on_stream() if own_stream else contextlib.nullcontext():
            save(state, ours.FileWriter(tmp_path))

    with in_background(write) as saving:
        until(lambda: device.followed > 0 or saving.done(), "it is about to read")
        # This fails only if the save does not wait; a slow machine cannot make it fail.
        with pytest.raises(TimeoutError):
            saving.result(0.3)
        device.trainer.release()
        saving.result(30)
    if isinstance(expected, list) or how == "in an object":
        found: dict[str, Any] = {"w": None}
        dcp.load(found, storage_reader=ours.FileReader(tmp_path, trust_pickle=True))
        got = found["w"].value["nested"][0] if how == "in an object" else found["w"]
    else:
        found = {"w": torch.zeros(expected.shape, dtype=expected.dtype)}
        if how == "sparse":
            found["w"] = torch.zeros(4, 4).to_sparse()
        dcp.load(found, storage_reader=ours.FileReader(tmp_path))
        got = found["w"].to_dense()
    assert got == expected if isinstance(expected, list) else torch.equal(got, expected)


class Opaque:
    """An object that planners pass on as bytes."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(("own_stream", "has_default"), mostly_at_night([(False, True), (True, True), (True, False)]))
@pytest.mark.parametrize("how", ["dense", "transposed"])
@pytest.mark.parametrize("source", ["peers", "file_writer"])
@pytest.mark.waits
def test_a_load_comes_after_what_is_queued_and_is_over_when_it_returns(
    source: str, how: str, own_stream: bool, has_default: bool, device: StandIn, writer: ours.PeerWriter, tmp_path: Path
) -> None:
    base = torch.zeros(6, 4)
    live = {"dense": base, "transposed": base.t()}[how]
    sent = torch.arange(float(live.numel())).view(live.shape)
    save({"w": sent}, writer if source == "peers" else ours.FileWriter(tmp_path))
    reader = ours.PeerReader(writer.metadata()) if source == "peers" else ours.FileReader(tmp_path)
    device.adopt(base)
    device.has_default = has_default
    device.trainer.hold()
    device.trainer.queue(functools.partial(base.fill_, -1))

    def read() -> list[float]:
        with device.on_stream() if own_stream else contextlib.nullcontext():
            dcp.load({"w": live}, storage_reader=reader)
        found: list[float] = []
        device.trainer.queue(lambda: found.extend(live.flatten().tolist()))
        device.synchronize(device.trainer)
        return found

    with in_background(read) as reading:
        until(lambda: device.followed > 0 or reading.done(), "it is about to write")
        with pytest.raises(TimeoutError):
            reading.result(0.3)
        if own_stream and has_default:
            # The copies are queued on this stream, which runs them late.
            device.callers[0].hold()
        device.trainer.release()
        if own_stream and has_default:
            until(lambda: "aten::copy_" in device.touched or reading.done(), "it writes")
            with pytest.raises(TimeoutError):
                reading.result(0.3)
            device.callers[0].release()
        assert reading.result(30) == sent.flatten().tolist()


def test_a_planner_that_copies_to_the_device_itself(device: StandIn, tmp_path: Path) -> None:
    """The planner's tensors are read into host memory, and it copies them to the device in `commit_tensor`."""
    live = torch.zeros(6, 4)
    device.adopt(live)
    save({"w": torch.full((6, 4), 3.0)}, ours.FileWriter(tmp_path))

    class Planner(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy does not follow torch
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            del read_item
            self.landed = torch.zeros(6, 4)
            return self.landed

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            del read_item
            live.copy_(tensor)

    device.trainer.hold()
    device.trainer.queue(functools.partial(live.fill_, -1))

    def read() -> None:
        with device.on_stream():
            dcp.load({"w": live}, storage_reader=ours.FileReader(tmp_path), planner=Planner())

    with in_background(read) as reading:
        until(lambda: device.followed > 0 or reading.done(), "it is about to write")
        with pytest.raises(TimeoutError):
            reading.result(0.3)
        device.trainer.release()
        reading.result(30)
    assert torch.equal(live, torch.full((6, 4), 3.0))


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


@pytest.mark.waits
@pytest.mark.parametrize("source", ["peers", "files"])
def test_a_copy_that_fails_ends_the_save_and_leaves_what_was_there(
    source: str, device: StandIn, writer: ours.PeerWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "SLOT", MIB)
    monkeypatch.setattr(container, "_STEP", MIB)
    target = writer if source == "peers" else ours.FileWriter(tmp_path)

    def reader() -> Any:
        return ours.PeerReader(before) if source == "peers" else ours.FileReader(tmp_path)

    save(weights(), target)
    before, files = writer.metadata() if source == "peers" else "", sorted(tmp_path.iterdir())
    state = weights(50.0)
    device.adopt(*(state[f"w{i}"] for i in range(4)))
    device.fails = lambda number: number == 3
    with pytest.raises(dcp.api.CheckpointException, match="the device is lost"):
        save(state, target)
    assert sorted(tmp_path.iterdir()) == files
    assert_equal(load(reader()), weights())
    # The device may still write to the memory, so it is not reused, even when nothing references the error any more.
    device.fails = lambda _: False
    device.side[0].error = None
    gc.collect()
    assert not writer._stager._pinned._kept
    save(state, target)
    before = writer.metadata() if source == "peers" else ""
    assert_equal(load(reader()), weights(50.0))


@pytest.mark.parametrize("odd", ["dense", "sparse", "on two devices"])
def test_files_are_written_through_one_buffer_that_is_kept(
    odd: str, device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much lies on devices; a tensor that is longer than the buffer is written a part at a time."""
    monkeypatch.setattr(late, "SLOT", MIB)
    monkeypatch.setattr(container, "_STEP", MIB)
    state = {**weights(), "long": torch.arange(5 * MIB // 4), "short": torch.arange(100.0), "none": torch.zeros(0, 3)}
    if odd == "sparse":
        state["w1"] = state["w1"].to_sparse()
    for i, (name, value) in enumerate(state.items()):
        if name != "host":
            device.adopt(*parts(value), device=i % 2 if odd == "on two devices" else 0)
    for seed in (1.0, 2.0, 3.0):
        for name, value in weights(seed).items():
            target = state[name]._values() if state[name].is_sparse else state[name]
            target.copy_(value.view(target.shape))
        save(state, ours.FileWriter(tmp_path))
        found = {name: value.to_dense().clone().fill_(0) for name, value in state.items()}
        if odd == "sparse":
            found["w1"] = found["w1"].to_sparse()
        dcp.load(found, storage_reader=ours.FileReader(tmp_path))
        assert_equal({k: v.to_dense() for k, v in found.items()}, {k: v.to_dense() for k, v in state.items()})
    assert len(device.pinned_bytes) == 1
    assert device.pinned_bytes[0] <= MIB + 4096
    # No copy is longer than the buffer.
    assert max(nbytes for nbytes, _ in device.copies) <= MIB + 4096
