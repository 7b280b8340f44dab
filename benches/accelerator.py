"""The rates of copies between an accelerator and the network, beside those of the plain copies they consist of.

    python benches/accelerator.py [--mib 4096] [--tensors 64] [--rounds 7]

Prints medians and extremes of interleaved rounds, and refuses to run where torch sees no accelerator. Staging is good
if it comes to 0.95 of a plain copy into pinned memory, the median of the rounds; it says whether it does. Sends and
receives are whole transfers over loopback and through shared memory within one process. Heals have a process for each
side: from the call of `send_checkpoint` until the receiver's own tensors on the accelerator hold the values. Where
torchft is installed, its HTTPTransport heals in the same rounds, without chunks and with four and eight.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from tensorferry import HTTPTransport, Network
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager, Piece

TIMEOUT = timedelta(minutes=5)
PLAIN, STAGING = "plain pinned copy", "staging"
#: torchft's HTTPTransport by its number of chunks. None is the fastest everywhere: the best of them counts.
THEIRS = {f"torchft, {chunks} chunks": chunks for chunks in (0, 4, 8)}
#: Staging's rate over that of plain copies.
GOAL = 0.95


def timed(work: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    started = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - started


def transfer(source: HTTPTransport, target: HTTPTransport, state: dict[str, torch.Tensor]) -> None:
    """Return the seconds from the call of `send_checkpoint` to the return of `recv_checkpoint`, which waits for it."""
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(target.recv_checkpoint, 0, source.metadata(), 1, TIMEOUT)
        source.send_checkpoint([1], 1, state, TIMEOUT)
        received.result()
    source.disallow_checkpoint()


def heal_transport(name: str, live: dict[str, torch.Tensor] | None) -> Any:
    """Returns the transport of one side of a heal; with ``live``, the receiver's."""
    if name in THEIRS:
        from torchft.checkpointing import HTTPTransport as Stock

        return Stock(TIMEOUT, num_chunks=THEIRS[name])
    return HTTPTransport(
        TIMEOUT, network=Network(same_host=name == "shared memory"), state_dict=live and (lambda: live)
    )


def receiver(mib: int, tensors: int) -> None:
    """The receiving process: heals once for each line of its input: transport, step and metadata, separated by tabs."""
    live = empty_state(mib, tensors)
    transports: dict[str, Any] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        name, step, metadata = line.rstrip("\n").split("\t")
        if name not in transports:
            transports[name] = heal_transport(name, live)
        state = transports[name].recv_checkpoint(0, metadata, int(step), TIMEOUT)
        for key, tensor in state.items():
            if tensor is not live[key]:
                live[key].copy_(tensor)
        torch.accelerator.synchronize()
        print(float(live["w0"][-1]), flush=True)
    for transport in transports.values():
        transport.shutdown()


