"""Under any schedule of faults, saves and loads end in time, in the state that was saved or in an error.

``--fault-schedules 200`` tries as many; ``--fuzz-seed`` says which one is the first.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
from dcp_doors import load, save

from stores import SLOW_DOWN, objects
from tensorferry.errors import IncompleteCheckpoint, TensorferryError
from tensorferry.storage import leftovers
from tensorferry.storage.objects import client, reader, upload

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(1800),
]

#: Seconds that a save or a load may take, and those that it may end later.
TIMEOUT_S, LATE_S = 5.0, 10.0


def flipped(data):
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"x"


#: What happens to requests; functions change the answers to those that read.
FAULTS = [
    *(SLOW_DOWN, (500, b""), (502, b""), (503, b""), (429, b""), "break", "lose", "stall"),
    *(flipped, lambda data: data[: len(data) // 2], lambda data: data + b"x"),
]


def schedule(rng):
    """Returns what a gateway does: the same faults for the same numbers of requests."""
    share, kinds = rng.choice((0.03, 0.15, 0.5)), rng.sample(FAULTS, rng.randrange(1, len(FAULTS) + 1))
    first, last = rng.randrange(20), rng.choice((15, 40, 10_000))

    def act(number, method, _):
        kind = rng.choice(kinds)
        if not first <= number < first + last or rng.random() > share:
            return None
        return "lose" if callable(kind) and method != "GET" else kind

    return act


def state(rng, number):
    """Returns tensors that hold the number of their save: some are copied on their way, others are not."""
    lengths = [rng.choice((1, 700, 300_000, 3 << 18, 2 << 20)) for _ in range(rng.randrange(1, 4))]
    return {f"w{at}": torch.full((length,), float(number)) for at, length in enumerate(lengths)}


def ended(work, value, place):
    """Returns what it returns in time, or the error with which it ends."""
    began = time.monotonic()
    try:
        return work(value, place, timeout=timedelta(seconds=TIMEOUT_S))
    except TensorferryError as e:
        return e
    finally:
        assert time.monotonic() - began < TIMEOUT_S + LATE_S


def loaded(value, place):
    """Returns the error, or which save the state is of."""
    found = ended(load, value, place)
    return found if isinstance(found, TensorferryError) else int(*torch.cat(list(found.values())).unique())


def test_no_schedule_of_faults_leads_to_a_wrong_byte_or_a_hang(gateway, server, monkeypatch, pytestconfig):
    monkeypatch.setattr(upload, "PART", 5 << 20)
    monkeypatch.setattr(reader, "_STALL_S", 0.4)
    monkeypatch.setattr(client, "STALL_S", 0.8)
    seeds = range(pytestconfig.getoption("--fuzz-seed"), 1 << 30)[: pytestconfig.getoption("--fault-schedules")]
    for seed in seeds:
        rng, place, last = random.Random(seed), f"{server.place}/{seed}", 0
        shapes = rng.randrange(1 << 30)
        for number in range(1, 4):
            value = state(random.Random(shapes), number)
            gateway.seen.clear()
            gateway.act = schedule(rng)
            error = ended(save, value, place)
            under_faults = loaded(value, place)
            gateway.act = lambda *_: None
            found = loaded(value, place)
            # A save whose answers were lost may be committed, although it has failed.
            if error is None:
                assert found == number, (seed, number, found)
            elif isinstance(found, IncompleteCheckpoint):
                assert not last, (seed, number, found)
            else:
                assert found in {last, number} - {0}, (seed, number, found, error)
            if isinstance(under_faults, int):
                assert under_faults == found, (seed, number)
            last = found if isinstance(found, int) else 0
        # What a save had sent when it gave up may arrive later than the next one looks.
        gateway.settle()
        # A day later, nothing is left of those that have failed. With as much time as busy cores need:
        with monkeypatch.context() as later:
            later.setattr(leftovers, "_ABANDONED_S", -60.0)
            save(value, place, timeout=timedelta(seconds=60))
        folder = f"{server.prefix}/{seed}"
        assert len(objects(server.url, f"{folder}/")) == 3, seed
