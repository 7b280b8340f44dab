"""One end of a measurement of `scale.py`: a source or a receiver that takes orders as lines of JSON.

The same file runs with other builds of the package, so it needs nothing but torch and tensorferry.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch

from main_loop import MainLoop
from memory import fresh, touch
from raw_socket import RawReceiver, RawSender
from tensorferry import HTTPTransport, Network

_TIMEOUT = timedelta(seconds=120)
_TENSORS = 8


def _state(mib: int) -> dict[str, torch.Tensor]:
    elements = (mib << 20) // 4 // _TENSORS
    return {f"layer.{i}.weight": torch.arange(elements, dtype=torch.float32) + i for i in range(_TENSORS)}


def _spent() -> list[float]:
    """Return what this process has spent so far: user and system seconds, and how often its threads have slept."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [used.ru_utime, used.ru_stime, used.ru_nvcsw + used.ru_nivcsw]


class Host:
    """The orders: each public method is one, and returns plain data."""

    def __init__(self, loop: MainLoop, mib: int) -> None:
        self._loop, self._mib = loop, mib
        self._state = _state(mib)
        self._transports: dict[tuple[int, bool], HTTPTransport] = {}
        self._raw: dict[int, RawReceiver] = {}

    def ready(self) -> bool:
        """Say that this host runs."""
        return True

    def send(self, step: int, address: str) -> str:
        """Serve the state; return where, as seen by a receiver that reaches `address`."""
        self._source = HTTPTransport(_TIMEOUT, network=Network(relay=False))
        self._source.send_checkpoint([1], step, self._state, _TIMEOUT)
        parts = urlsplit(self._source.metadata())
        return urlunsplit(parts._replace(netloc=f"{address}:{parts.port}"))

    def receive(self, metadata: str, step: int, lanes: int, same_host: bool, repeats: int) -> dict[str, Any]:
        """Receive in place, `repeats` times; return when, what it cost here, and over how many lanes."""
        key = (lanes, same_host)
        if key not in self._transports:
            # Without relays, which a lone receiver has no use for.
            options = {"state_dict": lambda: self._state, "network": Network(same_host=same_host, relay=False)}
            self._transports[key] = HTTPTransport(_TIMEOUT, lanes, **options)
        transport = self._transports[key]
        windows, before = [], _spent()
        for _ in range(repeats):
            begin = time.perf_counter_ns()
            transport.recv_checkpoint(0, metadata, step, _TIMEOUT)
            windows.append((begin, time.perf_counter_ns()))
        report = transport.last_report
        assert report is not None
        return {"windows": windows, "spent": _less(_spent(), before), "lanes": report.lanes}

    def is_equal(self) -> bool:
        """Say whether the state is what every source serves, and spoil it for the next receive."""
        theirs = _state(self._mib)
        equal = all(torch.equal(tensor, theirs[name]) for name, tensor in self._state.items())
        for tensor in self._state.values():
            tensor.zero_()
        return equal

    def raw_listen(self) -> int:
        """Be the raw sender; return its port."""
        self._sender = RawSender(self._mib << 20)
        return self._sender.port

    def raw_serve(self, lanes: int) -> None:
        """Accept the connections of a raw receiver, in the background."""
        threading.Thread(target=self._sender.serve, args=(lanes,), daemon=True).start()

    def raw_connect(self, port: int, lanes: int) -> None:
        """Be a raw receiver of so many sockets."""
        self._memory = fresh(self._mib << 20)
        touch(self._memory)
        self._raw[lanes] = RawReceiver(port, lanes)

    def raw_receive(self, lanes: int, repeats: int) -> dict[str, Any]:
        """Receive into touched memory over raw sockets; as `receive`."""
        before = _spent()
        windows = [self._raw[lanes].receive(self._memory) for _ in range(repeats)]
        return {"windows": windows, "spent": _less(_spent(), before), "lanes": lanes}

    def spent(self) -> list[float]:
        """Return what this process has spent so far."""
        return _spent()

    def loop_begin(self, seconds: float) -> float:
        """Start the main loop; return its steps in a second while nothing else happens."""
        self._loop.begin()
        return self.loop_alone(seconds)

    def loop_alone(self, seconds: float) -> float:
        """Return the main loop's steps in a second while nothing else happens."""
        begin = time.perf_counter_ns()
        time.sleep(seconds)
        return self._loop.during([(begin, time.perf_counter_ns())])["steps_per_s"]

    def loop_during(self, windows: list[tuple[int, int]]) -> float:
        """Return the main loop's steps in a second in some windows of time."""
        return self._loop.during(windows)["steps_per_s"]


def _less(after: list[float], before: list[float]) -> list[float]:
    return [a - b for a, b in zip(after, before, strict=True)]


def _obey(host: Host, loop: MainLoop) -> None:
    try:
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(host, order.pop("order"))(**order)), flush=True)
    finally:
        loop.stop()


def main() -> None:
    """Obey until standard input ends; the main thread is the loop's."""
    loop = MainLoop()
    host = Host(loop, int(sys.argv[1]))
    orders = threading.Thread(target=_obey, args=(host, loop))
    orders.start()
    loop.run()
    orders.join()


if __name__ == "__main__":
    main()
