"""A transport that writes down what goes through it: digest, bytes, time, and who sent how much."""

from __future__ import annotations

import hashlib
import time
from typing import Any, Protocol

from state_digest import state_bytes, state_digest


class Emit(Protocol):
    """Writes one event of this process."""

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Write the event with its fields."""


def source_name(metadata: str) -> str:
    """Names a source in the events without writing its address, which may be a capability, into files."""
    return hashlib.sha256(metadata.encode()).hexdigest()[:12]


def recorded(transport: type) -> type:
    """Return a subclass of a transport's class that records what goes through it; ``emit`` is its first argument."""
    return type(f"Recorded{transport.__name__}", (Recording, transport), {})


class Recording:
    """What is added to a transport of torchft's interface.

    What was sent is digested when it is withdrawn, before the caller may change it: receivers have it by then, so
    hashing takes neither time nor processors from the transfers that are timed.

    Args:
        emit: receives ``sent``, ``received`` and ``receive_failed`` events
        options: the transport's arguments

    """

    def __init__(self, emit: Emit, **options: Any) -> None:
        self.emit = emit
        self.serving: dict[str, Any] | None = None
        super().__init__(**options)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, object], timeout: Any) -> None:
        """Send, and remember what."""
        source = source_name(self.metadata())
        started, worked = time.monotonic(), time.thread_time()
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)
        seconds, cpu_seconds = time.monotonic() - started, time.thread_time() - worked
        self.serving = {
            "state": state_dict,
            "step": step,
            "source": source,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Any) -> dict[str, object]:
        """Receive, and record what, how fast and from whom, or why not."""
        source = source_name(metadata)
        started = time.monotonic()
        try:
            state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        except BaseException as error:
            self.emit("receive_failed", step=step, source=source, error=f"{type(error).__name__}: {error}")
            raise
        seconds = time.monotonic() - started
        report = getattr(self, "last_report", None)
        self.emit(
            "received",
            step=step,
            source=source,
            digest=state_digest(state),
            nbytes=state_bytes(state),
            seconds=seconds,
            senders=report.senders if report is not None else {},
        )
        return state

    def disallow_checkpoint(self) -> None:
        """Withdraw; if there was something to withdraw, record it and how long that held the caller up."""
        if self.serving is None:
            super().disallow_checkpoint()
            return
        sent, self.serving = self.serving, None
        digest = state_digest(sent.pop("state"))
        started, worked = time.monotonic(), time.thread_time()
        super().disallow_checkpoint()
        sent["cpu_seconds"] += time.thread_time() - worked
        self.emit("sent", digest=digest, withdraw_seconds=time.monotonic() - started, **sent)
