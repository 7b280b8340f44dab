"""The program of a host of `shared_reads.py`: it serves a state, or is a rank that loads one, as lines of JSON say."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tensorferry import Network
from tensorferry.dcp import PeerReader, PeerWriter

TIMEOUT = timedelta(seconds=300)
LAYERS = 8


def say(**what: Any) -> None:
    """Prints an answer."""
    print(json.dumps(what), flush=True)


def state_of(mib: int) -> dict[str, torch.Tensor]:
    """Returns the state, the same in every process."""
    torch.manual_seed(mib)
    return {f"layer{i}": torch.randint(0, 255, ((mib << 20) // LAYERS,), dtype=torch.uint8) for i in range(LAYERS)}


def load(order: dict[str, Any], rank: int, world: int) -> None:
    """Loads at the time that was ordered; says how long it took, what came from whom, and whether it is right."""
    expected = state_of(order["mib"])
    if order.get("own"):
        expected = {name: tensor for number, (name, tensor) in enumerate(expected.items()) if number % world == rank}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}

    def progress(done: int, total: int) -> None:
        if order.get("tells"):
            say(done=done, total=total)

    timeout = timedelta(seconds=order.get("timeout", 300))
    environment = order.get("environment", {})
    os.environ.update(environment)
    network = Network(same_host=False, relay=order["relay"])
    reader = PeerReader(order["metadata"], timeout=timeout, network=network, progress=progress)
    time.sleep(max(order.get("at", 0) - time.monotonic(), 0))
    begin, error = time.monotonic(), ""
    try:
        dcp.load(found, storage_reader=reader)
    except BaseException as e:  # torch's CheckpointException is not an Exception.
        error = f"{type(e).__name__}: {e}"
    seconds = time.monotonic() - begin
    # An error may be of the exchange in which ranks tell each other how their loads went, and all bytes be here.
    equal = all(torch.equal(found[name], expected[name]) for name in expected)
    for name in environment:
        del os.environ[name]
    say(seconds=seconds, equal=equal, error=error[:300], report=reader.report)


def main(address: str) -> None:
    """Does what the lines of the standard input say."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The links are slow on purpose.
    logging.getLogger("tensorferry").setLevel(logging.ERROR)
    writer, rank, world = None, 0, 1
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "join":
            rank, world = order["rank"], order["world"]
            if order.get("interface"):
                os.environ["GLOO_SOCKET_IFNAME"] = order["interface"]
            store = dist.TCPStore(order["master"], order["port"], world, rank == 0, timedelta(seconds=60))
            patience = timedelta(seconds=order.get("patience", 300))
            dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=patience)
            dist.barrier()
            say(joined=True)
        elif order["do"] == "serve":
            if writer is not None:
                writer.shutdown()
            network = Network(advertise=address, same_host=False, **order.get("server", {}))
            writer = PeerWriter(TIMEOUT, network=network)
            dcp.save(state_of(order["mib"]), storage_writer=writer, no_dist=True)
            say(metadata=writer.metadata())
        elif order["do"] == "load":
            load(order, rank, world)
        elif writer is not None:
            say(served=writer._server.bytes_served)


if __name__ == "__main__":
    main(sys.argv[1])
