"""The two processes of a measurement: a fresh source and a fresh receiver, which take commands from a pipe."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import platform
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import torch

from contenders import MODULES, OURS, THEIRS, Contender, StateRefused, version
from main_loop import MainLoop, TrainingLoop
from memory import AllBacked, Ballast, PeakMemory, backed_rate, fresh, touch
from raw_socket import RawReceiver, RawSender, floor
from states import ROWS, digest, measure, warm_up_state

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_TIMEOUT = timedelta(seconds=120)
#: A measurement that takes longer has failed.
_ANSWER_S = 180.0
_STEPS = {"warm_up": 1, "state": 2}


_LOOPS = {"steps": MainLoop, "training": TrainingLoop}


class PeerError(Exception):
    """A child failed, died or took too long."""


class Refused(PeerError):
    """A transport cannot take the state at all."""


class Agent:
    """The commands of a child: each public method is one, and returns plain data."""

    def __init__(self, loop: MainLoop | TrainingLoop | None) -> None:
        self._loop = loop
        self._states: dict[str, Any] = {"warm_up": warm_up_state()}
        self._live: Any = self._states["warm_up"]
        self._received: Any = None
        self._raw: dict[str, Any] = {}
        self._ballast = Ballast()

    def facts(self) -> dict[str, Any]:
        """Return versions as a child sees them; None for a library that is not installed."""
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            THEIRS: version(THEIRS),
            OURS: version(OURS),
        }

    def hold_memory(self, nbytes: int) -> None:
        """Hold the ballast."""
        self._ballast.hold(nbytes)

    def release_memory(self) -> None:
        """Release the ballast, so that the next allocation of any process can have its pages."""
        self._ballast.release()

    def backed_rate(self, nbytes: int) -> float:
        """Return how fast backed memory is touched first, in GB/s."""
        return backed_rate(nbytes)

    def hold_backed_memory(self, leave: int, backed: float) -> tuple[float | None, str]:
        """Hold memory so that what is free is cold: GB/s of its first touch, or None and why not."""
        try:
            return self._ballast.hold_backed(leave, backed), ""
        except AllBacked as why:
            return None, str(why)

    def build(self, row: str, scale: float, seed: int) -> dict[str, int]:
        """Make a row's state."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # both sides may build at once, and waiting for each other's threads is slow
        self._states["state"] = ROWS[row].build(scale, seed)
        torch.set_num_threads(threads)
        return measure(self._states["state"])

    def form_group(self) -> None:
        """Make a process group of this process alone, and import what DTensors need."""
        import torch.distributed.tensor  # which no other row should wait for

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)

    def open(self, contender: str) -> str:
        """Build the transport; return its metadata with the host replaced by loopback."""
        begin = time.perf_counter()
        self._transport = Contender.parse(contender).open(_TIMEOUT, lambda: self._live)
        self._made_s = time.perf_counter() - begin
        parts = urlsplit(self._transport.metadata())
        return urlunsplit(parts._replace(netloc=f"127.0.0.1:{parts.port}"))

    def phases(self) -> dict[str, float]:
        """Return the seconds that it took to make the transport and, of ours, each phase of the last receive."""
        report = getattr(self._transport, "last_report", None)
        names = ("open_seconds", "fetch_seconds", "verify_seconds", "build_seconds") if report else ()
        return {"made": self._made_s} | {name.removesuffix("_seconds"): getattr(report, name) for name in names}

    def join(self, metadata: str) -> None:
        """Meet the other process, where the transport needs that."""
        self._transport.join(metadata)

    def send(self, which: str) -> dict[str, Any]:
        """Send a state; return when that call began and ended."""
        begin = time.perf_counter_ns()
        self._transport.send_checkpoint([1], _STEPS[which], self._states[which], _TIMEOUT)
        return {"window": (begin, time.perf_counter_ns())}

    def disallow(self) -> None:
        """End a step, as torchft does before every next one."""
        self._transport.disallow_checkpoint()

    def extra_memory(self) -> int | None:
        """Return the peak of memory above the level at the last `watch_memory`."""
        return self._peak.extra()

    def watch_memory(self) -> None:
        """Begin to watch the peak of this process's memory, from a clean state."""
        self._received = None
        gc.collect()
        self._peak = PeakMemory()

    def receive(self, metadata: str, which: str) -> tuple[int, int]:
        """Receive once; the result is kept. Returns when that call began and ended."""
        self._live = self._states.get(which)
        self._received = None
        begin = time.perf_counter_ns()
        self._received = self._transport.recv_checkpoint(0, metadata, _STEPS[which], _TIMEOUT)
        return begin, time.perf_counter_ns()

    def digest(self, received: bool) -> str:
        """Return the digest of the state that was built, or of the one received."""
        return digest(self._received if received else self._states["state"])

    def close(self) -> None:
        """Shut the transport down."""
        self._received = None
        self._transport.shutdown()

    def raw_listen(self, nbytes: int) -> int:
        """Be the raw sender; return its port."""
        self._raw["sender"] = RawSender(nbytes)
        return self._raw["sender"].port

    def raw_serve(self, streams: tuple[int, ...]) -> None:
        """Serve one receiver after the other, in the background."""

        def serve() -> None:
            for count in streams:
                self._raw["sender"].serve(count)

        threading.Thread(target=serve, daemon=True).start()

    def raw_floor(self, port: int, nbytes: int, streams: int) -> dict[str, float]:
        """Be the raw receiver; return the seconds into fresh and into touched memory."""
        return floor(port, nbytes, streams)

    def raw_receive(self, port: int, nbytes: int, streams: int, at_least_s: float) -> list[tuple[int, int]]:
        """Receive into touched memory again and again; return when each transfer began and ended."""
        memory = fresh(nbytes)
        touch(memory)
        receiver = RawReceiver(port, streams)
        windows = [receiver.receive(memory)]
        while sum(end - begin for begin, end in windows) < at_least_s * 1e9:
            windows.append(receiver.receive(memory))
        receiver.close()
        return windows

    def train(self) -> None:
        """Start training; return after the first step."""
        assert isinstance(self._loop, TrainingLoop)
        self._loop.begin()

    def loop_begin(self, unloaded_s: float) -> dict[str, float]:
        """Start the main loop; return its gaps and rate while nothing else happens."""
        assert isinstance(self._loop, MainLoop)
        self._loop.begin()
        time.sleep(0.1)
        begin = time.perf_counter_ns()
        time.sleep(unloaded_s)
        unloaded = self._loop.during([(begin, time.perf_counter_ns())])
        # Other rates are compared with this one, and on a busy machine no step may have ended in a short time.
        while not unloaded["steps_per_s"]:
            time.sleep(unloaded_s)
            unloaded = self._loop.during([(begin, time.perf_counter_ns())])
        return unloaded

    def loop_during(self, windows: list[tuple[int, int]]) -> dict[str, float]:
        """Return the gaps and the rate of the main loop in some windows of time."""
        assert isinstance(self._loop, MainLoop)
        return self._loop.during(windows)


