"""Starts the server behind ``HTTPTransport`` and ``PeerWriter``, and withdraws what it publishes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from urllib.parse import urlsplit

from .. import _validate
from .._native import Server
from ..errors import ForkedProcess, SystemRefused
from .addresses import advertised_host
from .options import ServerOptions
from .rails import advertised_rails, first_card

logger = logging.getLogger("tensorferry")

#: How long a request to the server of a relay waits until something is served there.
_RELAY_PATIENCE_S = 5.0


def start(patience: float, options: ServerOptions, swarm: bool = False) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and the host that peers reach it by.

    Args:
        patience: seconds for which a request waits until something is served
        options: where the server listens, the host that peers are given and what protects it
        swarm: tell receivers of one another, so that they send each other what is published

    Raises:
        SystemRefused: no port can be opened, or the system does not list its interfaces
        InvalidArgument: ``options.advertise`` cannot be used on this host
    """
    # First, because it can fail: a server that nobody keeps would hold its port until it is collected.
    listening = options.listening
    host = advertised_host(options.advertise, next(iter(listening), None))
    rails = advertised_rails(options.advertise, listening)
    server = Server(
        patience=patience,
        bind=next(iter(listening), None),
        also=listening[1:],
        ports=options.ports,
        metrics_ports=options.metrics_ports,
        same_host=options.same_host,
        max_bandwidth=options.max_bandwidth,
        secret=options.secret,
        tls=options.tls,
        certificate=options.certificate,
        swarm=swarm,
        rails=rails,
        card=first_card(rails, options.advertise),
    )
    return server, host


def serve(timeout: timedelta, options: ServerOptions, swarm: bool = False) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and its URL for peers.

    Args:
        timeout: how long a request waits until something is served
        options: as for :func:`start`
        swarm: as for :func:`start`

    Raises:
        SystemRefused: as for :func:`start`
        InvalidArgument: ``timeout`` is not a time to wait, or ``options.advertise`` cannot be used on this host
    """
    server, host = start(_validate.patience("timeout", timeout), options, swarm)
    return server, server.url(host)


@contextlib.contextmanager
def relaying(options: ServerOptions, refused: Callable[[SystemRefused], object]) -> Iterator[Server | None]:
    """Within the block, has a server that serves on what this process receives, and publishes nothing itself.

    Without a port, others get nothing from here, and the block has ``None``.

    Args:
        options: as for :func:`start`
        refused: called with the reason why there is no port

    Raises:
        InvalidArgument: as for :func:`start`
    """
    try:
        server, _ = start(_RELAY_PATIENCE_S, options)
    except SystemRefused as e:
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
