"""Fixtures of the tests of states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from random_states import Meshes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield Meshes()
    finally:
        dist.destroy_process_group()
