"""One measurement each: a transfer by a contender, the raw sockets' floor, and the stall of a source's main loop."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peers import Peer, PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from contenders import Contender
    from states import Row

_LARGE_STATE = 16 << 20  # below this, fresh memory makes no difference
_WATCH_S = 1.0
#: As many times the state's bytes are left free of cold memory: copies at the source, and the receiver's peak.
_COLD_STATES = 4


@dataclass
class Lab:
    """Where measurements are made: how children start, where their stderr goes, and what went wrong in them."""

    context: Any
    log: str
    scale: float
    ballast: Peer
    backed_rate: float
    problems: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    _holding: bool = False
    _answer_due: bool = False

    @property
    def watch_s(self) -> float:
        """Return how many seconds a main loop is watched at least."""
        return min(_WATCH_S, 5 * self.scale)

    def hold(self, nbytes: int) -> None:
        """Begin to hold memory for a state of that size, until `release`."""
        if nbytes >= _LARGE_STATE and not self._holding:
            self.ballast.post("hold_memory", nbytes=nbytes + nbytes // 8 + _LARGE_STATE)
            self._holding = self._answer_due = True

    def release(self) -> None:
        """Release the held memory, so that the next allocation of any process can have its pages."""
        if self._answer_due:
            self._answer_due = False
            self.ballast.wait()
        if self._holding:
            self._holding = False
            self.ballast.ask("release_memory")

    def cold(self, nbytes: int) -> float:
        """Leave only cold memory free, until `release`; return the GB/s at which it is touched first.

        Raises:
            PeerError: there is none, for a state of `nbytes`; the message says why
        """
        leave = _COLD_STATES * nbytes + _LARGE_STATE
        rate, why = self.ballast.ask("hold_backed_memory", leave=leave, backed=self.backed_rate)
        self._holding = True
        if rate is None:
            self.release()
            raise PeerError(why)
        return float(rate)

    @contextmanager
    def peers(self, what: str, *loops: str | None) -> Iterator[list[Peer]]:
        """Yield one fresh process for each, whose main thread runs that loop."""
        peers = [Peer(self.context, self.log, loop=loop) for loop in loops]
        try:
            yield peers
        except PeerError:
            for peer in peers:
                peer.end(patience_s=0.0)
            raise
        else:
            for role, peer in zip(("source", "receiver", "third process"), peers, strict=False):
                if not peer.end():
                    self.problems.append(f"{what}: the {role} did not exit within 10 s and was killed")


@dataclass
class _Pair:
    """A source and a receiver with open transports."""

    source: Peer
    receiver: Peer
    contender: Contender
    metadata: str

    @classmethod
    def open(cls, source: Peer, receiver: Peer, contender: Contender) -> _Pair:
        for peer in (source, receiver):
            peer.post("open", contender=contender.name)
        metadata = source.wait()
        receiver.wait()
        if contender.meets:
            for peer in (source, receiver):
                peer.post("join", metadata=metadata)
            source.wait()
            receiver.wait()
        return cls(source, receiver, contender, metadata)

    def send(self, which: str) -> tuple[int, int]:
        """Publish a state; return when the call began and ended."""
        begin, end = self.source.ask("send", which=which)["window"]
        return begin, end

    def receive(self, which: str, repeats: int = 1, at_least_s: float = 0.0) -> dict[str, Any]:
        """Receive what was sent, `repeats` times or more, for at least `at_least_s` seconds."""
        windows: list[tuple[int, int]] = []
        spent = 0
        self.receiver.ask("watch_memory")
        while len(windows) < repeats or spent < at_least_s * 1e9:
            if windows and self.contender.meets:
                self.send(which)
            begin, end = self.receiver.ask("receive", metadata=self.metadata, which=which)
            windows.append((begin, end))
            spent += end - begin
        seconds = [(end - begin) / 1e9 for begin, end in windows]
        extra = self.receiver.ask("extra_memory")
        return {"s": statistics.median(seconds), "all_s": seconds, "windows": windows, "extra": extra}

    def warm_up(self) -> float:
        """Move a tiny state, so that what follows pays for no import, thread or connection; return its seconds."""
        self.send("warm_up")
        seconds: float = self.receive("warm_up")["s"]
        self.source.ask("disallow")
        return seconds

    def close(self) -> None:
        for peer in (self.receiver, self.source):
            peer.post("close")
        for peer in (self.receiver, self.source):
            peer.wait()


def _prepare(row: Row, *peers: Peer) -> None:
    for peer in peers if row.sharded else ():
        peer.ask("form_group")


def transfer(lab: Lab, row: Row, contender: Contender, memory: str, check: bool) -> dict[str, Any]:
    """Move a row's state once, and once more where the row says so.

    Args:
        lab: where
        row: the state, and how it is measured
        contender: the transport
        memory: "backed" or "cold": the free memory that the first receive finds
        check: compare digests of what was sent and what arrived

    Returns:
        A sample: seconds of the send, of the warm-up and of each receive, and peaks of memory.

    Raises:
        PeerError: a process failed; Refused, which is one, if the transport cannot take the state
    """
    try:
        return _transfer(lab, row, contender, memory, check)
    finally:
        lab.release()


def _transfer(lab: Lab, row: Row, contender: Contender, memory: str, check: bool) -> dict[str, Any]:
    what = f"{row.title}, {contender.name}, {memory}"
    loop = "training" if row.job else None
    with lab.peers(what, loop, loop) as (source, receiver):
        _prepare(row, source, receiver)
        source.post("build", row=row.name, scale=lab.scale, seed=1)
        if memory == "backed":
            lab.hold(lab.sizes.get(row.name, 0))  # while the source builds; its size is known from the second time on
        if contender.in_place:
            receiver.post("build", row=row.name, scale=lab.scale, seed=2)
            receiver.wait()
        shape = source.wait()
        lab.sizes[row.name] = shape["bytes"]
        if memory == "backed":
            lab.hold(shape["bytes"])
        pair = _Pair.open(source, receiver, contender)
        sample: dict[str, Any] = {**shape, "warm_up_s": None if row.job else pair.warm_up()}
        if row.job:
            for peer in (source, receiver):
                peer.ask("train")
        if memory == "cold":
            sample["cold_rate"] = lab.cold(shape["bytes"])
        source.ask("watch_memory")
        begin, end = pair.send("state")
        sample["send_s"] = (end - begin) / 1e9
        if memory == "backed":
            lab.release()
        for order in ("first", "second") if row.again and memory == "backed" else ("first",):
            if order == "second" and contender.meets:
                pair.send("state")
            received = pair.receive("state", repeats=row.repeats)
            sample |= {f"{order}_s": received["s"], f"{order}_all_s": received["all_s"]}
            sample[f"{order}_phases"] = receiver.ask("phases")
            sample[f"{order}_receiver_extra"] = received["extra"]
            if check:
                source.post("digest", received=False)
                receiver.post("digest", received=True)
                sample[f"{order}_equal"] = source.wait() == receiver.wait()
                if not sample[f"{order}_equal"]:
                    lab.problems.append(f"{what}: the {order} receive differs from what was sent")
        sample["source_extra"] = source.ask("extra_memory")
        sample["source_phases"] = source.ask("phases")
        pair.close()
    return sample


def raw_floor(lab: Lab, nbytes: int) -> dict[str, float]:
    """Move as many bytes through plain sockets."""
    with lab.peers("raw sockets", None, None) as (source, receiver):
        port = source.ask("raw_listen", nbytes=nbytes)
        source.ask("raw_serve", streams=(1, 2))
        seconds: dict[str, float] = {}
        for streams in (1, 2):
            lab.hold(nbytes)
            lab.release()
            seconds |= receiver.ask("raw_floor", port=port, nbytes=nbytes, streams=streams)
    return seconds


def stall(lab: Lab, row: Row, contender: Contender) -> dict[str, Any]:
    """Watch the source's main loop while another of its threads sends and while a receiver receives."""
    with lab.peers(f"main loop, {row.title}, {contender.name}", "steps", None) as (source, receiver):
        _prepare(row, source, receiver)
        shape = source.ask("build", row=row.name, scale=lab.scale, seed=1)
        lab.hold(shape["bytes"])
        pair = _Pair.open(source, receiver, contender)
        pair.warm_up()
        unloaded = source.ask("loop_begin", unloaded_s=lab.watch_s)
        window = pair.send("state")
        sending = source.ask("loop_during", windows=[window])
        lab.release()
        windows = pair.receive("state", at_least_s=lab.watch_s)["windows"]
        serving = source.ask("loop_during", windows=windows)
        pair.close()
    return _stalls(unloaded, serving) | {"sending_worst_s": sending["worst_s"], "receives": len(windows)}


