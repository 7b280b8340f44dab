"""A replica that trains under tensorferry's Manager, which builds its transport itself: ``LIGHTHOUSE NAME SEED``.

Prints ``step``, its number and a digest of the model after each step, until it is killed, and ``sent`` with the number
of bytes of checkpoints that it has sent, when that has changed.
"""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from digests import digest
from torchft import Optimizer, ProcessGroupGloo

from tensorferry import Manager

TIMEOUT = timedelta(seconds=20)


def sent(transport):
    with urllib.request.urlopen(transport.metrics_url(), timeout=20) as answer:
        return re.search(rb"^tensorferry_sent_bytes_total (\d+)", answer.read(), re.MULTILINE)[1].decode()


def main():
    lighthouse, name, seed = *sys.argv[1:3], int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    more = {"more": torch.full((8 << 20,), float(seed))}

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}

    def load(found):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        more["more"] = found["more"]
        print(f"\nhealed {digest(state())}", flush=True)

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
    )

    def loss():
        return model(torch.full((2, 8), float(manager.current_step() + 1))).square().sum()

    managed, last = Optimizer(manager, optimizer), "0"
    while True:
        managed.zero_grad()
        loss().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        managed.step()
        print(f"\nstep {manager.current_step()} {digest(model.state_dict())}", flush=True)
        if (now := sent(manager._checkpoint_transport)) != last:
            last = now
            print(f"\nsent {now}", flush=True)
        time.sleep(0.05)


main()
