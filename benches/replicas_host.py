"""The program of a host of `replicas.py`: a healthy replica of a torchft job, or one that heals."""

from __future__ import annotations

import json
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore

from fleet_host import TIMEOUT, say, state_of, wait_for_begin
from tensorferry import HTTPTransport, Network
from tensorferry.torchft.replica_sources import ReplicaSources


class Client:
    """Answers as torchft's ManagerClient does."""

    def __init__(self, quorum: dict[str, Any]) -> None:
        self._told = SimpleNamespace(**quorum)

    def _quorum(self) -> Any:
        return self._told


def replica(address: str, order: dict[str, Any]) -> tuple[HTTPTransport[Any], ReplicaSources]:
    """Returns a new transport and what tensorferry's Manager puts in the place of its client."""
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, network=Network(advertise=address, relay=False))
    return transport, ReplicaSources(Client(order["quorum"]), transport, 0)


def heal(address: str, mib: int, order: dict[str, Any]) -> None:
    """Heals as the Manager does, from the quorum on, and says how long it took and who sent how much."""
    transport, sources = replica(address, order)
    expected = state_of(order["step"], mib)
    begin = wait_for_begin()
    if order["everybody"]:
        sources._quorum()
    try:
        state = transport.recv_checkpoint(0, order["metadata"], order["step"], TIMEOUT)
    except Exception as error:
        print(f"{address}: {error}", file=sys.stderr)
        state = {}
    seconds = time.monotonic() - begin
    equal = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    report = transport.last_report
    say(seconds=seconds, equal=equal, senders=report.senders if report is not None else {})
    transport.shutdown(wait=False)


def main(address: str, mib: int) -> None:
    """Does what the lines of the standard input say."""
    torch.set_num_threads(1)
    # The links are slow on purpose, and sources are killed.
    logging.getLogger("tensorferry").setLevel(logging.ERROR)
    sending = store = sources = None
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "store":
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            say(store=f"{address}:{store.port}")
        elif order["do"] == "heal":
            heal(address, mib, order)
        elif order["do"] == "send":
            sending, sources = replica(address, order)
            told = sources._quorum() if order["everybody"] else SimpleNamespace(**order["quorum"])
            if told.recover_dst_replica_ranks:
                sending.send_checkpoint([], order["step"], state_of(order["step"], mib), TIMEOUT)
            if sources._last is not None:
                sources._last.result(20)
            say(metadata=sending.metadata())
        elif sending is not None:
            sending.disallow_checkpoint()
            sending.shutdown(wait=False)
            say(stopped=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
