"""A replica that trains under torchft's Manager, which builds its transport itself.

``LIGHTHOUSE METHOD NAME SEED``: the method is ``ddp``, ``local_sgd`` or ``diloco``; with ``TENSORFERRY=1`` in the
environment ``install`` was called before. With ``EVERY_REPLICA=1`` the Manager is tensorferry's, and the state has
32 MiB more. Prints ``step``, its number and a digest of the model after each step, until it is killed, and ``sent``
with the number of bytes of checkpoints that it has sent, when that has changed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from digests import digest

import tensorferry

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log %(name)s %(message)s")
if os.environ.get("TENSORFERRY"):
    tensorferry.install()

from torchft import Manager, Optimizer, ProcessGroupGloo  # noqa: E402
from torchft.local_sgd import DiLoCo, LocalSGD  # noqa: E402

TIMEOUT = timedelta(seconds=20)
EVERY = bool(os.environ.get("EVERY_REPLICA"))
if EVERY:
    from tensorferry import Manager


def sent(transport):
    with urllib.request.urlopen(transport.metrics_url(), timeout=20) as answer:
        return re.search(rb"^tensorferry_sent_bytes_total (\d+)", answer.read(), re.MULTILINE)[1].decode()


def main():
    lighthouse, method, name, seed = *sys.argv[1:4], int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    more = {"more": torch.full((8 << 20,), float(seed))} if EVERY else {}

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}

    def load(found):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        if EVERY:
            more["more"] = found["more"]
        print(f"\nhealed {digest(state())}", flush=True)

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=method == "ddp",
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
    )
    print(f"\ntransport {type(manager._checkpoint_transport).__module__}", flush=True)

    def loss():
        return model(torch.full((2, 8), float(manager.current_step() + 1))).square().sum()

    last = ["0"]

    def report():
        print(f"\nstep {manager.current_step()} {digest(model.state_dict())}", flush=True)
        if EVERY and (now := sent(manager._checkpoint_transport)) != last[0]:
            last[0] = now
            print(f"\nsent {now}", flush=True)
        time.sleep(0.05)

    if method == "ddp":
        managed = Optimizer(manager, optimizer)
        while True:
            managed.zero_grad()
            loss().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            managed.step()
            report()
    else:
        if method == "local_sgd":
            synchronised = LocalSGD(manager, model, optimizer, sync_every=2)
        else:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            synchronised = DiLoCo(manager, [model], optimizer, outer, sync_every=2)
        with synchronised:
            while True:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss().backward()
                    optimizer.step()
                report()


main()
