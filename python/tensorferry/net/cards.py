"""The network cards of this host, as the system describes them: which lead to other hosts, how fast and how near."""

from __future__ import annotations

import os
from pathlib import Path

#: Where the kernel describes the interfaces, the devices at PCI, and which processor belongs to which node.
_INTERFACES = Path("/sys/class/net")
_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
#: Steps on the way between devices that have no bridge in common.
_FAR = 1000


def is_down(interface: str) -> bool:
    """Whether the system says that an interface is switched off, or has no link."""
    try:
        return (_INTERFACES / interface / "operstate").read_text().strip() in ("down", "lowerlayerdown", "notpresent")
    except OSError:
        return False


def is_internal(interface: str) -> bool:
    """Whether an interface leads to containers or processes of this host alone, or is a part of another one.

    That is a tunnel, a bridge without a card, and what a bond or a bridge is made of: packets are its master's.
    """
    own = _INTERFACES / interface
    if (own / "tun_flags").exists() or (own / "brport").exists() or (own / "master" / "bonding").is_dir():
        return True
    members = own / "brif"
    try:
        return members.is_dir() and not any((_INTERFACES / one.name / "device").exists() for one in members.iterdir())
    except OSError:
        # The bridge has just gone.
        return True


def cards_below(interface: str) -> list[str]:
    """Returns the interfaces that packets of ``interface`` leave by: itself, or those a bond, bridge or VLAN uses."""
    own = _INTERFACES / interface
    try:
        below = sorted(entry.name.removeprefix("lower_") for entry in own.iterdir() if entry.name.startswith("lower_"))
    except OSError:
        below = []
    # No interface lies above itself; the kernel sees to it.
    return [card for lower in below for card in cards_below(lower)] if below else [interface]


def distance(interface: str, accelerator: str | None) -> tuple[int, int]:
    """Returns how far an interface is from what this process computes with: smaller is nearer.

    Args:
        interface: its name
        accelerator: the PCI address of the accelerator, such as ``"0000:3b:00.0"``; ``None`` takes the processors that
            this process may use, if all belong to one node

    Returns:
        Whether its card is at another NUMA node, and the steps between the two devices at PCI; zeros where the system
        does not say.
    """
    near = None if accelerator is None else _resolve_or_none(_PCI / accelerator.lower())
    node = _processors_node() if near is None else _read_number(near / "numa_node")
    return min((_distance(card, near, node) for card in cards_below(interface)), default=(0, 0))


def _distance(card: str, near: Path | None, node: int) -> tuple[int, int]:
    device = _resolve_or_none(_INTERFACES / card / "device")
    if device is None:
        return (0, 0)
    own = _read_number(device / "numa_node")
    elsewhere = int(own >= 0 and node >= 0 and own != node)
    return (elsewhere, 0 if near is None else _steps(device, near))


def _steps(one: Path, other: Path) -> int:
    """Returns how many devices lie between two at PCI, by the tree in which the kernel keeps them."""
    common = len(os.path.commonpath([one, other]).split(os.sep))
    bridges = [part for part in one.parts[:common] if part.startswith("pci")]
    steps = len(one.parts) + len(other.parts) - 2 * common
    return steps if bridges else _FAR + steps


def _processors_node() -> int:
    """Returns the NUMA node of all processors that this process may use; -1 if there are several, or one in all."""
    try:
        allowed = os.sched_getaffinity(0)
        nodes = {int(path.name[4:]): _numbers(path / "cpulist") for path in _NODES.glob("node[0-9]*")}
    except (OSError, ValueError):
        return -1
    holding = [node for node, processors in nodes.items() if allowed & processors]
    return holding[0] if len(holding) == 1 and len(nodes) > 1 else -1


def _numbers(path: Path) -> set[int]:
    """Returns the numbers in a list of ranges, such as ``0-3,8``."""
    found: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read_number(path: Path) -> int:
    """Returns the number in a file of ``/sys``; -1 if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _resolve_or_none(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except OSError:
        return None
