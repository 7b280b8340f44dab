"""A transport that passes every call on and writes down what went through it: digest, bytes and time."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, Protocol

from state_digest import state_bytes, state_digest
from torchft.checkpointing.transport import CheckpointTransport

if TYPE_CHECKING:
    from datetime import timedelta


class Emit(Protocol):
    """Writes one event of this process."""

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Write the event with its fields."""


def source_name(metadata: str) -> str:
    """Names a source in the events without writing its address, which may be a capability, into files."""
    return hashlib.sha256(metadata.encode()).hexdigest()[:12]


class RecordedTransport(CheckpointTransport[dict[str, object]]):
    """Wraps a transport of torchft's interface.

    What was sent is digested when it is withdrawn, before the caller may change it: receivers have it by then, so
    hashing takes neither time nor processors from the transfers that are timed.

    Args:
        inner: the transport that does the work
        emit: receives ``sent``, ``received`` and ``receive_failed`` events

    """

    def __init__(self, inner: CheckpointTransport[dict[str, object]], emit: Emit) -> None:
        self.inner = inner
        self.emit = emit
        self.serving: dict[str, Any] | None = None

    def metadata(self) -> str:
        """Return the address of the inner transport."""
        return self.inner.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, object], timeout: timedelta
    ) -> None:
        """Send, and remember what."""
        source = source_name(self.inner.metadata())
        started, worked = time.monotonic(), time.thread_time()
        self.inner.send_checkpoint(dst_ranks, step, state_dict, timeout)
        seconds, cpu_seconds = time.monotonic() - started, time.thread_time() - worked
        self.serving = {
            "state": state_dict,
            "step": step,
            "source": source,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, object]:
        """Receive, and record what and how fast, or why not."""
        source = source_name(metadata)
        started = time.monotonic()
        try:
            state = self.inner.recv_checkpoint(src_rank, metadata, step, timeout)
        except BaseException as error:
            self.emit("receive_failed", step=step, source=source, error=f"{type(error).__name__}: {error}")
            raise
        seconds = time.monotonic() - started
        nbytes = state_bytes(state)
        self.emit("received", step=step, source=source, digest=state_digest(state), nbytes=nbytes, seconds=seconds)
        return state

    def disallow_checkpoint(self) -> None:
        """Withdraw; if there was something to withdraw, record it and how long that held the caller up."""
        if self.serving is None:
            self.inner.disallow_checkpoint()
            return
        sent, self.serving = self.serving, None
        digest = state_digest(sent.pop("state"))
        started, worked = time.monotonic(), time.thread_time()
        self.inner.disallow_checkpoint()
        sent["cpu_seconds"] += time.thread_time() - worked
        self.emit("sent", digest=digest, withdraw_seconds=time.monotonic() - started, **sent)

    def shutdown(self, wait: bool = True) -> None:
        """Shut the inner transport down."""
        self.inner.shutdown(wait=wait)
