"""One measurement each: a transfer by a contender, the raw sockets' floor, and the stall of a source's main loop."""

from __future__ import annotations

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


@dataclass
class Lab:
    """Where measurements are made: how children start, where their stderr goes, and what went wrong in them."""

    context: Any
    log: str
    scale: float
    ballast: Peer
    problems: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    _holding: bool = False

    @property
    def watch_s(self) -> float:
        """Return how many seconds a main loop is watched at least."""
        return min(_WATCH_S, 5 * self.scale)

    def hold(self, nbytes: int) -> None:
        """Begin to hold memory for a state of that size, until `release`."""
        if nbytes >= _LARGE_STATE and not self._holding:
            self.ballast.post("hold_memory", nbytes=nbytes + nbytes // 8 + _LARGE_STATE)
            self._holding = True

    def release(self) -> None:
        """Release the held memory, so that the next allocation of any process can have its pages."""
        if self._holding:
            self._holding = False
            self.ballast.wait()
            self.ballast.ask("release_memory")

    @contextmanager
    def peers(self, what: str, *busy: bool) -> Iterator[list[Peer]]:
        """Yield one fresh process per flag; those whose flag is set run a main loop."""
        peers = [Peer(self.context, self.log, busy=flag) for flag in busy]
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


def _warm_up(source: Peer, receiver: Peer, contender: Contender) -> tuple[str, float]:
    for peer in (source, receiver):
        peer.post("open", contender=contender.name)
    metadata = source.wait()
    receiver.wait()
    source.ask("send", which="warm_up")
    first = receiver.ask("receive", metadata=metadata, which="warm_up", repeats=1, at_least_s=0.0)
    source.ask("disallow")
    return metadata, first["s"]


def _close(*peers: Peer) -> None:
    for peer in peers:
        peer.post("close")
    for peer in peers:
        peer.wait()


def transfer(lab: Lab, row: Row, contender: Contender, check: bool) -> dict[str, Any]:
    """Move a row's state once, and once more on a large row; with `check`, compare digests of what arrived."""
    what = f"{row.title}, {contender.name}"
    with lab.peers(what, False, False) as (source, receiver):
        source.post("build", row=row.name, scale=lab.scale, seed=1)
        lab.hold(lab.sizes.get(row.name, 0))  # while the source builds; its size is known from the second time on
        if contender.in_place:
            receiver.post("build", row=row.name, scale=lab.scale, seed=2)
            receiver.wait()
        shape = source.wait()
        lab.sizes[row.name] = shape["bytes"]
        lab.hold(shape["bytes"])
        metadata, cold_s = _warm_up(source, receiver, contender)
        begin, end = source.ask("send", which="state")["window"]
        lab.release()
        sample: dict[str, Any] = {"send_s": (end - begin) / 1e9, "cold_s": cold_s, **shape}
        for order in ("first", "second") if row.large else ("first",):
            receiver.ask("forget")
            received = receiver.ask("receive", metadata=metadata, which="state", repeats=row.repeats, at_least_s=0.0)
            sample[f"{order}_s"] = received["s"]
            sample[f"{order}_all_s"] = [(end - begin) / 1e9 for begin, end in received["windows"]]
            sample[f"{order}_receiver_extra"] = received["extra"]
            if check:
                source.post("digest", received=False)
                receiver.post("digest", received=True)
                sample[f"{order}_equal"] = source.wait() == receiver.wait()
                if not sample[f"{order}_equal"]:
                    lab.problems.append(f"{what}: the {order} receive differs from what was sent")
        sample["source_extra"] = source.ask("extra_memory")
        _close(receiver, source)
    return sample


def raw_floor(lab: Lab, nbytes: int) -> dict[str, float]:
    """Move as many bytes through plain sockets."""
    with lab.peers("raw sockets", False, False) as (source, receiver):
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
    with lab.peers(f"main loop, {row.title}, {contender.name}", True, False) as (source, receiver):
        shape = source.ask("build", row=row.name, scale=lab.scale, seed=1)
        lab.hold(shape["bytes"])
        metadata, _ = _warm_up(source, receiver, contender)
        unloaded = source.ask("loop_begin", unloaded_s=lab.watch_s)
        window = source.ask("send", which="state")["window"]
        sending = source.ask("loop_during", windows=[window])
        lab.release()
        received = receiver.ask("receive", metadata=metadata, which="state", repeats=1, at_least_s=lab.watch_s)
        serving = source.ask("loop_during", windows=received["windows"])
        _close(receiver, source)
    return _stalls(unloaded, serving) | {"sending_worst_s": sending["worst_s"], "receives": len(received["windows"])}


def raw_stall(lab: Lab, nbytes: int) -> dict[int, dict[str, Any]]:
    """Watch the same loop while two other processes move bytes through one plain socket, then through two."""
    with lab.peers("main loop, raw sockets", True, False, False) as (trainer, receiver, sender):
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
