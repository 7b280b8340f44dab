"""The addresses of this host that receivers may use besides the one in the metadata: one for each network card."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path

from ..errors import InvalidArgument, SystemRefused
from .addresses import address_of_own, interfaces, link_speed, wanted_addresses

logger = logging.getLogger("tensorferry")

#: Where the kernel describes the interfaces.
_INTERFACES = Path("/sys/class/net")


def advertised_rails(advertise: str | None, listening: str | None) -> list[tuple[str, int]]:
    """Returns addresses of this host, each with the speed of its link in Mbit/s, 0 where that is not known.

    Receivers that fetch enough to gain by it connect to all of them, and those that do not work are left alone.

    Args:
        advertise: what ``advertised_host`` was given. A list names the addresses; one item means that only this one is
            used
        listening: the only address on which the server listens; ``None`` if it listens on all

    Returns:
        Without ``advertise``, an address of each interface that is up, is neither loopback nor a bridge of this host's
        own, and has one that other hosts can use; none where there are not at least two.

    Raises:
        InvalidArgument: ``advertise`` lists what is neither an address nor an interface or network of this host
    """
    wanted = wanted_addresses(advertise)
    if listening is not None or len(wanted) == 1:
        return []
    try:
        found = _listed(wanted) if wanted else _usable_addresses()
    except SystemRefused as e:
        # The address in the metadata is enough.
        logger.warning("receivers are told of one address only: %s", e)
        return []
    return found if wanted or len(found) > 1 else []


def _listed(wanted: list[str]) -> list[tuple[str, int]]:
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
        if address.is_loopback or address.is_link_local or _is_internal(name):
            continue
        if name not in best or address.version < best[name].version:
            best[name] = address
    return [(str(address), link_speed(name)) for name, address in best.items()]


def _is_internal(interface: str) -> bool:
    """Whether an interface leads to containers or processes of this host alone: a bridge without a card, a tunnel."""
    own = _INTERFACES / interface
    if (own / "tun_flags").exists():
        return True
    members = own / "brif"
    return members.is_dir() and not any((_INTERFACES / member.name / "device").exists() for member in members.iterdir())
