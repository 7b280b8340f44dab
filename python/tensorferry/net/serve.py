"""Starts the server behind ``HTTPTransport`` and ``PeerWriter``, and withdraws what it publishes."""

from __future__ import annotations

import logging
from datetime import timedelta

from .. import _validate
from .._native import Server
from ..errors import ForkedProcess
from .addresses import advertised_host, port_on
from .options import ServerOptions

logger = logging.getLogger("tensorferry")


def serve(timeout: timedelta, options: ServerOptions) -> tuple[Server, str]:
    """Starts a server that serves nothing yet; returns it and its URL for peers.

    Args:
        timeout: how long a request waits until something is served
        options: where the server listens, the host that peers are given and what protects it

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: ``timeout`` is not a time to wait, or ``options.advertise`` cannot be used on this host
    """
    server = Server(
        patience=_validate.patience("timeout", timeout),
        bind=port_on(options.listening),
        same_host=options.same_host,
        max_bandwidth=options.max_bandwidth,
        secret=options.secret,
        tls=options.tls,
    )
    return server, server.url(advertised_host(options.advertise, options.listening))


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
