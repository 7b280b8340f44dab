"""A replica that trains under tensorferry's Manager until it is killed: ``LIGHTHOUSE NAME SEED OPTIONS``.

``OPTIONS`` is JSON: arguments of the Manager; ``primed``: the optimizer has its tensors before the first step;
``differs``: a tensor has another dtype than those of the others; ``fails``: the first heal fails midway.

Prints ``step``, its number and a digest of what was trained after each step, ``healed``, ``sent`` with the number of
bytes of checkpoints that it has sent, when that has changed, and what tensorferry logs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from digests import digest
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torchft import Optimizer, ProcessGroupGloo

from tensorferry import HTTPTransport, Manager

TIMEOUT = timedelta(seconds=20)


def sent(transport):
    with urllib.request.urlopen(transport.metrics_url(), timeout=20) as answer:
        return re.search(rb"^tensorferry_sent_bytes_total (\d+)", answer.read(), re.MULTILINE)[1].decode()


def main():
    lighthouse, name, seed, options = *sys.argv[1:3], int(sys.argv[3]), json.loads(sys.argv[4])
    logging.basicConfig(format="\n%(name)s %(message)s")
    logging.getLogger("tensorferry").setLevel(logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options.pop("primed", False):
        get_optimizer_state_dict(model, optimizer)
    dtype = torch.float64 if options.pop("differs", False) else torch.float32
    more = {"more": torch.full((8 << 20,), float(seed), dtype=dtype)}
    fails = ["once"] if options.pop("fails", False) else []

    def progress(done, total):
        if fails and done > total // 2:
            raise RuntimeError(f"midway {fails.pop()}")

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        print(f"\nhealed {digest(state())}", flush=True)

    if fails:
        options["checkpoint_transport"] = HTTPTransport(TIMEOUT, progress=progress)
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
        **options,
    )
    manager.register_state_dict_fn("more", more.update, lambda: more)

    def loss():
        return model(torch.full((2, 8), float(manager.current_step() + 1))).square().sum()

    managed, last = Optimizer(manager, optimizer), "0"
    while True:
        managed.zero_grad()
        loss().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        managed.step()
        print(f"\nstep {manager.current_step()} {digest([state(), more['more'][:9].float()])}", flush=True)
        if (now := sent(manager._checkpoint_transport)) != last:
            last = now
            print(f"\nsent {now}", flush=True)
        time.sleep(0.05)


main()
