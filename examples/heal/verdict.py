"""Judges a run by its events: what was healed from whom, and whether all bytes arrived and all replicas agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rank:
    """One process of the job: a replica group's member, in its first life or in a later one."""

    replica: int
    rank: int
    life: int

    def __str__(self) -> str:
        """Return the name that the rank's files have."""
        return f"replica{self.replica}.rank{self.rank}.life{self.life}"


@dataclass(frozen=True)
class Heal:
    """A state that a process has received.

    ``source`` is the one that was assigned, and ``senders`` says how many bytes came from whom: by the name of the
    replica, or by host and port where no replica of the job listens there; empty if the transport does not say.
    """

    receiver: Rank
    source: Rank | None
    step: int
    nbytes: int
    receive_seconds: float
    held_up_seconds: float
    held_up_cpu_seconds: float
    sent_digest: str | None
    received_digest: str
    senders: dict[str, int] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Return whether the received state equals the sent one."""
        return self.sent_digest == self.received_digest


Log = dict[Rank, list[dict[str, Any]]]


def heals_of(log: Log) -> list[Heal]:
    """Pair every receive with the send that it was served from: same source, same step."""
    sends = {
        (event["source"], event["step"]): (rank, event)
        for rank, events in log.items()
        for event in events
        if event["event"] == "sent"
    }
    # All replicas run on this machine, so their ports tell them apart.
    listening = {
        str(event["port"]): f"replica {rank.replica}"
        for rank, events in log.items()
        for event in events
        if event["event"] == "ready" and "port" in event
    }
    heals = []
    for receiver, events in log.items():
        for event in events:
            if event["event"] != "received":
                continue
            source, sent = sends.get((event["source"], event["step"]), (None, {}))
            heals.append(
                Heal(
                    receiver=receiver,
                    source=source,
                    step=event["step"],
                    nbytes=event["nbytes"],
                    receive_seconds=event["seconds"],
                    held_up_seconds=sent.get("seconds", 0.0) + sent.get("withdraw_seconds", 0.0),
                    held_up_cpu_seconds=sent.get("cpu_seconds", 0.0),
                    sent_digest=sent.get("digest"),
                    received_digest=event["digest"],
                    senders={
                        listening.get(sender.rpartition(":")[2], sender): sent_bytes
                        for sender, sent_bytes in event.get("senders", {}).items()
                    },
                )
            )
    return heals


def problems_of(log: Log, replicas: int, group_world_size: int) -> list[str]:
    """Return everything that is wrong with a finished run; an empty list proves that it went well."""
    problems = heal_problems(log)
    for rank in range(group_world_size):
        problems += _disagreements(log, rank, replicas)
    return problems


def heal_problems(log: Log) -> list[str]:
    """Find what is wrong with the heals of a run, finished or not."""
    problems = []
    heals = heals_of(log)
    for heal in heals:
        if heal.source is None:
            problems.append(f"{heal.receiver} received step {heal.step} from a source that never sent it")
        elif not heal.intact:
            problems.append(
                f"{heal.receiver} received other bytes at step {heal.step} than {heal.source} sent: "
                f"{heal.received_digest[:12]} instead of {str(heal.sent_digest)[:12]}"
            )
    for rank, events in log.items():
        problems += [
            f"{rank} failed to receive step {event['step']}: {event['error']}"
            for event in events
            if event["event"] == "receive_failed"
        ]
        if rank.life and not any(heal.receiver == rank and heal.step > 0 for heal in heals):
            problems.append(f"{rank} was restarted and never healed")
    return problems


def _disagreements(log: Log, rank: int, replicas: int) -> list[str]:
    """Compare the last state of one rank across all replicas, and make sure that they did not start out equal."""
    finals = {
        process: event
        for process, events in log.items()
        if process.rank == rank
        for event in events
        if event["event"] == "finished"
    }
    if {process.replica for process in finals} != set(range(replicas)):
        return [f"rank {rank} finished on replicas {sorted(process.replica for process in finals)} of {replicas}"]
    problems = []
    if len({event["step"] for event in finals.values()}) > 1:
        problems.append(f"rank {rank} stopped at different steps: {[event['step'] for event in finals.values()]}")
    if len({event["digest"] for event in finals.values()}) > 1:
        parts = ", ".join(f"{process} {event['digest'][:12]}" for process, event in finals.items())
        problems.append(f"rank {rank} ended with different states: {parts}")
    starts = [
        event["weights"]
        for process, events in log.items()
        if process.rank == rank
        for event in events
        if event["event"] == "loaded"
    ]
    if len(set(starts)) < len(starts):
        problems.append(f"rank {rank} had equal weights on two replicas before any heal: the run proves nothing")
    return problems
