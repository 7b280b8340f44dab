"""torchft's PGTransport over a gloo process group of two: the source is rank 0, the receiver rank 1."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

from contenders import StateRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


class _Announcing(ProcessGroupGloo):
    """Reports the first send of a checkpoint: what comes before it is preparation."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self.begun = threading.Event()

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        self.begun.set()
        return super().send(tensors, dst_rank, tag)


class GlooPair:
    """Has the methods of an HTTPTransport.

    PGTransport's `send_checkpoint` returns when the receiver has everything. Here it runs on a thread, and
    `send_checkpoint` returns when the state is prepared and the first byte can leave, which is what the other
    transports do: a receive then does not wait for the preparation. Each receive needs one send.
    """

    def __init__(self, timeout: timedelta, live: Callable[[], Any] | None) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._timeout = timeout
        self._group = _Announcing(timeout)
        self._transport: PGTransport[Any] = PGTransport(self._group, timeout, torch.device("cpu"), live)
        self._store: TCPStore | None = None
        self._sending: threading.Thread | None = None
        self._error: Exception | None = None

    def metadata(self) -> str:
        """Return where the two meet; makes the store on which they do."""
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return f"tcp://127.0.0.1:{self._store.port}"

    def join(self, metadata: str) -> None:
        """Make the process group; returns when both processes have called it."""
        rank = 0 if metadata == self.metadata() else 1
        self._group.configure(f"{metadata.removeprefix('tcp://')}/bench", "bench", rank, 2)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Prepare the state and begin to send it once; raise StateRefused if it cannot be prepared."""
        self.disallow_checkpoint()
        self._group.begun.clear()

        def send() -> None:
            try:
                self._transport.send_checkpoint(dst_ranks, step, state_dict, timeout)
            except Exception as error:
                self._error = error if self._group.begun.is_set() else StateRefused(f"{type(error).__name__}: {error}")
            finally:
                self._group.begun.set()

        self._sending = threading.Thread(target=send, daemon=True)
        self._sending.start()
        self._group.begun.wait()
        if isinstance(self._error, StateRefused):
            self.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive what the other process sends at the same time."""
        return self._transport.recv_checkpoint(src_rank, metadata, step, timeout)

    def disallow_checkpoint(self) -> None:
        """Wait until the receiver has what was sent last; raise what went wrong."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def shutdown(self) -> None:
        """Leave the process group, once what was sent last has arrived."""
        self.disallow_checkpoint()
        self._group.shutdown()