class Healing:
    """A source in this process and a receiver in another one."""

    def __init__(self, state: dict[str, torch.Tensor], mib: int, tensors: int) -> None:
        self._state = state
        self._step = 0
        self.names = ["sockets", "shared memory", *(THEIRS if importlib.util.find_spec("torchft") else ())]
        self._sources = {name: heal_transport(name, None) for name in self.names}
        command = [sys.executable, __file__, "--receiver", "--mib", str(mib), "--tensors", str(tensors)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the receiving process ended with status {self._child.wait()}")
        return answer

    def run(self, name: str) -> None:
        """Heals once by way of the transport ``name``."""
        assert self._child.stdin is not None
        source = self._sources[name]
        self._step += 1
        # A new last value each time: a receiver that kept its old state would be noticed.
        last = float(self._state["w0"][-1])
        self._state["w0"][-1] = self._step
        self._child.stdin.write(f"{name}\t{self._step}\t{source.metadata()}\n")
        self._child.stdin.flush()
        source.send_checkpoint([1], self._step, self._state, TIMEOUT)
        if float(self._answer()) != self._step:
            raise RuntimeError(f"{name}: the receiver does not hold the state of step {self._step}")
        source.disallow_checkpoint()
        self._state["w0"][-1] = last

    def close(self) -> None:
        """Ends the receiving process and the sources."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)
        for source in self._sources.values():
            source.shutdown()


def empty_state(mib: int, tensors: int) -> dict[str, torch.Tensor]:
    """Returns a state of zeros on the accelerator."""
    each = mib * (1 << 20) // tensors // 4
    return {f"w{i}": torch.zeros(each, device=torch.accelerator.current_accelerator()) for i in range(tensors)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="tensors it is made of")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-heals", action="store_true", help="leave out the heals between two processes")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("torch sees no accelerator here: there is nothing to measure", file=sys.stderr)
        return 1
    if options.receiver:
        receiver(options.mib, options.tensors)
        return 0
    device = torch.accelerator.current_accelerator()
    each = options.mib * (1 << 20) // options.tensors // 4
    state = {f"w{i}": torch.rand(each, device=device) for i in range(options.tensors)}
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    pinned = {name: torch.empty(each, pin_memory=True) for name in state}
    stager = HostStager(ACCELERATOR)

    def plain() -> None:
        for name, tensor in state.items():
            pinned[name].copy_(tensor, non_blocking=True)

    def staged() -> None:
        stager.copy([Piece(tensor.untyped_storage(), 0, tensor.nbytes) for tensor in state.values()])

    ways: dict[str, Callable[[], object]] = {PLAIN: plain, STAGING: staged}
    transports = []
    for same_host, name in ((False, "sockets"), (True, "shared memory")):
        network = Network(same_host=same_host)
        source = HTTPTransport(TIMEOUT, network=network)
        fresh = HTTPTransport(TIMEOUT, network=network)
        in_place = HTTPTransport(TIMEOUT, network=network, state_dict=lambda: live)
        transports += [source, fresh, in_place]
        ways[f"accelerator to host, {name}"] = lambda s=source, t=fresh: transfer(s, t, state)
        ways[f"accelerator to accelerator, {name}"] = lambda s=source, t=in_place: transfer(s, t, state)
    healing = None if options.no_heals else Healing(state, options.mib, options.tensors)
    for name in healing.names if healing is not None else ():
        ways[f"heal, two processes, {name}"] = lambda n=name: healing.run(n)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 1):
        for name, work in ways.items():
            took = timed(work)
            # The first round allocates memory and streams, so it is not counted.
            if round_number:
                seconds[name].append(took)
    for transport in transports:
        transport.shutdown()
    if healing is not None:
        healing.close()
    base = statistics.median(seconds[PLAIN])
    print(f"{nbytes / 1e9:.2f} GB in {options.tensors} tensors on {device}, torch {torch.__version__}")
    for name, took in seconds.items():
        median = statistics.median(took)
        print(
            f"{name:45} {nbytes / median / 1e9:7.2f} GB/s "
            f"({nbytes / max(took) / 1e9:.2f}-{nbytes / min(took) / 1e9:.2f}), {base / median:.2f} of the plain copy"
        )
    theirs = [name for name in THEIRS if healing is not None and name in healing.names]
    if healing is not None and theirs:
        rival = min(statistics.median(seconds[f"heal, two processes, {name}"]) for name in theirs)
        for name in healing.names[:2]:
            took = statistics.median(seconds[f"heal, two processes, {name}"])
            print(
                f"heals by {name} take {took:.3f} s, torchft's HTTPTransport {rival:.3f} s, "
                f"which is {rival / took:.2f} times as long"
            )
    ratio = statistics.median(a / b for a, b in zip(seconds[PLAIN], seconds[STAGING], strict=True))
    print(f"staging runs at {ratio:.3f} of a plain copy, which {'reaches' if ratio >= GOAL else 'misses'} {GOAL}")
    if any(not torch.equal(state[name], live[name]) for name in state):
        print("the received state differs from the one that was sent", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
