"""Starts the server behind ``HTTPTransport`` and ``PeerWriter``, and withdraws what it publishes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from urllib.parse import urlsplit

from .. import _validate
from .._native import Server
from ..errors import ForkedProcess, InvalidArgument, SystemRefused, TensorferryError
from .addresses import advertised_host, listening_addresses
from .certificates import certificate_of
from .network import Network
from .rails import advertised_rails, first_card

logger = logging.getLogger("tensorferry")

#: How long a request to the server of a relay waits until something is served there.
_RELAY_PATIENCE_S = 5.0


def start(patience: float, network: Network, *, passing: bool = False, tls: bool = False) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and the host that peers reach it by.

    Args:
        patience: seconds for which a request waits until something is served
        network: where the server listens, the host that peers are given and what protects it
        passing: it lives for as long as one load: it has no port for counters, which a scraper could not know and a
            transport may have, and does not tell receivers of one another
        tls: encrypt, even if ``network`` does not ask for that

    Raises:
        SystemRefused: no port can be opened, or the system does not list its interfaces
        InvalidArgument: this host has no such interface, ``advertise`` cannot be used on it, or the certificate cannot
            be used
    """
    # First, because it can fail: a server that nobody keeps would hold its port until it is collected.
    listening = listening_addresses(network.interface)
    host = advertised_host(network.advertise, next(iter(listening), None))
    rails = advertised_rails(network.advertise, listening)
    server = Server(
        patience=patience,
        bind=next(iter(listening), None),
        also=listening[1:],
        ports=network.port,
        metrics_ports=None if passing else network.metrics_port,
        same_host=network.same_host,
        max_bandwidth=network.max_bandwidth,
        secret=network.secret,
        tls=tls or bool(network.tls),
        certificate=certificate_of(network.tls),
        swarm=network.relay and not passing,
        rails=rails,
        card=first_card(rails, network.advertise),
    )
    return server, host


def serve(timeout: timedelta, network: Network) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and its URL for peers.

    Args:
        timeout: how long a request waits until something is served
        network: as for :func:`start`

    Raises:
        SystemRefused: as for :func:`start`
        InvalidArgument: ``timeout`` is not a time to wait, or as for :func:`start`
    """
    server, host = start(_validate.patience("timeout", timeout), network)
    return server, server.url(host)


@contextlib.contextmanager
def relaying(
    network: Network, refused: Callable[[TensorferryError], object], tls: bool = False
) -> Iterator[Server | None]:
    """Within the block, has a server that serves on what this process receives, and publishes nothing itself.

    Where it cannot listen, others get nothing from here, and the block has ``None``.

    Args:
        network: as for :func:`start`
        refused: called with the reason why there is no server
        tls: as for :func:`start`
    """
    try:
        server, _ = start(_RELAY_PATIENCE_S, network, passing=True, tls=tls)
    except (SystemRefused, InvalidArgument) as e:
        refused(e)
        yield None
        return
    try:
        yield server
    finally:
        server.shutdown(0.0)


def metrics_url(server: Server, url: str) -> str:
    """Returns the URL at which a scraper finds the counters of ``server``, whose URL for peers is ``url``.

    If the server has a port for counters, the URL names that port; otherwise it lies below the random part of ``url``.

    Raises:
        ForkedProcess: this process was forked from the one that made the server
    """
    return server.metrics_url(urlsplit(url).hostname or "") or f"{url.removesuffix('checkpoint/')}metrics"


def withdraw(server: Server, timeout: timedelta) -> None:
    """Withdraws what ``server`` publishes; readers of borrowed memory have at most ``timeout`` to finish.

    A reader that takes no byte for two seconds meanwhile is cut off earlier.

    All errors but ``ForkedProcess`` are logged and not raised, so that a trainer is not stopped by them.

    Raises:
        ForkedProcess: this process was forked from the one that made the server
    """
    try:
        cut = server.withdraw(timeout.total_seconds())
    except ForkedProcess:
        raise
    except Exception:
        logger.exception("could not withdraw the checkpoint")
        return
    if cut:
        logger.warning(
            "%d transfers were cut off: their receivers stood still, or did not finish within %s", cut, timeout
        )