def _obey(pipe: Connection, agent: Agent, loop: MainLoop | TrainingLoop | None) -> None:
    try:
        while (order := pipe.recv()) is not None:
            command, arguments = order
            try:
                pipe.send((None, getattr(agent, command)(**arguments)))
            except StateRefused as error:
                pipe.send((Refused, str(error)))
            except Exception:
                pipe.send((PeerError, traceback.format_exc()))
    except (EOFError, OSError):  # the parent is gone, so no answer is needed
        pass
    finally:
        if loop is not None:
            loop.stop()


def _child(pipe: Connection, log: str, loop_name: str | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stderr.flush()
    os.dup2(descriptor, 2)  # torchft logs every request and torch its warnings: kept, but not on the terminal
    os.close(descriptor)
    if loop_name is None:
        _obey(pipe, Agent(None), None)
        return
    loop = _LOOPS[loop_name]()
    orders = threading.Thread(target=_obey, args=(pipe, Agent(loop), loop))
    orders.start()
    loop.run()
    orders.join()


class Peer:
    """A child process, which answers commands in the order they were sent.

    `loop`: what its main thread runs, "steps" or "training"; without one the main thread takes the commands itself.
    """

    def __init__(self, context: Any, log: str, *, loop: str | None = None) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, log, loop), daemon=True)
        self._process.start()
        theirs.close()

    def post(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        self._pipe.send((command, arguments))

    def wait(self) -> Any:
        """Return the answer to the oldest command; raise PeerError if there is none in time or it failed.

        Raises Refused, which is one, where a transport cannot take the state.
        """
        try:
            if not self._pipe.poll(_ANSWER_S):
                raise PeerError(f"no answer within {_ANSWER_S:.0f} s")
            failure, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerError("the process ended without an answer") from error
        if failure is not None:
            raise failure(answer)
        return answer

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.post(command, **arguments)
        return self.wait()

    def end(self, patience_s: float = 10.0) -> bool:
        """End the process; return whether it exited by itself."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(patience_s)
        went = self._process.exitcode is not None
        if not went:
            self._process.kill()
            self._process.join()
        self._pipe.close()
        return went


def context(start: str, *, optimizers: bool) -> Any:
    """Return the multiprocessing context in which children start.

    "forkserver": forked from a process that has imported torch and the transports and done nothing else, so that a
    measurement does not wait for those imports; "spawn": a new interpreter each time. `optimizers`: whether states
    with one will be built, for which torch imports its compiler, which takes seconds.
    """
    chosen = multiprocessing.get_context(start)
    if start == "forkserver":
        imports = ["torch", *MODULES.values(), "torchft.process_group", *(["torch._dynamo"] if optimizers else [])]
        chosen.set_forkserver_preload(imports)
    return chosen