def raw_stall(lab: Lab, nbytes: int) -> dict[int, dict[str, Any]]:
    """Watch the same loop while two other processes move bytes through one plain socket, then through two."""
    with lab.peers("main loop, raw sockets", "steps", None, None) as (trainer, receiver, sender):
        port = sender.ask("raw_listen", nbytes=nbytes)
        sender.ask("raw_serve", streams=(1, 2))
        unloaded = trainer.ask("loop_begin", unloaded_s=lab.watch_s)
        found = {}
        for streams in (1, 2):
            windows = receiver.ask("raw_receive", port=port, nbytes=nbytes, streams=streams, at_least_s=lab.watch_s)
            serving = trainer.ask("loop_during", windows=windows)
            found[streams] = _stalls(unloaded, serving) | {"receives": len(windows)}
    return found


def _stalls(unloaded: dict[str, float], serving: dict[str, float]) -> dict[str, float]:
    return {
        "unloaded_worst_s": unloaded["worst_s"],
        "unloaded_steps_per_s": unloaded["steps_per_s"],
        "serving_worst_s": serving["worst_s"],
        "serving_awake_s": serving["worst_awake_s"],
        "serving_steps_per_s": serving["steps_per_s"],
        "serving_rate": serving["steps_per_s"] / unloaded["steps_per_s"],
    }
