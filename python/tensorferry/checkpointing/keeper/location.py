"""Where a folder really is: two machines that call it the same mean the same folder only if this is the same, too.

A folder on a disk of this machine is named by the machine, the file system and the path in it; one on a file server by
the server and the path there. So the path ``/ckpt`` of two machines with disks of their own, or of two containers with
volumes of their own, is two locations, and one that both have mounted from one server is a single location.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ESCAPED = re.compile(rb"\\([0-7]{3})")
#: File systems whose mounts name the server and what it exports, so that all machines give a folder one name. Any other
#: counts as a disk of this machine: at worst, a checkpoint is loaded from the disk although it is in memory elsewhere.
_SERVED = frozenset({
    b"ceph", b"cifs", b"fuse.ceph", b"fuse.glusterfs", b"fuse.juicefs", b"glusterfs", b"gpfs", b"lustre", b"nfs",
    b"nfs4", b"panfs", b"smb3", b"wekafs",
})  # fmt: skip


@dataclass(frozen=True)
class _Mount:
    """A line of ``mountinfo``."""

    device: bytes
    root: bytes
    point: bytes
    kind: bytes
    source: bytes

    def path_of(self, path: bytes) -> bytes | None:
        """Returns where ``path`` is in the file system; ``None`` if it is not below this mount."""
        below = self.point.rstrip(b"/")
        if path != self.point and not path.startswith(below + b"/"):
            return None
        return self.root.rstrip(b"/") + path[len(below) :]


def location_of(path: str | os.PathLike[str]) -> str:
    """Returns 16 hexadecimal digits for the folder in which the checkpoint's folder ``path`` lies.

    They are the same in another process, here or on another machine, if that has the same folder there, and otherwise
    differ. Where the system does not say what is mounted, no two calls return the same.
    """
    folder = os.fsencode(os.path.dirname(os.path.realpath(path)))
    try:
        # Looking at it has it mounted, where that is left to the first use.
        os.path.exists(folder)
        mounts = [_parse_mount(line) for line in _MOUNTS.read_bytes().splitlines()]
    except (OSError, ValueError, IndexError):
        return secrets.token_hex(8)
    found, inside = None, b""
    for mount in mounts:
        there = mount.path_of(folder)
        # A later mount at the same place hides an earlier one.
        if there is not None and (found is None or len(mount.point) >= len(found.point)):
            found, inside = mount, there
    if found is None:
        return secrets.token_hex(8)
    names = [b"", found.source] if found.kind in _SERVED else [machine(), found.device]
    return hashlib.sha256(b"\0".join([*names, inside or b"/"])).hexdigest()[:16]


@functools.cache
def machine() -> bytes:
    """Returns what no other running system has, and all processes and containers of this one have.

    Where the system does not say, each process has another.
    """
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return secrets.token_bytes(16)


def _parse_mount(line: bytes) -> _Mount:
    """Returns the mount that a line of ``/proc/self/mountinfo`` describes."""
    before, _, after = line.partition(b" - ")
    fields, kinds = before.split(b" "), after.split(b" ")
    return _Mount(fields[2], _plain(fields[3]), _plain(fields[4]), kinds[0], _plain(kinds[1]))


def _plain(text: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), text)
