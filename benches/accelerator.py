"""The rates of copies between an accelerator and the network, beside those of the plain copies they consist of.

    python benches/accelerator.py [--mib 4096] [--tensors 64] [--rounds 7]

Prints medians and extremes of interleaved rounds, and refuses to run where torch sees no accelerator. Staging is good
if it comes to 0.95 of a plain copy into pinned memory, the median of the rounds; it says whether it does. Sends and
receives are whole transfers over loopback and through shared memory within one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from tensorferry import HTTPTransport
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import Piece, Stager

TIMEOUT = timedelta(minutes=5)
PLAIN, STAGING = "plain pinned copy", "staging"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="tensors it is made of")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("torch sees no accelerator here: there is nothing to measure", file=sys.stderr)
        return 1
    device = torch.accelerator.current_accelerator()
    each = options.mib * (1 << 20) // options.tensors // 4
    state = {f"w{i}": torch.rand(each, device=device) for i in range(options.tensors)}
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    pinned = {name: torch.empty(each, pin_memory=True) for name in state}
    stager = Stager(ACCELERATOR)

    def plain() -> None:
        for name, tensor in state.items():
            pinned[name].copy_(tensor, non_blocking=True)

    def staged() -> None:
        stager.copy([Piece(tensor.untyped_storage(), 0, tensor.nbytes) for tensor in state.values()])

    ways: dict[str, Callable[[], object]] = {PLAIN: plain, STAGING: staged}
    transports = []
    for same_host, name in ((False, "sockets"), (True, "shared memory")):
        source = HTTPTransport(TIMEOUT, same_host=same_host)
        fresh = HTTPTransport(TIMEOUT, same_host=same_host)
        in_place = HTTPTransport(TIMEOUT, same_host=same_host, state_dict=lambda: live)
        transports += [source, fresh, in_place]
        ways[f"accelerator to host, {name}"] = lambda s=source, t=fresh: transfer(s, t, state)
        ways[f"accelerator to accelerator, {name}"] = lambda s=source, t=in_place: transfer(s, t, state)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 1):
        for name, work in ways.items():
            took = timed(work)
            # The first round allocates memory and streams, so it is not counted.
            if round_number:
                seconds[name].append(took)
    for transport in transports:
        transport.shutdown()
    base = statistics.median(seconds[PLAIN])
    print(f"{nbytes / 1e9:.2f} GB in {options.tensors} tensors on {device}, torch {torch.__version__}")
    for name, took in seconds.items():
        median = statistics.median(took)
        print(
            f"{name:45} {nbytes / median / 1e9:7.2f} GB/s "
            f"({nbytes / max(took) / 1e9:.2f}-{nbytes / min(took) / 1e9:.2f}), {base / median:.2f} of the plain copy"
        )
    ratio = statistics.median(a / b for a, b in zip(seconds[PLAIN], seconds[STAGING], strict=True))
    print(f"staging runs at {ratio:.3f} of a plain copy, which {'reaches' if ratio >= GOAL else 'misses'} {GOAL}")
    if any(not torch.equal(state[name], live[name]) for name in state):
        print("the received state differs from the one that was sent", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
