"""Processes forked from one that has imported torch and the package, which would take each of them 3 s of CPU.

They are children of this process, as if it had started them: the process between them exits, and the system gives its
child to this one, which has asked for orphans until then.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

PR_SET_CHILD_SUBREAPER = 36

#: Run in the process that the others are forked from. What stands behind the loop runs in each of them, at the top
#: level, so that it ends like a script that the interpreter was given.
TEMPLATE = """
import atexit, gc, json, os, socket, sys, time, types
import tensorferry, torch
from tensorferry import HTTPTransport

# The collector of a child leaves alone what was imported: it would write to, and so copy, every page of that.
# The end of an interpreter collects it, all the same.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

def _next():
    orders = socket.socket(fileno=int(sys.argv.pop()))
    while True:
        head, given, _, _ = socket.recv_fds(orders, 8, 3)
        if not head:
            os._exit(0)
        length = int.from_bytes(head, "big")
        order = b""
        while len(order) < length:
            order += orders.recv(length - len(order))
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                orders.sendall(pid.to_bytes(8, "big"))
                os._exit(0)
            orders.close()
            while os.getppid() == between:
                time.sleep(0.001)
            for number, descriptor in enumerate(given):
                os.dup2(descriptor, number)
            os.closerange(3, max(given) + 1)
            return json.loads(order)
        for descriptor in given:
            os.close(descriptor)
        os.waitpid(between, 0)
        orders.sendall(b"+")

_order = _next()
os.environ.clear()
os.environ.update(_order["environment"])
# Those of the template may be of files, which can seek.
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(_order["script"], "<string>", "exec"), sys.modules["__main__"].__dict__)
"""


class Forked(subprocess.Popen):
    """A process that runs a script, with pipes for what it prints and, where it listens, for its input."""

    def __init__(self, pid: int, stdin: IO[str] | None, stdout: IO[str], stderr: IO[str]) -> None:
        self.args, self.pid, self.returncode = ["forked"], pid, None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.encoding, self.errors, self.text_mode = None, None, True
        self._child_created, self._communication_started, self._input = True, False, None
        self._closed_child_pipe_fds, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25


class Template:
    """The process that others are forked from; it ends with this one."""

    def __init__(self, folder: Path, python: tuple[str | Path, ...]) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*python, "-c", TEMPLATE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                pass_fds=[theirs.fileno()],
            )

    def end(self) -> None:
        self._orders.close()
        self._process.wait()

    def fork(self, script: str, environment: dict[str, str], listens: bool) -> Forked:
        reading, writing = os.pipe() if listens else (os.open(os.devnull, os.O_RDONLY), None)
        (out, theirs), (err, errors) = os.pipe(), os.pipe()
        order = json.dumps({"script": script, "environment": environment}).encode()
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._orders, [len(order).to_bytes(8, "big")], [reading, theirs, errors])
            self._orders.sendall(order)
            answer = b""
            while len(answer) < 9:
                part = self._orders.recv(9 - len(answer))
                assert part, "the process that others are forked from is gone"
                answer += part
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            for descriptor in (reading, theirs, errors):
                os.close(descriptor)
        stdin = None if writing is None else open(writing, "w")  # noqa: SIM115
        return Forked(int.from_bytes(answer[:8], "big"), stdin, open(out), open(err))


_TEMPLATES: dict[tuple[int, tuple[str | Path, ...]], Template] = {}


def fork(
    script: str,
    environment: dict[str, Any],
    listens: bool = False,
    python: tuple[str | Path, ...] = (sys.executable,),
) -> Forked:
    """Returns a process that runs ``script``; the first call for an interpreter starts the one it is forked from."""
    template = os.getpid(), python
    if template not in _TEMPLATES:
        _TEMPLATES[template] = started = Template(Path(__file__).parent, python)
        atexit.register(lambda: started.end() if template[0] == os.getpid() else None)
    return _TEMPLATES[template].fork(script, environment, listens)
