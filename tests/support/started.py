"""Processes that a test starts end with it, also if it fails in the middle."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def ended_with_the_block() -> Iterator[None]:
    """Kills what this process has started within the block, by ``subprocess``, and not ended by the end of it."""
    started: list[subprocess.Popen[Any]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    with mock.patch.object(subprocess, "Popen", Noted):
        try:
            yield
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                    for pipe in (process.stdin, process.stdout, process.stderr):
                        if pipe is not None:
                            pipe.close()
