"""Uploads from a process that was forked after requests were made: the threads behind them do not exist there.

Such a process starts one that makes the requests, torch-free and so within a moment, and sends it the parts through a
pipe. So no second copy of the state is made, and what is uploaded is the memory as it was at the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ... import errors
from ...errors import ConnectError, StoreRefused
from .client import client_paths
from .place import ObjectPlace

#: Seconds after the deadline in which that process says that it has passed.
_LATE_S = 10.0
_PROGRAM = """
import sys
sys.path += sys.argv[1:]
from tensorferry.storage.objects.forked import main
main()
"""


def put_elsewhere(
    place: ObjectPlace, parts: Iterable[Any], nbytes: int, size: int, at_a_time: int, report: Callable[[], None]
) -> None:
    """Uploads an object by a process of its own.

    Args:
        place: the object, in an operation that has begun
        parts: its parts
        nbytes: its length
        size: the length of each part but the last one
        at_a_time: how many parts are under way at a time
        report: called after each part; its exception ends the upload

    Raises:
        InvalidArgument: the options have a ``credential_provider``, which cannot be sent
        TensorferryError: the store does not answer in time, or refuses; or the process was ended
        OSError: the system starts no process
        Exception: what ``report`` raises
    """
    left = place.calls().deadline.left()
    package = str(Path(__file__).resolve().parents[3])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, package, *client_paths()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(left + _LATE_S, process.kill)
    late.daemon = True
    late.start()
    try:
        # If it has ended or failed, its answer says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pickle.dump((ObjectPlace(place.url, place.options, left), nbytes, size, at_a_time), pipe)
            for part in parts:
                pipe.write(part)
                report()
        told = process.stdout.read()
    except BaseException:
        # The pipe is closed: it removes the parts that it has uploaded.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(left, _LATE_S))
        process.kill()
        raise
    finally:
        late.cancel()
        process.stdout.close()
        code = process.wait()
    try:
        answer = json.loads(told)
    except ValueError:
        raise ConnectError(
            f"{place}: writing it: the process that makes the requests has ended with code {code}"
        ) from None
    if answer is not None:
        raise errors.named(*answer)


class _Pipe:
    """The parts that come through a pipe."""

    def __init__(self, pipe: BinaryIO, nbytes: int, size: int) -> None:
        self._pipe, self._left, self._size = pipe, nbytes, size

    def __iter__(self) -> _Pipe:
        return self

    def __next__(self) -> bytes:
        if not self._left:
            raise StopIteration
        wanted = min(self._size, self._left)
        data = self._pipe.read(wanted)
        if len(data) != wanted:
            raise StoreRefused("the process that saves has ended")
        self._left -= wanted
        return data


def main() -> None:
    """Uploads what comes through the standard input, and says on the standard output how that went."""
    from .upload import put_parts

    # Ctrl-C is for the process that saves, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What else is printed goes elsewhere.
    answers = os.dup(1)
    os.dup2(2, 1)
    answer: tuple[str, str] | None = None
    try:
        place, nbytes, size, at_a_time = pickle.load(sys.stdin.buffer)
        put_parts(place.begun(), _Pipe(sys.stdin.buffer, nbytes, size), nbytes, size, at_a_time)
    except Exception as e:  # Whatever it is, the process that saves learns it.
        answer = errors.name_of(e), errors.message_of(e)
    os.write(answers, json.dumps(answer).encode())
