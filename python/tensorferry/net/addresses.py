"""Where a transport listens, and under which name or address peers reach it."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from pathlib import Path
from typing import TypeAlias

from .. import _validate
from .._native import _interfaces, _resolve
from ..errors import ConnectError, FetchTimeout, InvalidArgument

logger = logging.getLogger("tensorferry")

#: Names as resolvers take them: others are written in punycode.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_NETWORK = re.compile(r"[0-9A-Fa-f.:]+/[0-9]+")

#: Seconds in which a name server has to say where this host's own name leads.
_NAME_PATIENCE_S = 1.0

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_address(interface: str | None) -> str | None:
    """The address of this host that ``interface`` chooses; ``None`` listens on all.

    Args:
        interface: an interface's name, an address of this host, or a network such as ``10.0.0.0/8`` one of its
            addresses is in; by default what ``TENSORFERRY_INTERFACE`` says

    Raises:
        InvalidArgument: this host has no such address
    """
    chosen = _validate.string("interface", interface or os.environ.get("TENSORFERRY_INTERFACE") or "")
    return None if not chosen else _own_address(chosen)


def port_on(listening: str | None) -> str | None:
    """Any free port of the address ``listening``, as the server takes it; ``None`` is all addresses."""
    if listening is None:
        return None
    return f"[{listening}]:0" if ":" in listening else f"{listening}:0"


def advertised_host(advertise: str | None, listening: str | None) -> str:
    """The name or address that stands in the metadata.

    Args:
        advertise: a name or an address, taken as it is, or an interface of this host or a network one of its addresses
            is in; by default what ``TENSORFERRY_ADVERTISE`` says
        listening: the only address that is listened on

    Raises:
        InvalidArgument: this can be no host's name or address, or this host has none in that network

    Returns:
        What was asked for; else the address that is listened on; else the host's name, as torchft has it, if it
        resolves to more than this machine itself within a second; else the address of the interface that leads out.
    """
    chosen = _validate.string("advertise", advertise or os.environ.get("TENSORFERRY_ADVERTISE") or "")
    if chosen:
        if _NETWORK.fullmatch(chosen) or any(name == chosen for name, _ in _interfaces()):
            return _own_address(chosen)
        address = _parse(chosen)
        if address.is_unspecified if address is not None else not _NAME.fullmatch(chosen):
            raise InvalidArgument(
                f"{_validate.brief(chosen)} cannot be advertised: a name or an address is wanted, without scheme and "
                "port, or an interface or a network of this host"
            )
        return chosen
    if listening is not None:
        return listening
    name = socket.gethostname()
    return name if _leads_here(name) else _outward_address()


def interface_speed(address: str) -> tuple[str, float] | None:
    """The interface that has ``address`` and what it is rated at, in bytes per second; ``None`` where nobody says."""
    wanted = _parse(address)
    for name, text in _interfaces():
        if _parse(text) == wanted:
            try:
                mbit = int(Path(f"/sys/class/net/{name}/speed").read_text())
            except (OSError, ValueError):  # Virtual interfaces have no speed, and say so in several ways.
                return None
            return (name, mbit * 125_000.0) if mbit > 0 else None
    return None


def _own_address(wanted: str) -> str:
    found = [(name, address) for name, text in _interfaces() if (address := _parse(text)) is not None]
    named = [address for name, address in found if name == wanted]
    if not named:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            network = None
        named = [a for _, a in found if network is not None and a.version == network.version and a in network]
    if not named:
        have = ", ".join(f"{name} {address}" for name, address in found)
        raise InvalidArgument(f"this host has no interface or address {_validate.brief(wanted)}; it has {have}")
    # IPv4 first: what a peer can reach is decided by its own addresses, and every cluster has these.
    return str(min(named, key=lambda address: (address.is_link_local, address.version)))


def _parse(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _leads_here(name: str) -> bool:
    """Whether ``name`` resolves to an address that other hosts can use, too."""
    try:
        found = _resolve(name, timeout=_NAME_PATIENCE_S)
    except FetchTimeout as e:
        logger.warning(
            "peers are given an address of this host and not its name: %s. advertise= or TENSORFERRY_ADVERTISE says "
            "what they are given, and asks nobody",
            e.reason,
        )
        return False
    except ConnectError:
        return False
    addresses = [_parse(address) for address in found]
    return any(a is not None and not a.is_loopback and not a.is_link_local for a in addresses)


def _outward_address() -> str:
    # Connecting a datagram socket sends nothing; it only chooses the interface. The addresses are reserved for
    # examples.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    addresses = [address for _, text in _interfaces() if (address := _parse(text)) is not None]
    usable = [a for a in addresses if not a.is_loopback and not a.is_link_local]
    return str(min(usable, key=lambda address: address.version)) if usable else "127.0.0.1"
