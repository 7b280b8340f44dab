"""Keepers for tests: processes with a socket folder of their own, and states as checkpointers stage them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tensorferry._native import SharedBuffer, _copy_memory
from tensorferry.checkpointing.handover import Handover
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.checkpointing.keeper.place import connect
from tensorferry.errors import TensorferryError
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.bounce import BounceBuffers
from tensorferry.memory.staging import HostStager
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state.load import receive
from tensorferry.state.snapshot import StateSnapshot

PATIENCE = 60.0


def eventually(what: str, true: Any, patience: float = PATIENCE) -> Any:
    """Waits until ``true()`` is, and returns it."""
    deadline = time.monotonic() + patience
    while not (found := true()):
        assert time.monotonic() < deadline, f"in {patience:g} s it did not come true that {what}"
        time.sleep(0.01)
    return found


class KeeperAtWork:
    """A keeper process, which is ended with the block; its clients in this process find it through ``folder``."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        name: str = "default",
        secret: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TENSORFERRY_")} | (environment or {})
        environment |= {"TENSORFERRY_KEEPER_DIR": str(folder)} | ({"TENSORFERRY_SECRET": secret} if secret else {})
        self.log = folder.parent / f"{name}-{secrets.token_hex(4)}.log"
        command = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--name", name]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--interface", "127.0.0.1", *options], env=environment, stderr=log, stdout=log
            )
        try:
            eventually(f"the keeper {name} is up", lambda: self.is_up() or self.process.poll() is not None)
            assert self.process.poll() is None, self.said()
        except BaseException:
            self.kill()
            raise

    def is_up(self) -> bool:
        with contextlib.suppress(TensorferryError):
            connect(self.name).close()
            return True
        return False

    def said(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, by: int = signal.SIGTERM) -> int:
        self.process.send_signal(by)
        return self.process.wait(PATIENCE)

    def resident(self) -> int:
        """Bytes of memory of its own, without what it shares with trainers."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the keeper is gone")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self) -> KeeperAtWork:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()


@contextlib.contextmanager
def connected(process: KeeperAtWork) -> Iterator[socket.socket]:
    """A connection that says what the test sends, and nothing else."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(process.folder / f"keeper-{process.name}.sock"))
        yield sock


def staged(state: Any, path: str = "/ckpt/run/step-1", **fields: Any) -> Handover:
    """Returns ``state`` as a checkpointer hands it over."""
    taken = StateSnapshot(state, HostStager(ACCELERATOR), "copy")
    rows, at, copies = taken.rows, 0, []
    sizes = rows.sizes
    buffer = SharedBuffer(max(sum(-(-size // 64) * 64 for size in sizes), 1))
    for row, size in enumerate(sizes):
        copies.append((rows.address(row), buffer.address + at, size))
        rows.place(row, buffer.address + at)
        at += -(-size // 64) * 64
    _copy_memory([copy for copy in copies if copy[2]], 1)
    known = {"path": path, "save_id": secrets.token_hex(6), "rank": 0, "world_size": 1, "step": None}
    return Handover("keep", {**known, "began": time.time_ns(), **fields}, rows, taken._control(), [buffer])


class Told:
    """Notes when the memory of an offer is released."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def state_of(seed: int, nbytes: int = 1 << 20) -> dict[str, Any]:
    """Returns a state with a tensor of ``nbytes``, its names, and another one that shares its memory."""
    weight = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))
    return {"model": {"w": weight, "tied": weight, "t": weight[:64].view(8, 8).t()}, "seen": {1, 2}, "step": seed}


def offered(keeper: Keeper, state: Any, path: str = "/ckpt/run/step-1", **fields: Any) -> Told:
    """Offers ``state`` and waits until the keeper has decided."""
    given, told = staged(state, path, **fields), Told()
    keeper.offer(given, told)
    key = given.fields["save_id"], given.fields["rank"]
    eventually(
        "the offer is answered",
        lambda: told.times or any((one.save_id, one.rank) == key for one in keeper.held()),
    )
    return told


def loaded(keeper: Keeper, one: Any) -> Any:
    """Returns the state of a snapshot, through the keeper."""
    return read_from(keeper.open(one))


def read_from(source: Any) -> Any:
    """Returns the state that a keeper has given."""
    assert source is not None
    state, _, _ = receive(source, Allowed(), None, BounceBuffers(ACCELERATOR))
    return state
