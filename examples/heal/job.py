"""One rank of one replica group: trains under torchft's Manager, on orders that arrive as JSON lines on stdin.

Started by scenario.py. Events leave as JSON lines on the first stdout; whatever else is printed goes to stderr.
Orders: ``start`` (addresses), ``lease`` (the step it may train up to), ``final`` (the step to stop at), ``exit``.
The end of stdin ends the process, so no replica outlives the process that started it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = timedelta(seconds=30)


class Wire:
    """Writes events to the first stdout and reads orders from stdin."""

    def __init__(self) -> None:
        # Anything else that prints to stdout, a C library included, must not get between the events.
        self._events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._orders: dict[str, Any] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def emit(self, event: str, /, **fields: Any) -> None:
        """Write an event; safe from any thread."""
        with self._lock:
            print(json.dumps({"event": event, "at": time.monotonic(), **fields}), file=self._events)

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._orders.update(json.loads(line))
                self._changed.notify_all()
        os._exit(3)

    def order(self, name: str) -> Any:
        """Wait for an order and return its value."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._orders)
            return self._orders[name]

    def may_train(self, step: int) -> bool:
        """Wait until there is a lease for one more step (True) or the step is the final one (False)."""
        with self._changed:
            self._changed.wait_for(lambda: step < self._orders.get("lease", 0) or "final" in self._orders)
            return step < self._orders.get("final", self._orders["lease"])


def transport_class(name: str) -> type:
    """``module:Class`` or one of two short names."""
    short = {"torchft": "torchft.checkpointing:HTTPTransport", "tensorferry": "tensorferry:HTTPTransport"}
    module, _, attribute = short.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", required=True)
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--group-world-size", type=int, default=1)
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pad-mib", type=int, default=0)
    parser.add_argument("--sync-quorum", action="store_true")
    parser.add_argument("--fleet", action="store_true", help="tensorferry's Manager: every healthy replica sends")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    wire = Wire()
    faulthandler.register(signal.SIGUSR1)
    name = f"replica {args.replica}/{args.rank}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(name)s %(message)s")

    # Slow imports, after the wire is up. The transport comes first: without it there is nothing to do.
    cls = transport_class(args.transport)

    import torch
    import torch.distributed as dist
    from language_model import Trainee
    from recorded import recorded
    from state_digest import state_digest
    from torchft.process_group import ProcessGroupGloo

    if args.fleet:
        from tensorferry import Manager
    else:
        from torchft.manager import Manager

    torch.set_num_threads(1)
    trainee = Trainee(args.seed, args.width, args.pad_mib)
    # The group's own store: rank 0 keeps it, and the others receive its port.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if args.rank == 0 else None
    wire.emit("loaded", pid=os.getpid(), store=store and store.port, weights=state_digest(trainee.model.state_dict()))

    start = wire.order("start")
    # Each replica of a fleet is a host of its own: no memory that it could share with the others, and a link of 400
    # Mbit/s. Loopback is so fast that nobody would wait for relays.
    options = {"same_host": False, "max_bandwidth": 50_000_000} if args.fleet else {}
    transport = recorded(cls)(wire.emit, timeout=TIMEOUT, num_chunks=args.chunks, **options)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=trainee.load_state_dict,
        state_dict=trainee.state_dict,
        min_replica_size=args.min_replicas,
        use_async_quorum=not args.sync_quorum,
        timeout=TIMEOUT,
        rank=args.rank,
        world_size=args.group_world_size,
        store_addr="localhost",
        store_port=start["store"],
        lighthouse_addr=start["lighthouse"],
        replica_id=f"replica_{args.replica}",
        hostname="localhost",
        checkpoint_transport=transport,
    )
    wire.emit("ready", port=urlsplit(transport.metadata()).port)
    # With fewer processors than replicas, training (this thread) gives way to a replica that starts.
    os.nice(10)

    while wire.may_train(manager.current_step()):
        manager.start_quorum()
        loss, gradients = trainee.backward()
        # Averaged through the Manager and not by torchft's DistributedDataParallel, which in 0.2.0 takes the
        # survivors down when a peer dies inside of an all-reduce.
        manager.allreduce(gradients).wait()
        if manager.should_commit():
            trainee.update(gradients, manager.current_step())
            wire.emit("committed", step=manager.current_step(), loss=loss)
        else:
            wire.emit("discarded", step=manager.current_step())

    wire.emit("finished", step=manager.current_step(), digest=state_digest(trainee.state_dict()))
    # The others may still be receiving this replica's part of the last all-reduce.
    wire.order("exit")
    manager.shutdown(wait=False)
    wire.emit("left")


if __name__ == "__main__":
    main()
    # torchft's and gloo's threads are not worth waiting for.
    sys.stderr.flush()
    os._exit(0)
