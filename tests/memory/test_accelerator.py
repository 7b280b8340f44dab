"""The calls that tensorferry makes into torch for an accelerator, against stand-ins for torch's device modules."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from tensorferry.memory.accelerator import ACCELERATOR, Accelerator, Streams, drain_after_error

pytestmark = pytest.mark.beyond_torchft

CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """Notes for which streams it waits."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.device, self.name = device, name or f"side {device.index}"
        self.waited: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


class Fake:
    """Stands in for torch's device modules: threads use the default streams until a test selects others."""

    def __init__(self) -> None:
        self.default = {device.index: Stream(device, f"default {device.index}") for device in CUDA}
        self.current = dict(self.default)
        self.captures = False
        #: The devices that the host has waited for.
        self.done: list[str] = []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: fake.current[device.index])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: fake.done.append(str(device)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: fake.default[device.index])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.captures)
    monkeypatch.setattr(torch, "Stream", Stream)
    return fake


def test_copies_wait_for_the_callers_stream_and_for_the_default_one_of_each_device(fake: Fake) -> None:
    """torchft calls the transport on its own stream, which does not wait for the trainer's."""
    fake.current[0] = Stream(CUDA[0], "recovery")
    streams = Streams(ACCELERATOR).synced([CUDA[1], CUDA[0], CUDA[1]])
    assert sorted(streams[CUDA[0]].waited) == ["default 0", "recovery"]
    assert set(streams[CUDA[1]].waited) == {"default 1"}


def backend(monkeypatch: pytest.MonkeyPatch, kind: str, **functions: Any) -> torch.device:
    """Returns a device of another type, whose module in torch has only these functions."""
    monkeypatch.setattr(torch, kind, types.SimpleNamespace(**functions), raising=False)
    return torch.device(kind, 0)


def test_copies_wait_for_the_default_stream_of_every_kind_of_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = backend(monkeypatch, "privateuseone", default_stream=lambda device: fake.default[device.index])
    fake.current[0] = Stream(device, "recovery")
    (stream,) = Streams(ACCELERATOR).synced([device]).values()
    assert sorted(stream.waited) == ["default 0", "recovery"]
    assert fake.done == []


def refuse(_: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "functions",
    [{}, {"default_stream": refuse}, {"default_stream": lambda _: object()}, None],
    ids=["nameless", "refused", "foreign", "no module"],
)
def test_the_whole_device_is_waited_for_where_the_default_stream_is_unknown(
    functions: dict[str, Any] | None, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("privateuseone", 0) if functions is None else backend(monkeypatch, "xpu", **functions)
    Streams(ACCELERATOR).synced([device])
    assert fake.done == [str(device)]


def test_devices_in_use(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not in use is not touched, and a graph capture is not disturbed."""
    began = [False]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: began[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in (1, 3), raising=False)
    assert ACCELERATOR.in_use() == []
    began[0] = True
    assert ACCELERATOR.in_use() == [torch.device("cuda", 1), torch.device("cuda", 3)]
    fake.captures = True
    assert ACCELERATOR.in_use() == []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    backend(monkeypatch, "xpu", is_initialized=lambda: began[0])
    assert ACCELERATOR.in_use() == [torch.device("xpu", 2)]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert ACCELERATOR.in_use() == []


@pytest.mark.parametrize(
    ("trouble", "certain"), [(None, True), (RuntimeError("the device is lost"), False), (SystemExit(), True)]
)
def test_after_a_failure_every_stream_is_waited_for(trouble: BaseException | None, certain: bool) -> None:
    """A second interrupt must not skip the wait: memory that is still written to would be reused."""
    over: list[str] = []
    troubles = [trouble] if trouble else []

    class Interrupted(Accelerator):
        def synchronize(self, stream: Any) -> None:
            if troubles:
                raise troubles.pop()
            over.append(stream)

    assert drain_after_error(Interrupted(), ["a", "b"]) is certain
    assert sorted(over) == (["a", "b"] if certain else ["a"])
