"""Runs a script of this folder as the ranks of a job, and reads what they print."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import forked

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "frameworks"
FRAMEWORKS = Path(sys.prefix) / "frameworks"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class _WithFrameworks(forked.Popen):
    """Forks from a process that has imported Lightning and accelerate, too."""

    modules = (*forked.MODULES, "lightning.pytorch", "lightning.fabric", "accelerate")
    path = os.pathsep.join(filter(None, [str(FRAMEWORKS), os.environ.get("PYTHONPATH")]))


_STARTED: set[str] = set()


class Process:
    """A script that prints lines of a word and a value.

    The first process of each example is a new interpreter, as users start it. The others are forked.

    Args:
        script: its name in this folder, or its path
        arguments: what it is given
        folder: where it runs; where the tests do, if it is ``None``
        errors: a file for what it writes to stderr, which otherwise gets in between the lines on stdout
        environment: what is added to the environment
    """

    def __init__(
        self,
        script: str | Path,
        *arguments: object,
        folder: Path | None = None,
        errors: IO[str] | None = None,
        **environment: object,
    ) -> None:
        path = os.pathsep.join(filter(None, [str(FRAMEWORKS), os.environ.get("PYTHONPATH")]))
        added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
        command = [str(HERE / script), *map(str, arguments)]
        examples = {part for part in command if part.startswith(str(EXAMPLES))} - _STARTED
        _STARTED.update(examples)
        asked = " ".join(command)
        forks = _WithFrameworks if "lightning_" in asked or "accelerate_" in asked else forked.Popen
        self.process = (subprocess.Popen if examples else forks)(
            [sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env=os.environ | {key: str(value) for key, value in added.items()},
            stdout=subprocess.PIPE,
            stderr=errors or subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, word: str, timeout: float = 100) -> str:
        """Returns the value of the next line that begins with ``word``."""
        while (line := self._lines.get(timeout=timeout)) is not None:
            first, _, value = line.strip().partition(" ")
            if first == word:
                return value
        raise AssertionError(f"it ended without {word!r}:\n" + "".join(self.output)[-6000:])

    def end(self, timeout: float = 60) -> None:
        """Waits for the end, which must be a success, and for the last of the output."""
        assert self.process.wait(timeout) == 0, "".join(self.output)[-6000:]
        self._reader.join(20)

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._reader.join(20)
        self.process.stdout.close()


@contextlib.contextmanager
def job(script: str | Path, *arguments: object, world: int = 2, folder: Path | None = None, **environment: object):
    """Starts ``world`` ranks in ``folder``, as torchrun does; all of them are killed at the end.

    ``environment`` is added to theirs.
    """
    about = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": "test",
        "GROUP_RANK": 0,
        **environment,
    }
    ranks = [Process(script, *arguments, folder=folder, **about, RANK=rank, LOCAL_RANK=rank) for rank in range(world)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
