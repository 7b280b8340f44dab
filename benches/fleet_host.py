"""The program of a host of `fleet.py`: it sends a state, or receives one, as lines of JSON tell it to."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torchft.checkpointing.http_transport import HTTPTransport as Torchft

from memory import fresh
from raw_socket import RawReceiver, RawSender
from tensorferry import HTTPTransport, Network

TIMEOUT = timedelta(seconds=300)
LAYERS = 8


def say(**what: Any) -> None:
    """Prints an answer."""
    print(json.dumps(what), flush=True)


def wait_for_begin() -> float:
    """Says that all is ready, and waits for the time that the next line names; returns it."""
    say(ready=True)
    begin = float(json.loads(sys.stdin.readline())["at"])
    time.sleep(max(begin - time.monotonic(), 0))
    return begin


def state_of(step: int, mib: int) -> dict[str, torch.Tensor]:
    """Returns the state of a step, the same in every process."""
    torch.manual_seed(step)
    return {f"layer{i}": torch.randint(0, 255, ((mib << 20) // LAYERS,), dtype=torch.uint8) for i in range(LAYERS)}


def transport_of(kind: str, address: str, live: dict[str, torch.Tensor] | None = None, **more: Any) -> Any:
    """Returns a new transport, which receives into the tensors of `live` if there are some."""
    if kind == "torchft":
        return Torchft(TIMEOUT, 0)
    network = Network(**{"advertise": None if kind == "rails" else address, "relay": kind == "relay", **more})
    return HTTPTransport(TIMEOUT, network=network, state_dict=(lambda: live) if live else None)


def metadata_of(transport: Any, address: str) -> str:
    """Returns the transport's metadata with an address that other hosts can reach."""
    given = urlsplit(transport.metadata())
    return given._replace(netloc=f"{address}:{given.port}").geturl()


def receive(address: str, mib: int, order: dict[str, Any]) -> None:
    """Makes the state to compare with, says so, receives at the time that the next line names, and says how it went."""
    expected = state_of(order["step"], mib)
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()} if order.get("in_place") else None
    transport = transport_of(order["kind"], address, live)
    begin = wait_for_begin()
    try:
        state = transport.recv_checkpoint(0, order["metadata"], order["step"], TIMEOUT)
    except Exception as error:
        print(f"{address}: {error}", file=sys.stderr)
        state = {}
    seconds = time.monotonic() - begin
    equal = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    if live:
        equal = equal and all(state[name].data_ptr() == live[name].data_ptr() for name in live)
    say(seconds=seconds, equal=equal)
    transport.shutdown(wait=False)


def send_plainly(mib: int, streams: int) -> int:
    """Serves as many bytes as a state has over so many plain sockets; returns the port."""
    sender = RawSender(mib << 20, "0.0.0.0")
    threading.Thread(target=sender.serve, args=(streams,), daemon=True).start()
    return sender.port


def receive_plainly(mib: int, port: int, addresses: list[str], streams: int) -> None:
    """Receives these bytes into fresh memory at the time that the next line names; what they are is not looked at."""
    receiver, memory = RawReceiver(port, streams, addresses), fresh(mib << 20)
    begin = wait_for_begin()
    receiver.receive(memory)
    say(seconds=time.monotonic() - begin, equal=True)
    receiver.close()


def main(address: str, mib: int) -> None:
    """Does what the lines of the standard input say."""
    torch.set_num_threads(1)
    # The links are slow on purpose.
    logging.getLogger("tensorferry").setLevel(logging.ERROR)
    sending = None
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "receive" and order["kind"] == "raw":
            receive_plainly(mib, int(order["metadata"]), order["addresses"], order["streams"])
        elif order["do"] == "receive":
            receive(address, mib, order)
        elif order["do"] == "send" and order["kind"] == "raw":
            say(metadata=str(send_plainly(mib, order["streams"])))
        elif order["do"] == "send":
            sending = transport_of(order["kind"], address, **order.get("server", {}))
            sending.send_checkpoint([1], order["step"], state_of(order["step"], mib), TIMEOUT)
            say(metadata=metadata_of(sending, address))
        else:
            if sending is not None:
                sending.disallow_checkpoint()
                sending.shutdown(wait=False)
                sending = None
            say(stopped=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
