"""The calls that tensorferry makes into torch for an accelerator, against stand-ins for torch's device modules."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.memory.accelerator import ACCELERATOR, Accelerator, Streams, drain_after_error

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.beyond_torchft

CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """Like torch's streams: it stores the stream to return to in itself, so it can be entered only once at a time."""

    def __init__(self, device: torch.device, torch_: Torch | None = None, name: str = "") -> None:
        torch_ = torch_ or Torch.own
        assert torch_ is not None
        name = name or f"side {device.index}"
        self._torch = torch_
        self._back: Stream | None = None
        self.name = name
        self.device = device
        self.waited: list[str] = []

    def __enter__(self) -> None:
        before = self._torch.current_stream(self.device)
        self._torch.set_stream(self)
        if self._back is not None:
            raise RuntimeError("Stream's context should not be initialized.")
        self._back = before

    def __exit__(self, *_: object) -> None:
        assert self._back is not None
        self._torch.set_stream(self._back)
        self._back = None

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)

    def synchronize(self) -> None:
        self._torch.done.append(self.name)


class Torch:
    """Simulates each thread's device and streams: device 0 and default streams until the thread selects others."""

    #: The stand-in that replaces torch.
    own: Torch | None = None

    def __init__(self) -> None:
        self.default = {device.index: Stream(device, self, f"default {device.index}") for device in CUDA}
        self.captures = False
        #: The streams that the host has waited for.
        self.done: list[str] = []
        self._own = threading.local()

    def device(self) -> int:
        return getattr(self._own, "device", 0)

    @contextlib.contextmanager
    def device_index(self, index: int | None) -> Iterator[None]:
        before = self.device()
        self._own.device = before if index is None else index
        try:
            yield
        finally:
            self._own.device = before

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._own, "streams", {}).get(device.index) or self.default[device.index]

    def set_stream(self, stream: Stream) -> None:
        self._own.streams = {**getattr(self._own, "streams", {}), stream.device.index: stream}
        self._own.device = stream.device.index

    def default_stream(self, device: torch.device) -> Stream:
        return self.default[device.index]

    def synchronize(self, device: torch.device) -> None:
        self.done.append(str(device))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch()
    monkeypatch.setattr(Torch, "own", fake)
    for name in ("device_index", "current_stream", "set_stream", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "default_stream", fake.default_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.captures)
    monkeypatch.setattr(torch, "Stream", Stream)
    return fake


def test_copies_wait_for_the_callers_stream_and_for_the_default_one_of_each_device(fake: Torch) -> None:
    """torchft calls the transport on its own stream, which does not wait for the trainer's."""
    fake.set_stream(Stream(CUDA[0], fake, "recovery"))
    streams = Streams(ACCELERATOR).synced([CUDA[1], CUDA[0], CUDA[1]])
    assert sorted(streams[CUDA[0]].waited) == ["default 0", "recovery"]
    assert set(streams[CUDA[1]].waited) == {"default 1"}
    assert fake.device() == 0


def backend(monkeypatch: pytest.MonkeyPatch, kind: str, **functions: Any) -> torch.device:
    """Returns a device of another type, whose module in torch has only these functions."""
    monkeypatch.setattr(torch, kind, types.SimpleNamespace(**functions), raising=False)
    return torch.device(kind, 0)


@pytest.mark.parametrize("kind", ["xpu", "privateuseone"])
def test_copies_wait_for_the_default_stream_of_every_kind_of_device(
    kind: str, fake: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = backend(monkeypatch, kind, default_stream=fake.default_stream)
    fake.set_stream(Stream(device, fake, "recovery"))
    (stream,) = Streams(ACCELERATOR).synced([device]).values()
    assert sorted(stream.waited) == ["default 0", "recovery"]
    assert fake.done == []


def refuse(_: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"default_stream": refuse},
        {"default_stream": lambda: None},
        {"default_stream": lambda _: object()},
        None,
    ],
    ids=["nameless", "refused", "without a device", "foreign", "no module"],
)
def test_the_whole_device_is_waited_for_where_the_default_stream_is_unknown(
    functions: dict[str, Any] | None, fake: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("privateuseone", 0) if functions is None else backend(monkeypatch, "xpu", **functions)
    Streams(ACCELERATOR).synced([device])
    assert fake.done == [str(device)]


def test_devices_in_use(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
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
