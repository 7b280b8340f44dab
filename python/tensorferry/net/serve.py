"""The server behind a door: opened from what its user says, and withdrawn without harm to the trainer."""

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
    """A server that serves nothing yet, and its URL as peers see it.

    Args:
        timeout: how long a request waits for something to be served
        options: where it listens, what it is called and what protects it

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: ``timeout`` is no time to wait, or this host cannot be advertised as was asked
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
    """Withdraws what ``server`` publishes; readers of borrowed memory may finish for at most ``timeout``.

    Whatever goes wrong is logged and not raised.

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
