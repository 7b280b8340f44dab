"""Saves or loads the state of ``zarr_states.py`` with megatron-core 0.15, the last release that had this format.

It is run by hand, in an environment of its own:

    python3.11 -m venv old
    old/bin/pip install megatron-core==0.15.3 'torch==2.8.0' 'zarr<3' tensorstore 'numpy<2' psutil einops
    old/bin/python tests/megatron/stock_zarr.py save FOLDER WORLD [VOCABULARY]
    old/bin/python tests/megatron/stock_zarr.py load FOLDER WORLD [VOCABULARY]
    old/bin/python tests/megatron/stock_zarr.py torch_dist FOLDER WORLD [VOCABULARY]

``tests/data/megatron`` has what ``save zarr-0.15 2 10`` and ``torch_dist torch_dist-0.15 2 10`` wrote, with these
versions; the second one is packed.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path


def main(rank, action, folder, world, vocabulary, meeting):
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    torch.cuda.synchronize = lambda _=None: None
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy
    from zarr_states import differences, expected, sharded_state

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    if action in ("save", "torch_dist"):
        backend = "zarr" if action == "save" else action
        dist_checkpointing.save(sharded_state(rank, world, vocabulary=vocabulary), folder, (backend, 1))
    else:
        strategies = ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy(), TensorStoreLoadShardedStrategy(True)
        for strategy in strategies:
            empty = sharded_state(rank, world, torch.zeros_like, vocabulary)
            loaded = dist_checkpointing.load(empty, folder, strategy)
            found = differences(loaded, expected(rank, world, vocabulary))
            print(rank, type(strategy).__name__, found or "as expected", flush=True)
            if found:
                sys.exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    action, folder, world, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("spawn")
        fixed = (action, folder, int(world), int(rest[0]) if rest else 12, f"{place}/meeting")
        started = [context.Process(target=main, args=(rank, *fixed)) for rank in range(int(world))]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        sys.exit(max(process.exitcode or 0 for process in started))
