"""The demo: a trainer is killed, comes back on the state that the keeper of its node holds, and trains on.

First one trainer runs without an interruption: its losses are the reference. Then a keeper is started, and a trainer
that saves every few steps is killed with SIGKILL right after a save has been staged. A second trainer with other
weights takes its place: it finds the newest state in the keeper's memory. SHA-256 over every tensor and number proves
that this is the state that was saved, and every later loss must equal the reference bit for bit. At last a third one
loads the same checkpoint from the disk, after the keeper has ended, for comparison. Exits non-zero if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINER = Path(__file__).with_name("trainer.py")
KEEPER = "demo"


class Failed(Exception):
    """Something is not as it should be."""


class Trainer:
    """A trainer process, whose events are read as they come."""

    def __init__(self, environment: dict[str, str], *arguments: object, deadline: float) -> None:
        command = [sys.executable, str(TRAINER), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._deadline = time.monotonic() + deadline
        self.events: list[dict[str, Any]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields its events until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if time.monotonic() > self._deadline:
                self.kill()
                raise Failed("the trainer did not end in time")
            self.events.append(json.loads(line))
            yield self.events[-1]
        if status := self._process.wait():
            raise Failed(f"the trainer ended with status {status}")

    def kill(self) -> None:
        """Kills it with SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def first(self, event: str) -> dict[str, Any]:
        """Returns its first event of a kind."""
        return next(one for one in self.events if one["event"] == event)

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step."""
        return {one["step"]: one["loss"] for one in self.events if one["event"] == "step"}


def say(text: str) -> None:
    print(text, flush=True)


def start_keeper(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a keeper and waits until it answers."""
    keeper = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--name", KEEPER]
    process = subprocess.Popen([*keeper, "--interface", "127.0.0.1", "--generations", "2"], env=environment)
    for _ in range(100):
        if process.poll() is not None:
            raise Failed(f"the keeper ended with status {process.returncode}")
        if not subprocess.run([*keeper, "--status"], env=environment, capture_output=True, check=False).returncode:
            return process
        time.sleep(0.1)
    process.kill()
    raise Failed("the keeper does not answer")


def compare(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Failed(f"{what}: {found}, not {expected}")


def play(args: argparse.Namespace, folder: Path) -> None:
    """Runs the demo; raises if anything differs."""
    environment = os.environ | {"TENSORFERRY_KEEPER_DIR": str(folder / "keeper")}
    size = ("--steps", args.steps, "--width", args.width)
    reference = Trainer(environment, *size, deadline=args.deadline)
    list(reference.run())
    say(f"reference: {args.steps} steps without an interruption, last loss {reference.losses()[args.steps]:.6f}")

    keeper = start_keeper(environment)
    saving = ("--folder", folder / "checkpoints", "--every", args.every)
    try:
        killed = Trainer(environment, *size, *saving, "--keeper", KEEPER, deadline=args.deadline)
        saved: dict[str, Any] = {}
        for event in killed.run():
            if event["event"] == "staged":
                say(f"step {event['step']}: the loop stood still for {event['seconds'] * 1e3:.0f} ms")
                if event["step"] >= args.kill_after:
                    saved = event
                    break
        killed.kill()
        say(f"the trainer is killed right after the save of step {saved['step']} was staged")

        second = Trainer(environment, *size, *saving, "--keeper", KEEPER, "--seed", 1, deadline=args.deadline)
        list(second.run())
        loaded, imported = second.first("loaded"), second.first("imported")
        compare("the step of the loaded state", loaded["step"], saved["step"])
        compare("the digest of the loaded state", loaded["digest"], saved["digest"])
        say(
            f"a new trainer holds the state of step {loaded['step']}, bit for bit, {loaded['seconds'] * 1e3:.0f} ms "
            f"after it asked for it; its imports took {imported['seconds'] * 1e3:.0f} ms"
        )
        if loaded["seconds"] >= imported["seconds"]:
            raise Failed("loading took longer than the imports")
        expected = {step: loss for step, loss in reference.losses().items() if step > saved["step"]}
        compare("the losses after the restart", second.losses(), expected)
        compare("the final state", second.first("done")["digest"], reference.first("done")["digest"])
        say(f"it trained on: {len(expected)} losses and the final state equal the reference bit for bit")
    finally:
        keeper.terminate()
        if keeper.wait(20):
            raise Failed(f"the keeper ended with status {keeper.returncode}")

    third = Trainer(environment, *size, *saving, "--seed", 2, deadline=args.deadline)
    list(third.run())
    from_disk = third.first("loaded")
    compare("the digest of the state on the disk", from_disk["digest"], third.first("done")["digest"])
    compare("the state on the disk", from_disk["digest"], reference.first("done")["digest"])
    say(
        "without the keeper, a third one loads the last checkpoint from the disk in "
        f"{from_disk['seconds'] * 1e3:.0f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--kill-after", type=int, default=15, help="the step after whose save the trainer is killed")
    parser.add_argument("--width", type=int, default=1536, help="of the model")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for each trainer")
    args = parser.parse_args()
    if args.steps % args.every:
        parser.error("--steps must be a multiple of --every")
    with tempfile.TemporaryDirectory(prefix="tensorferry-restart-") as folder:
        try:
            play(args, Path(folder))
        except Failed as e:
            say(f"FAILED: {e}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
