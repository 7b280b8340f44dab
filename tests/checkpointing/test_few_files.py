"""At the limit of open files: an error of our own that names the limit, nothing leaked, and the next call works."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from keepers import eventually
from tensorferry.errors import SystemRefused

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
#: More descriptors than the call needs.
ENOUGH = 40
#: Buffers that a checkpointer may have made for a save that failed, and keeps for the next one.
KEPT = 2


def descriptors() -> set[str]:
    """Returns the numbers of the open descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_files(left: int) -> Iterator[None]:
    """While the block runs, this process can open ``left`` files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        # The lowest free number is always given out first: below the limit, only the last ``left`` are free.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 1 + left, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)


def test_a_save_without_descriptors_names_the_limit_leaks_nothing_and_works_again(opened, tmp_path):
    checkpointer = opened()
    paths = (tmp_path / str(number) for number in itertools.count())

    def call():
        checkpointer.save(next(paths), {"w": torch.ones(1000), "step": 1})[1].result(60)

    call()
    told = []
    for left in range(ENOUGH):
        gc.collect()
        before = descriptors()
        try:
            with few_files(left):
                call()
        except SystemRefused as e:
            told.append(str(e))
        else:
            break
        finally:
            # Threads may be about to close what they had.
            most = len(before) + KEPT
            eventually("nothing leaks", lambda most=most: gc.collect() >= 0 and len(descriptors()) <= most)
    assert told, "the limit was never met"
    assert all("ulimit -n" in one for one in told), told
    assert left < ENOUGH - 1
    call()
