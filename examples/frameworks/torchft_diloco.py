"""Trains a replica with torchft's DiLoCo, which heals through tensorferry's transport.

    pip install 'tensorferry[torchft]'
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 2>lighthouse.log

In a second and a third terminal (torchft logs several lines for each step to standard error):

    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --nproc-per-node 1 --master-port 29500 torchft_diloco.py 2>replica0.log
    REPLICA=1 torchrun --nproc-per-node 1 --master-port 29501 torchft_diloco.py 2>replica1.log

Stop the second replica with Ctrl-C and start it again: it prints ``healed`` and goes on with the loss of the first.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from tensorferry import HTTPTransport  # was: from torchft.checkpointing import HTTPTransport

TIMEOUT = timedelta(seconds=30)
REPLICA = int(os.environ["REPLICA"])
STEPS = int(os.environ.get("STEPS", "1000000"))
#: Steps of the inner optimizer from one synchronisation of the replicas to the next.
SYNC_EVERY = 4


def main() -> None:
    logging.basicConfig(level=logging.INFO)  # shows the line of each heal, and what torchft does about it
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    inner = torch.optim.AdamW(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def state_dict():
        return {"model": model.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])
        print("healed", flush=True)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        replica_id=f"replica_{REPLICA}",
        timeout=TIMEOUT,
        use_async_quorum=False,  # DiLoCo asks for it
        checkpoint_transport=HTTPTransport(TIMEOUT, num_chunks=0),
    )
    batches = torch.Generator().manual_seed(REPLICA)
    test = torch.randn(64, 32, generator=torch.Generator().manual_seed(1234))

    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        while manager.current_step() < STEPS:
            for _ in range(SYNC_EVERY):
                batch = torch.randn(16, 32, generator=batches)
                inner.zero_grad()
                torch.nn.functional.mse_loss(model(batch), batch).backward()
                inner.step()  # DiLoCo's hook synchronises after the last one
            with torch.no_grad():
                loss = torch.nn.functional.mse_loss(model(test), test).item()
            print(f"step {manager.current_step()} loss {loss!r}", flush=True)
            time.sleep(0.1)  # so that the steps can be read
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
