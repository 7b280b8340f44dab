"""Starts the server behind ``HTTPTransport`` and ``PeerWriter``, and withdraws what it publishes."""

from __future__ import annotations

import logging
from datetime import timedelta

from .. import _validate
from .._native import Server
from ..errors import ForkedProcess, SystemRefused
from .addresses import advertised_host, port_on
from .options import ServerOptions

logger = logging.getLogger("tensorferry")


def start(patience: float, options: ServerOptions, port: int = 0) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and the host that peers reach it by.

    Args:
        patience: seconds for which a request waits until something is served
        options: where the server listens, the host that peers are given and what protects it
        port: the port to listen on; 0 is any free one

    Raises:
        SystemRefused: the port cannot be opened
        InvalidArgument: ``options.advertise`` cannot be used on this host
    """

    def server(bind: str | None) -> Server:
        return Server(
            patience=patience,
            bind=bind,
            same_host=options.same_host,
            max_bandwidth=options.max_bandwidth,
            secret=options.secret,
            tls=options.tls,
        )

    host = advertised_host(options.advertise, options.listening)
    bind = port_on(options.listening)
    if not port:
        return server(bind), host
    if bind is not None:
        return server(f"{bind.rpartition(':')[0]}:{port}"), host
    try:
        return server(f"[::]:{port}"), host
    except SystemRefused:
        # A system without IPv6; or the port is taken, which is found once more.
        return server(f"0.0.0.0:{port}"), host


def serve(timeout: timedelta, options: ServerOptions) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and its URL for peers.

    Args:
        timeout: how long a request waits until something is served
        options: as for :func:`start`

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: ``timeout`` is not a time to wait, or ``options.advertise`` cannot be used on this host
    """
    server, host = start(_validate.patience("timeout", timeout), options)
    return server, server.url(host)


def withdraw(server: Server, timeout: timedelta) -> None:
    """Withdraws what ``server`` publishes; readers of borrowed memory have at most ``timeout`` to finish.

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
        logger.warning("%d transfers were cut off: they did not finish within %s", cut, timeout)
