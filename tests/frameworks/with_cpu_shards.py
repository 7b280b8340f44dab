"""Runs a script of accelerate, ``SCRIPT ARGUMENTS...``, with the CPU in the part of a GPU.

accelerate shards on accelerators only. What it does then, from ``prepare`` to ``save_state``, also works on the CPU.
With ``THEIRS`` in the environment, the script's call of ``tensorferry.install`` does nothing.
"""

from __future__ import annotations

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

import tensorferry

if os.environ.get("THEIRS"):
    tensorferry.install = lambda: None
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
