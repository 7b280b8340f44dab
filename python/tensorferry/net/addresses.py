"""The address on which a server listens, and the name or address under which peers reach it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from .. import _validate
from .._native import _interfaces, _resolve
from ..errors import ConnectError, FetchTimeout, InvalidArgument, SystemRefused

logger = logging.getLogger("tensorferry")

#: Host names as resolvers accept them; other names have to be written in punycode.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_NETWORK = re.compile(r"[0-9A-Fa-f.:]+/[0-9]+")

#: Seconds that a name server has to resolve this host's own name.
_NAME_PATIENCE_S = 1.0

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(interface: Sequence[str]) -> list[str]:
    """Returns the addresses of this host that the items of ``interface`` select, each once; none means all addresses.

    Args:
        interface: names of interfaces, addresses of this host, or networks such as ``10.0.0.0/8`` that contain one of
            its addresses

    Raises:
        InvalidArgument: this host has no such address
        SystemRefused: the system does not list its interfaces
    """
    return list(dict.fromkeys(map(_own_address, interface)))


def advertised_host(advertise: Sequence[str], listening: str | None) -> str:
    """Returns the name or address of this host for the metadata.

    Args:
        advertise: names or addresses, used as they are; or interfaces of this host, or networks that contain one of its
            addresses; only the first one counts here
        listening: the only address on which the server listens; ``None`` if it listens on all

    Raises:
        InvalidArgument: ``advertise`` cannot be the name or address of a host, or this host has no address in that
            network
        SystemRefused: the system does not list its interfaces, or has no descriptor or thread for a lookup

    Returns:
        The first of these that there is: what ``advertise`` selects; ``listening``; the host's name, as in torchft, if
        it resolves within a second to an address that other hosts can use; the address of the interface with the
        default route; any address that is neither loopback nor link-local; ``127.0.0.1``.
    """
    chosen = next(iter(advertise), "")
    if chosen:
        if (own := address_of_own(chosen)) is not None:
            return own
        address = _parse(chosen)
        if address.is_unspecified if address is not None else not _NAME.fullmatch(chosen):
            raise InvalidArgument(
                f"{_validate.brief(chosen)} cannot be advertised: give a name or an address, without scheme and port, "
                "or an interface or a network of this host"
            )
        return chosen
    if listening is not None:
        return listening
    name = socket.gethostname()
    return name if _resolves_for_peers(name) else _outward_address()


def address_of_own(wanted: str) -> str | None:
    """Returns the address of this host that ``wanted`` selects, if it is an interface or a network; else ``None``.

    Raises:
        InvalidArgument: it is a network in which this host has no address
        SystemRefused: the system does not list its interfaces
    """
    if _NETWORK.fullmatch(wanted) or any(name == wanted for name, _ in interfaces()):
        return _own_address(wanted)
    return None


def interfaces() -> list[tuple[str, str]]:
    """Returns name and address of each interface that has one, loopback included, whether it is up or not.

    Raises:
        SystemRefused: the system does not list them
    """
    try:
        return _interfaces()
    except OSError as e:
        raise SystemRefused(f"the interfaces of this host cannot be listed: {e}") from e


def resolved(name: str) -> list[str]:
    """Returns the addresses of the host called ``name``, as a transport looks its own name up.

    Raises:
        FetchTimeout: no name server has answered within a second
        ConnectError: the name is not known
        SystemRefused: the system refuses a thread for the lookup
    """
    return _resolve(name, timeout=_NAME_PATIENCE_S)


def interface_speed(address: str) -> tuple[str, float] | None:
    """Returns the name of the interface with ``address`` and its rated speed in bytes per second.

    ``None`` if no interface has that address, or the system does not report a speed.

    Raises:
        SystemRefused: the system does not list its interfaces
    """
    wanted = _parse(address)
    for name, text in interfaces():
        if _parse(text) == wanted:
            mbit = link_speed(name)
            return (name, mbit * 125_000.0) if mbit > 0 else None
    return None


def link_speed(interface: str) -> int:
    """Returns the rated speed of an interface in Mbit/s; 0 if the system does not report one."""
    try:
        return max(int(Path(f"/sys/class/net/{interface}/speed").read_text()), 0)
    except (OSError, ValueError):  # Virtual interfaces have no speed; drivers report that in several ways.
        return 0


def _own_address(wanted: str) -> str:
    """Returns the address of this host that ``wanted`` selects: by interface, by address or by network."""
    own = [(name, address) for name, text in interfaces() if (address := _parse(text)) is not None]
    named = [address for name, address in own if name == wanted]
    if not named:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            network = None
        named = [a for _, a in own if network is not None and a.version == network.version and a in network]
    if not named:
        have = ", ".join(f"{name} {address}" for name, address in own)
        raise InvalidArgument(f"this host has no interface or address {_validate.brief(wanted)}; it has {have}")
    # IPv4 first: whether a peer can reach an address depends on the peer's own, and every cluster has IPv4.
    return str(min(named, key=lambda address: (address.is_link_local, address.version)))


def _parse(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _resolves_for_peers(name: str) -> bool:
    """Whether ``name`` resolves to an address that other hosts can use: neither loopback nor link-local."""
    try:
        found = resolved(name)
    except FetchTimeout as e:
        logger.warning(
            "the metadata has an address of this host instead of its name: %s. Set advertise= or TENSORFERRY_ADVERTISE "
            "to choose the name or address without a lookup",
            e.reason,
        )
        return False
    except ConnectError:
        return False
    addresses = [_parse(address) for address in found]
    return any(a is not None and not a.is_loopback and not a.is_link_local for a in addresses)


def _outward_address() -> str:
    """Returns the address of this host from which packets leave for other networks; loopback if there is none."""
    # Connecting a datagram socket sends nothing; it only selects the interface. The target addresses are reserved for
    # documentation.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                # Another address would be taken for the right one.
                raise SystemRefused(f"no address of this host can be looked up: {e}") from e
            continue
    addresses = [address for _, text in interfaces() if (address := _parse(text)) is not None]
    usable = [a for a in addresses if not a.is_loopback and not a.is_link_local]
    return str(min(usable, key=lambda address: address.version)) if usable else "127.0.0.1"
