"""``Network``: how servers are reached, what protects them, and what receivers ask of their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .. import _settings, _validate
from .._native import Secret
from ..errors import InvalidArgument
from .certificates import Tls, encryption
from .secret import shared_secret

_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MOST_PORT = (1 << 16) - 1


@dataclass(frozen=True, init=False)
class Network:
    """How servers are reached, what protects them, and what receivers ask of their sources.

    Everything that has a server or receives takes one as ``network=``. What is not given, or ``None``, is read from the
    environment variable in brackets when the object is made; docs/reference/api.md lists them.

    Args:
        secret: a secret of 16 bytes or more that the sources and receivers of this job share. With it, the metadata
            alone gives no access, and a receiver unpickles nothing before the source has proved that it knows the
            secret. Stock torchft peers cannot take part; docs/reference/security.md says what it protects against.
            [``TENSORFERRY_SECRET``, or the content of the file ``TENSORFERRY_SECRET_FILE``; by default none]
        tls: encrypt what receivers fetch from here over the network, and refuse sources that do not encrypt. The
            certificate is made for each server, and its fingerprint is part of the metadata; the paths of a certificate
            and of its key in PEM form, a tuple, take the place of ``True`` where the fingerprint is to stay the same. A
            receiver without ``tls`` can fetch from encrypting sources as well as from plain ones. Stock torchft peers
            cannot take part. Shared memory between processes of one machine is not encrypted. [``TENSORFERRY_TLS``, and
            the files ``TENSORFERRY_TLS_CERTIFICATE`` and ``TENSORFERRY_TLS_KEY``; by default no]
        same_host: move the bytes through shared memory instead of the network where source and receiver run on one
            machine, in one network namespace and under one user. Both sides must agree. [``TENSORFERRY_SAME_HOST``; by
            default yes]
        relay: receivers of one state send each other what they have: a source tells its receivers of one another, and a
            receiver serves on what has come until it has all. A receive that is fast, or over soon, does without; so do
            states of less than 8 MiB, receives to an accelerator, from several sources or through shared memory, and
            those from a source with TLS to a receiver without. Ranks of one load that need the same slices bring them
            to each other. ``False`` on either side turns it off; docs/guides/healing.md says more.
            [``TENSORFERRY_RELAY``; by default yes]
        interface: listen only on this interface: its name, an address of this host, or a network (``10.0.0.0/8``) that
            contains one of its addresses; or on several, with commas between them. [``TENSORFERRY_INTERFACE``; by
            default all]
        advertise: the name or address that peers use, or one of this host's interfaces or networks; or several, with
            commas between them; docs/guides/nodes.md says what hosts with several network cards do.
            [``TENSORFERRY_ADVERTISE``; by default the address listened on, the host's name if it resolves to an address
            that other hosts can use, or the address of the interface with the default route]
        port: listen on this port, or on the first free one of a range like ``"29600-29699"``, so that a firewall can
            let peers in. [``TENSORFERRY_PORT``; by default any free port]
        metrics_port: serve ``/metrics`` and the status page, and nothing else, on this port too, so that the address
            can be written into a scraper's configuration: a port, or a range of which each server takes the first free
            one. Anyone who reaches it can read them, unencrypted. [``TENSORFERRY_METRICS_PORT``; by default there is no
            such port, and they are found below the random part of the URL alone]
        max_bandwidth: bytes per second that all receivers together may take from a server; ``None`` means no limit

    Raises:
        InvalidArgument: a value, or an environment variable, cannot be used; the message names it
    """

    secret: Secret | None
    tls: bool | tuple[str, str]
    same_host: bool
    relay: bool
    interface: tuple[str, ...]
    advertise: tuple[str, ...]
    port: tuple[int, int]
    metrics_port: tuple[int, int] | None
    max_bandwidth: int | None

    def __init__(
        self,
        *,
        secret: str | bytes | None = None,
        tls: Tls = None,
        same_host: bool | None = None,
        relay: bool | None = None,
        interface: str | None = None,
        advertise: str | None = None,
        port: int | str | None = None,
        metrics_port: int | str | None = None,
        max_bandwidth: int | None = None,
    ) -> None:
        limit = "max_bandwidth (bytes per second)"
        checked = {
            "secret": shared_secret(secret),
            "tls": encryption(tls),
            "same_host": _switch("same_host", same_host, _settings.SAME_HOST),
            "relay": _switch("relay", relay, _settings.RELAY),
            "interface": items("interface", interface or _settings.setting(_settings.INTERFACE)),
            "advertise": items("advertise", advertise or _settings.setting(_settings.ADVERTISE)),
            "port": port_range("port", port, _settings.PORT) or (0, 0),
            "metrics_port": port_range("metrics_port", metrics_port, _settings.METRICS_PORT),
            "max_bandwidth": None if max_bandwidth is None else _validate.integer(limit, max_bandwidth, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def receive_options(self) -> dict[str, Any]:
        """Returns what a receive asks of its sources, in the words of the engine."""
        return {"same_host": self.same_host, "secret": self.secret}


def network_of(
    network: Network | None,
    *,
    secret: str | bytes | None = None,
    tls: Tls = None,
    interface: str | None = None,
) -> Network:
    """Returns ``network``, or if it is ``None`` a new one with the values that users may give beside it.

    Raises:
        InvalidArgument: both are given, or one cannot be used
    """
    if network is None:
        return Network(secret=secret, tls=tls, interface=interface)
    beside = {"secret": secret, "tls": tls, "interface": interface}
    if both := [f"{name}=" for name, value in beside.items() if value is not None]:
        raise InvalidArgument(f"{both[0]} and network= exclude each other: write network=Network({both[0]}...)")
    return _validate.instance("network", network, Network, "a tensorferry.Network")


def port_range(name: str, given: int | str | None, variable: str) -> tuple[int, int] | None:
    """Returns the first and the last of the ports that a server may listen on; ``None`` if none is given.

    Args:
        name: the name of the argument, for messages
        given: a port, 0 for any, or a range like ``"29600-29699"``, both ends included; ``None`` takes the value of the
            environment variable
        variable: the name of that variable

    Raises:
        InvalidArgument: ``given`` is neither, or a range that ends before it begins
    """
    if given is None:
        name, given = variable, _settings.setting(variable) or None
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise InvalidArgument(
            f'{name} must be a port number or a range like "29600-29699", not {_validate.brief(given)}'
        )
    found = _PORTS.fullmatch(str(given))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, _MOST_PORT + 1)
    # A range that begins with "any port" means nothing.
    if not first <= last <= _MOST_PORT or (first == 0 and last != 0):
        raise InvalidArgument(
            f'{name} must be a number from 1 to {_MOST_PORT}, 0 for any port, or a range like "29600-29699", not '
            f"{_validate.brief(given)}"
        )
    return first, last


def items(name: str, given: str | None) -> tuple[str, ...]:
    """Returns the items of the argument ``name``, a list with commas; one item is returned as it is."""
    chosen = _validate.string(name, given or "")
    items = tuple(item.strip() for item in chosen.split(",")) if chosen else ()
    if len(items) == 1:
        return (chosen,)
    if not all(items):
        raise InvalidArgument(f"{name}={_validate.brief(chosen)} must have an address between any two commas")
    return items


def _switch(name: str, asked: bool | None, variable: str) -> bool:
    """Returns what the argument ``name`` says or, if it is ``None``, the variable, without which it is yes."""
    if asked is not None:
        return _validate.boolean(name, asked)
    value = _settings.setting(variable) or "1"
    if value not in ("0", "1"):
        raise InvalidArgument(f"{variable} must be 0 or 1, not {_validate.brief(value)}")
    return value == "1"
