"""Runs a script in a process of its own, which is killed at the end of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import forked

PRELUDE = '''
import gc, os, signal, sys, threading, time, traceback
from datetime import timedelta
import torch
import tensorferry
from tensorferry import HTTPTransport, Network

# A job started in the background inherits an ignored SIGINT, and Python then leaves it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = timedelta(seconds=120)
STATE = {"w": torch.arange(1000.0), "o": {1, 2}, "step": 3}

def open_pair(**options):
    return HTTPTransport(LONG, 2, **options), HTTPTransport(LONG, 2, **options)

def send_and_receive(source, target, step, state=STATE):
    source.send_checkpoint([1], step, state, LONG)
    received = target.recv_checkpoint(0, source.metadata(), step, timedelta(seconds=30))
    assert torch.equal(received["w"], state["w"]), received
    return received

def start_waiting(target, source):
    def wait():
        try:
            target.recv_checkpoint(0, source.metadata(), 99, LONG)
        except BaseException as error:
            print("receive ended:", type(error).__name__, flush=True)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.5)
    return thread

def in_fork(work):
    """Calls work in a forked child, which then exits: with 0, or with 1 and a traceback if work raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid

def exit_code(pid):
    """Waits until a child has ended and returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def stuck_reader(source):
    import socket, urllib.parse
    parts = urllib.parse.urlsplit(source.metadata())
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    reader.connect(("127.0.0.1", parts.port))
    reader.sendall(f"GET {parts.path}1.safetensors HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n".encode())
    assert reader.recv(1 << 16)
    return reader
'''


def fork_script(
    script: str, *arguments: object, listens: bool = False, python: tuple[str | Path, ...] = (sys.executable,)
) -> subprocess.Popen[str]:
    """Starts a script in a process that is forked from one of ``python`` which has imported torch and the package."""
    return forked.fork(script, dict(os.environ), *arguments, listens=listens, python=python)


def run_forked(
    script: str, *arguments: object, within: float = 90, python: tuple[str | Path, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """Runs a script as :func:`fork_script` does, to its end."""
    process = fork_script(script, *arguments, python=python)
    try:
        out, err = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Child:
    """A process for scripts: a new interpreter, or with ``forks`` a forked one, which takes a tenth of the time."""

    def __init__(self, forks: bool = False) -> None:
        self._forks = forks
        self.process: subprocess.Popen[str] | None = None

    def start(self, script: str, listens: bool = False, to_the_end: bool = False) -> subprocess.Popen[str]:
        """Starts a script; with ``to_the_end`` a forked interpreter is torn down behind it, as any other is."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        script = PRELUDE + textwrap.dedent(script)
        if self._forks:
            self.process = forked.fork(script, environment, listens=listens, to_the_end=to_the_end)
            return self.process
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parent,
        )
        return self.process

    def run(self, script: str, within: float = 90, to_the_end: bool = False) -> str:
        """Runs a script, which must exit with 0 within ``within`` seconds, and returns its output."""
        self.start(script, to_the_end=to_the_end)
        return self.finish(within)

    def finish(self, within: float, returncode: int = 0) -> str:
        assert self.process
        out, err = self.process.communicate(timeout=within)
        assert self.process.returncode == returncode, f"{self.process.returncode}\n{out}\n{err}"
        for bad in ("panicked", "Fatal Python error", "Segmentation fault", "PanicException", "core dumped"):
            assert bad not in err, err
        return out

    def wait_for(self, line: str) -> None:
        assert self.process
        assert self.process.stdout
        for printed in self.process.stdout:
            if printed.strip() == line:
                return
        raise AssertionError(f"ended before it said {line!r}: {self.process.communicate(timeout=10)}")

    def interrupt(self) -> float:
        """Sends Ctrl-C a second after the script prints "ready"; returns the seconds until it prints "interrupted"."""
        assert self.process
        self.wait_for("ready")
        time.sleep(1)
        sent = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.wait_for("interrupted")
        return time.monotonic() - sent

    def end(self) -> None:
        if self.process:
            self.process.kill()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe:
                    pipe.close()
            self.process.wait()
