"""The addresses of this host that receivers may use: one for each network card, and the one by which they begin."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidArgument, SystemRefused
from .addresses import address_of_own, interfaces, link_speed

logger = logging.getLogger("tensorferry")

#: Where the kernel describes the interfaces.
_INTERFACES = Path("/sys/class/net")


def advertised_rails(advertise: Sequence[str], listening: list[str]) -> list[tuple[str, int]]:
    """Returns addresses of this host, each with the speed of its link in Mbit/s, 0 where that is not known.

    Receivers that fetch enough to gain by it connect to all of them, and those that do not work are left alone.

    Args:
        advertise: what ``advertised_host`` was given. One item means that only this one is used
        listening: the addresses on which the server listens; empty if it listens on all

    Returns:
        Without ``advertise``, the addresses listened on or, where that are all, one of each interface that is up, is
        neither loopback nor a bridge of this host's own, and has one that other hosts can use; none where there are not
        at least two.

    Raises:
        InvalidArgument: ``advertise`` lists what is neither an address nor an interface or network of this host
    """
    if len(advertise) == 1 or (not advertise and len(listening) == 1):
        return []
    try:
        found = _listed(advertise or listening) if advertise or listening else _usable_addresses()
    except SystemRefused as e:
        # The address in the metadata is enough.
        logger.warning("receivers are told of one address only: %s", e)
        return []
    return found if advertise or len(found) > 1 else []


def first_card(rails: list[tuple[str, int]], advertise: Sequence[str]) -> str | None:
    """Returns the address of the card by which receivers begin; ``None`` where there is nothing to choose.

    The processes of a host begin at different cards, by their ``LOCAL_RANK``. Cards of less than half of the fastest
    one's speed are left out, those of unknown speed are not.

    Args:
        rails: what :func:`advertised_rails` has returned
        advertise: as there; what names addresses has chosen
    """
    if len(rails) < 2 or advertise:
        return None
    fastest = max(mbit for _, mbit in rails)
    fast = [address for address, mbit in rails if mbit == 0 or 2 * mbit >= fastest]
    rank = os.environ.get("LOCAL_RANK", "")
    return fast[int(rank) % len(fast) if rank.isdecimal() else 0]


def _listed(wanted: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the addresses that the items of ``advertise=`` select; a name is that of the first item alone."""
    names = {address: name for name, address in interfaces()}
    found = {}
    for number, item in enumerate(wanted):
        address = address_of_own(item) or item
        try:
            ipaddress.ip_address(address)
        except ValueError:
            if number == 0:
                continue
            raise InvalidArgument(
                f"advertise lists {item!r}, which must be an address, or an interface or a network of this host: only "
                "the first item may be a name"
            ) from None
        found[address] = link_speed(names[address]) if address in names else 0
    return list(found.items())


def _usable_addresses() -> list[tuple[str, int]]:
    """Returns one address of each interface that leads to other hosts, an IPv4 address where it has one."""
    best: dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address] = {}
    for name, text in interfaces():
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.is_loopback or address.is_link_local or _is_internal(name) or _is_down(name):
            continue
        if name not in best or address.version < best[name].version:
            best[name] = address
    return [(str(address), link_speed(name)) for name, address in best.items()]


def _is_down(interface: str) -> bool:
    """Whether the system says that an interface is switched off, or has no link."""
    try:
        return (_INTERFACES / interface / "operstate").read_text().strip() in ("down", "lowerlayerdown", "notpresent")
    except OSError:
        return False


def _is_internal(interface: str) -> bool:
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
