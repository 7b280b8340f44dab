"""A process of the node that is connected to a keeper, and what it has given and borrowed."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Set
from pathlib import Path

from ..handover import Handover, Message
from .generations import Kept
from .kept_memory import KeptMemory
from .snapshot import Key


class Client:
    """A connection from a process of this node."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.since = time.monotonic()
        self.has_spoken = False
        self.queue: collections.deque[Message | Handover] = collections.deque()
        #: Snapshots that it gave; it is notified when one of them is released.
        self.given: set[Kept[KeptMemory]] = set()
        #: Snapshots that it reads.
        self.borrowed: dict[Key, Kept[KeptMemory]] = {}
        self.is_open = True
        #: How many of its snapshots are being looked at.
        self.arriving = 0
        #: Whether it has promised not to write to what it gave.
        self.has_left = False
        #: Whether it was disconnected, and so may write to what it gave.
        self.is_cast_out = False
        #: A descriptor that shows when the process ends; ``None`` where there is none, as in another container.
        self.process: int | None = None
        with contextlib.suppress(OSError):
            self.process = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether the process is gone, and so cannot write to what it gave; true if it is in another container.

        A process for which this one had no descriptor left is gone once the system knows of none with its number.
        """
        if self.process is None:
            if not self.pid:
                return True
            try:
                os.kill(self.pid, 0)
            except OSError as e:
                return e.errno == errno.ESRCH
            return False
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))

    def can_write_to(self, files: Set[tuple[int, int]]) -> bool:
        """Whether the process has mapped one of ``files``, as it has not after ``exec``.

        It counts as true if the system does not show what it has mapped.
        """
        try:
            lines = Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            return True
        for line in lines:
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, minor = (int(number, 16) for number in device.split(":"))
            if (os.makedev(major, minor), int(inode)) in files:
                return True
        return False

    def forget(self) -> None:
        """Closes what is left when the process is gone, or need not be watched."""
        if self.process is not None:
            os.close(self.process)
            self.process = None
