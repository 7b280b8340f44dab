"""Simulated hosts: network namespaces with shaped links between them, made and removed by the tests."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import child

if TYPE_CHECKING:
    from collections.abc import Iterator

_AGENT = Path(__file__).with_name("agent.py")
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

    def __init__(self, host: str, role: str, program: Path = _AGENT, **options: Any) -> None:
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

    def kill(self) -> None:
        """Kills the process, as a loss of power would."""
        self.process.kill()
        self.process.wait(_PATIENCE_S)

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
        sys.stderr.write(self.process.stderr.read())
        self.process.stderr.close()


class Network:
    """A receiver's host with a link of its own to each of several sources' hosts.

    Source `i` is 10.77.i.2, and the receiver 10.77.i.1 on that link; what sources send is limited to `mbit` each.
    """

    def __init__(self, sources: int, mbit: int) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        # One that was killed may have left others.
        prefix = f"tf{secrets.token_hex(3)}"
        self.receiver = f"{prefix}r"
        self.sources = [f"{prefix}s{i}" for i in range(sources)]
        self._made: list[str] = []
        try:
            for host in (self.receiver, *self.sources):
                run("ip", "netns", "add", host)
                self._made.append(host)
                run("ip", "-n", host, "link", "set", "lo", "up")
            for i, host in enumerate(self.sources):
                run("ip", "-n", host, "link", "add", "uplink", "type", "veth", "peer", "name", f"down{i}")
                run("ip", "-n", host, "link", "set", f"down{i}", "netns", self.receiver)
                for end, name, address in ((host, "uplink", 2), (self.receiver, f"down{i}", 1)):
                    run("ip", "-n", end, "address", "add", f"10.77.{i}.{address}/24", "dev", name)
                    run("ip", "-n", end, "link", "set", name, "up")
                shape = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms")
                run("tc", "-n", host, "qdisc", "add", "dev", "uplink", "root", *shape)
        except BaseException:
            self.remove()
            raise

    def cut(self, source: int) -> None:
        """Takes the link of that source down, without closing any connection."""
        run("ip", "-n", self.sources[source], "link", "set", "uplink", "down")

    def remove(self) -> None:
        for host in self._made:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=_PATIENCE_S, check=False)
        self._made = []


class Links:
    """Two hosts with a link for each of `mbits` between them, limited to so many Mbit/s both ways.

    On link `i` the source is 10.79.i.1, and the receiver 10.79.i.2. The default route leads over link 0.
    """

    def __init__(self, mbits: list[int]) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        prefix = f"tl{secrets.token_hex(3)}"
        self.source, self.receiver = f"{prefix}s", f"{prefix}r"
        self._made: list[str] = []
        try:
            for host in (self.source, self.receiver):
                run("ip", "netns", "add", host)
                self._made.append(host)
                run("ip", "-n", host, "link", "set", "lo", "up")
            for i, mbit in enumerate(mbits):
                peer = ("type", "veth", "peer", "name", f"card{i}", "netns", self.receiver)
                run("ip", "-n", self.source, "link", "add", f"card{i}", *peer)
                shape = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms")
                for host, last in ((self.source, 1), (self.receiver, 2)):
                    run("ip", "-n", host, "address", "add", f"10.79.{i}.{last}/24", "dev", f"card{i}")
                    run("ip", "-n", host, "link", "set", f"card{i}", "up")
                    run("tc", "-n", host, "qdisc", "add", "dev", f"card{i}", "root", *shape)
            for host, gateway in ((self.source, 2), (self.receiver, 1)):
                run("ip", "-n", host, "route", "add", "default", "via", f"10.79.0.{gateway}")
        except BaseException:
            self.remove()
            raise

    def cut(self, link: int) -> None:
        """Takes a link down, without closing any connection."""
        run("ip", "-n", self.source, "link", "set", f"card{link}", "down")

    def swallow(self, link: int) -> None:
        """Lets hardly anything of what the source sends over a link arrive."""
        shape = ("tbf", "rate", "1kbit", "burst", "1kb", "latency", "1ms")
        run("tc", "-n", self.source, "qdisc", "replace", "dev", f"card{link}", "root", *shape)

    def remove(self) -> None:
        for host in self._made:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=_PATIENCE_S, check=False)
        self._made = []
