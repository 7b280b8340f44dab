"""Child processes that talk in JSON lines, and die with the process that started them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
Events = queue.SimpleQueue["tuple[Child, dict[str, Any]]"]


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session of its own, and every process that it left in that session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(eq=False)
class Child:
    """A started script. Its events go to a queue and to a JSONL file, its other output to a log.

    Args:
        name: used in messages and as the name of its event file
        command: the script, in this folder, and its arguments
        events: where its events go; the last one is ``gone``, with its exit status
        event_file: the same events, one JSON object a line
        log: an open, unbuffered file that its stderr is appended to, line by line
        path: folders to put on its PYTHONPATH

    """

    name: str
    command: list[str]
    events: Events
    event_file: Path
    log: IO[bytes]
    path: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    expected_to_go: bool = False
    last_line: str = ""

    def __post_init__(self) -> None:
        """Start the process and the thread that reads its events."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHFT_")}
        env["PYTHONPATH"] = os.pathsep.join([*self.path, *filter(None, [env.get("PYTHONPATH")])])
        env |= {"OMP_NUM_THREADS": "1", "NO_PROXY": "*", "no_proxy": "*"}
        script, *arguments = self.command
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self.logger = threading.Thread(target=self._copy_log, daemon=True)
        self.logger.start()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def pid(self) -> int:
        """Return the process's id, for callers that kill it."""
        return self.process.pid

    @property
    def step(self) -> int:
        """The last step it committed."""
        return self.seen.get("committed", {}).get("step", 0)

    def _copy_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.write(line)
            self.last_line = line.decode(errors="replace").strip() or self.last_line

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.event_file.open("w", buffering=1, encoding="utf-8") as copy:
            for line in self.process.stdout:
                if not line.endswith(b"\n"):
                    break  # it was killed while writing
                copy.write(line.decode())
                self.events.put((self, json.loads(line)))
            status = self.process.wait()
            self.logger.join(5)  # its last lines are logged before its end is reported
            gone = {"event": "gone", "at": time.monotonic(), "status": status}
            copy.write(json.dumps(gone) + "\n")
        self.events.put((self, gone))

    def send_order(self, **order: Any) -> None:
        """Send an order; if the child has ended, it is lost."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the process; its end then counts as expected."""
        self.expected_to_go = True
        self.process.kill()

    def stop(self) -> None:
        """Make sure that the process is gone, and close its pipes."""
        self.expected_to_go = True
        end(self.process)
        self.reader.join()
        self.logger.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
