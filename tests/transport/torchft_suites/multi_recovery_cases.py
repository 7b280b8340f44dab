"""torchft's three-node recovery scenario, chunked and not. Run in a child by test_shipped_suites.py, with the swap."""

from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test

from nights import mostly_at_night


@pytest.fixture(autouse=True)
def _no_process_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 1, 4]))
def test_three_nodes_recover(num_chunks: int):
    def transport(_rank: int, _world_size: int) -> Any:
        return HTTPTransport(timeout=timedelta(seconds=10), num_chunks=num_chunks)

    run_multi_recovery_test(TestCase(), transport, torch.device("cpu"))
