"""Directs a heal: starts a Lighthouse and replica groups, kills some, restarts them and compares the results."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from processes import Child, Events
from verdict import Heal, Log, Rank, heal_problems, heals_of, problems_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How many steps a replica may train ahead of the steps reported here; the last lease is the step at which all stop.
LEASE = 40


@dataclass(frozen=True)
class Scenario:
    """One job and the faults it gets.

    Args:
        transport: ``torchft``, ``tensorferry``, or ``module:Class``
        directory: gets ``torchft.log`` (everything the processes print) and one JSONL file of events per process
        replicas: replica groups in the job
        kill: how many of them are killed at once; 0 leaves it at the first heals, at step 0
        pad_mib: size of the ring of past weights, on top of model and optimizer
        kill_at_step: the step the victims have committed when they are killed
        settle_steps: how many steps the healed replicas train before the job is ended
        fleet: with tensorferry's Manager and relays, so that more than the assigned replica sends
        deadline: seconds for all of it
        path: folders that ``transport`` may be imported from

    """

    transport: str
    directory: Path
    chunks: int = 0
    replicas: int = 3
    kill: int = 1
    group_world_size: int = 1
    sync_quorum: bool = False
    width: int = 64
    pad_mib: int = 0
    kill_at_step: int = 20
    settle_steps: int = 5
    fleet: bool = False
    deadline: float = 240.0
    path: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if not 0 <= self.kill < self.replicas or self.replicas < 2:
            raise ValueError(f"cannot kill {self.kill} of {self.replicas} replicas and heal them")

    @property
    def min_replicas(self) -> int:
        """Return the number of replicas that must be enough to go on: all but those that are killed."""
        return self.replicas - self.kill


@dataclass(frozen=True)
class Outcome:
    """The result of a run: ``problems`` is empty if every heal was intact and all replicas ended equal."""

    problems: list[str]
    heals: list[Heal]
    digests: dict[int, str]
    final_step: int
    seconds: float


class ScenarioError(RuntimeError):
    """The job broke down, or made no progress in time."""


def run(scenario: Scenario, report: Callable[[float, str], None] = lambda *_: None) -> Outcome:
    """Run a scenario to its end; no process of it is left behind, whatever happens.

    Args:
        scenario: the job
        report: is called with each event's text and the seconds since the start

    """
    scenario.directory.mkdir(parents=True, exist_ok=True)
    for old in scenario.directory.glob("*.jsonl"):
        old.unlink()
    with (scenario.directory / "torchft.log").open("wb", buffering=0) as log, contextlib.ExitStack() as cleanup:
        director = Director(scenario, log, cleanup, report)
        try:
            director.direct()
            problems = problems_of(director.history, scenario.replicas, scenario.group_world_size)
        except ScenarioError as error:
            problems = [str(error), *heal_problems(director.history)]
        seconds = time.monotonic() - director.began
    finals = [
        (rank, event) for rank, events in director.history.items() for event in events if event["event"] == "finished"
    ]
    return Outcome(
        problems=problems,
        heals=heals_of(director.history),
        digests={rank.rank: event["digest"] for rank, event in finals},
        final_step=max((event["step"] for _, event in finals), default=0),
        seconds=seconds,
    )


class Director:
    """Drives one scenario, step by step, on the events of its processes."""

    def __init__(
        self,
        scenario: Scenario,
        log: IO[bytes],
        cleanup: contextlib.ExitStack,
        report: Callable[[float, str], None],
    ) -> None:
        self.scenario = scenario
        self.log = log
        self.cleanup = cleanup
        self.began = time.monotonic()
        self.report = lambda text: report(time.monotonic() - self.began, text)
        self.events: Events = queue.SimpleQueue()
        self.living: dict[Rank, Child] = {}
        self.names: dict[Child, Rank] = {}
        self.history: Log = {}
        self.lease = 0
        self.ending = False

    # The story.

    def direct(self) -> None:
        """Run the whole story."""
        scenario = self.scenario
        # The survivors of a fleet may find out late that others were killed, and are to be there when these heal.
        join_seconds = 60 if scenario.fleet else 10
        self.lighthouse = self.spawn("lighthouse", ["lighthouse.py", str(scenario.min_replicas), str(join_seconds)])
        everyone = [rank for replica in range(scenario.replicas) for rank in self.start_replica(replica, life=0)]
        self.connect(everyone)
        self.allow_steps(LEASE)
        self.wait("the first steps", lambda: all(self.living[rank].step >= 1 for rank in everyone))
        self.report(f"{scenario.replicas} replicas train; those that had other weights took them from a peer at step 0")
        if scenario.kill:
            self.kill_and_heal()
        target = scenario.kill_at_step
        self.wait("the last steps", lambda: min(child.step for child in self.living.values()) >= target)
        self.finish()

    def kill_and_heal(self) -> None:
        """Kill the victims, restart them, and wait until they train again."""
        scenario = self.scenario
        victims = [rank for rank in self.living if 1 <= rank.replica <= scenario.kill]
        step = scenario.kill_at_step
        self.wait("the step of the kill", lambda: all(self.living[rank].step >= step for rank in victims))
        killed_at = max(self.living[rank].step for rank in victims)
        loss = self.living[victims[0]].seen["committed"]["loss"]
        for rank in victims:
            self.living[rank].kill()
        pids = ", ".join(f"{rank.replica} (pid {self.living.pop(rank).pid})" for rank in victims)
        self.report(f"SIGKILL for replica {pids} after step {killed_at}, loss {loss:.2f}")

        killed = time.monotonic()
        survivors = list(self.living)
        restarted = [rank for replica in range(1, scenario.kill + 1) for rank in self.start_replica(replica, life=1)]
        self.connect(restarted)
        for rank in restarted:
            self.living[rank].send_order(lease=self.lease)
        after = [
            event
            for rank in survivors
            for event in self.history[rank]
            if event["event"] == "committed" and event["at"] > killed and event["step"] > killed_at
        ]
        if after:
            pause = min(event["at"] for event in after) - killed
            alone = max(event["step"] for event in after) - killed_at
            self.report(f"the survivors went on after {pause:.1f} s and have done {alone} steps by now")
        self.report(f"restarted with other weights, {time.monotonic() - killed:.1f} s after the kill")
        self.wait("the heal", lambda: all("received" in self.living[rank].seen for rank in restarted))
        self.wait(
            "steps after the heal",
            lambda: all(
                self.living[rank].step >= self.living[rank].seen["received"]["step"] + scenario.settle_steps
                for rank in restarted
            ),
        )
        for heal in heals_of(self.history):
            if heal.receiver.life and heal.source is not None:
                name = f"replica {heal.receiver.replica}"
                name += f" rank {heal.receiver.rank}" if scenario.group_world_size > 1 else ""
                self.report(
                    f"{name} healed at step {heal.step} from replica {heal.source.replica}: "
                    f"{heal.nbytes / 2**20:.1f} MiB in {heal.receive_seconds:.3f} s, "
                    f"SHA-256 sent {str(heal.sent_digest)[:12]}, received {heal.received_digest[:12]}"
                )

    def finish(self) -> None:
        """Let all replicas stop at the same step and leave together."""
        self.ending = True
        for child in self.living.values():
            child.send_order(final=self.lease)
        self.await_all("finished", list(self.living))
        losses = [child.seen["committed"]["loss"] for child in self.living.values()]
        self.report(f"all stop at step {self.lease}, mean loss {sum(losses) / len(losses):.2f}")
        for child in self.living.values():
            child.expected_to_go = True
            child.send_order(exit=True)
        self.await_all("gone", list(self.living))
        for child in self.living.values():
            if status := child.seen["gone"]["status"]:
                raise ScenarioError(f"{child.name} trained to the end and then left with status {status}")

    # The steps of a scenario.

    def spawn(self, name: str, command: list[str]) -> Child:
        """Start a script; whatever happens, it is stopped at the end."""
        child = Child(
            name=name,
            command=command,
            events=self.events,
            event_file=self.scenario.directory / f"{name}.jsonl",
            log=self.log,
            path=self.scenario.path,
        )
        self.cleanup.callback(child.stop)
        return child

    def start_replica(self, replica: int, life: int) -> Iterator[Rank]:
        """Start all ranks of a replica group; another life has other weights."""
        scenario = self.scenario
        for rank in range(scenario.group_world_size):
            started = Rank(replica, rank, life)
            command = ["job.py", "--transport", scenario.transport, "--chunks", str(scenario.chunks)]
            command += ["--replica", str(replica), "--rank", str(rank)]
            command += ["--group-world-size", str(scenario.group_world_size)]
            command += ["--min-replicas", str(scenario.min_replicas)]
            command += ["--seed", str(1 + replica + 100 * rank + 1000 * life), "--width", str(scenario.width)]
            command += ["--pad-mib", str(scenario.pad_mib)]
            command += ["--sync-quorum"] if scenario.sync_quorum else []
            command += ["--fleet"] if scenario.fleet else []
            self.living[started] = self.spawn(str(started), command)
            self.names[self.living[started]] = started
            self.history[started] = []
            yield started

    def connect(self, ranks: list[Rank]) -> None:
        """Bring started ranks to the point where they could train."""
        self.await_all("loaded", ranks)
        self.wait("the Lighthouse", lambda: "ready" in self.lighthouse.seen)
        for rank in ranks:
            store = self.living[Rank(rank.replica, 0, rank.life)].seen["loaded"]["store"]
            address = f"http://localhost:{self.lighthouse.seen['ready']['port']}"
            self.living[rank].send_order(start={"store": store, "lighthouse": address})
        self.await_all("ready", ranks)

    def allow_steps(self, lease: int) -> None:
        """Let all replicas train up to a step."""
        self.lease = lease
        for child in self.living.values():
            child.send_order(lease=lease)

    def await_all(self, event: str, ranks: list[Rank]) -> None:
        """Wait until each of the ranks has sent an event."""
        self.wait(f"'{event}'", lambda: all(event in self.living[rank].seen for rank in ranks))

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        """Take in events until a condition holds; allow further steps meanwhile."""
        while not reached():
            left = self.began + self.scenario.deadline - time.monotonic()
            try:
                child, event = self.events.get(timeout=max(left, 0.0))
            except queue.Empty:
                self.dump_stacks()
                state = ", ".join(f"{rank} at step {child.step}" for rank, child in self.living.items())
                raise ScenarioError(f"timed out after {self.scenario.deadline} s waiting for {what}: {state}") from None
            self.take_in(child, event)

    def take_in(self, child: Child, event: dict[str, Any]) -> None:
        """Record an event, and act at once on those that cannot wait."""
        child.seen[event["event"]] = event
        if child in self.names:
            self.history[self.names[child]].append(event)
        if event["event"] == "gone" and not child.expected_to_go:
            raise ScenarioError(
                f"{child.name} ended by itself, status {event['status']}: {child.last_line} (see {self.log.name})"
            )
        if event["event"] == "committed" and not self.ending and event["step"] > self.lease - LEASE // 2:
            self.allow_steps(event["step"] + LEASE)

    def dump_stacks(self) -> None:
        """Write to the log where every replica hangs."""
        for child in self.living.values():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
