"""Processes in simulated hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import child

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE_S = 60


class NotPermitted(Exception):
    """The machine does not permit network namespaces or shaped links."""


def run(*command: str) -> None:
    """Runs a command; that it fails means that it is not permitted."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")


#: Brings a forked process into the host `sys.argv[1]`, as `ip netns exec` does, with the host's own view of /sys.
_ENTER = """
import ctypes, os, runpy, sys
_HOST, _PROGRAM = sys.argv[1:3]
_NEW_MOUNTS, _NEW_NETWORK, _SLAVES = 0x20000, 0x40000000, 0x84000
_LIBC = ctypes.CDLL(None, use_errno=True)

def _must(name, *arguments):
    if getattr(_LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

_network = os.open(f"/run/netns/{_HOST}", os.O_RDONLY | os.O_CLOEXEC)
_must("setns", _network, _NEW_NETWORK)
os.close(_network)
_must("unshare", _NEW_MOUNTS)
_must("mount", None, b"/", None, _SLAVES, None)
_must("umount2", b"/sys", 2)
_must("mount", _HOST.encode(), b"/sys", b"sysfs", 0, None)
sys.argv[:3] = [_PROGRAM]
sys.path.insert(0, os.path.dirname(_PROGRAM))
runpy.run_path(_PROGRAM, run_name="__main__")
"""


class Agent:
    """A process in one of the hosts; requests and answers are lines of JSON."""

    def __init__(self, host: str, role: str, program: Path, **options: Any) -> None:
        self.process = child.fork_script(_ENTER, host, program, role, json.dumps(options), listens=True)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the process's answers until it closes its output."""
        for line in self.process.stdout:
            # Gloo of torch 2.8 writes to stdout too.
            if not line.startswith("[Gloo]"):
                yield json.loads(line)

    def next(self) -> dict[str, Any]:
        return next(self.lines())

    def ask(self, **request: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.next()

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_PATIENCE_S)
        self.process.stdout.close()
        sys.stderr.write(self.process.stderr.read())
        self.process.stderr.close()
