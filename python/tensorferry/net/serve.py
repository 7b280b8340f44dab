"""The server behind a door: opened from what its user says, and withdrawn without harm to the trainer."""

from __future__ import annotations

import logging
from datetime import timedelta

from .. import _validate
from .._native import Secret, Server
from ..errors import ForkedProcess
from .addresses import advertised_host, listening_address, port_on

logger = logging.getLogger("tensorferry")


def serve(
    timeout: timedelta,
    *,
    secret: Secret | None,
    tls: bool,
    same_host: bool,
    interface: str | None,
    advertise: str | None,
    max_bandwidth: int | None,
) -> tuple[Server, str]:
    """A server that serves nothing yet, and its URL as peers see it.

    Args:
        timeout: how long a request waits for something to be served
        secret: what who asks has to know; ``None`` if nothing
        tls: as for ``HTTPTransport``
        same_host: whether processes of this machine may fetch through shared memory
        interface: as for ``HTTPTransport``
        advertise: as for ``HTTPTransport``
        max_bandwidth: as for ``HTTPTransport``

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: an argument cannot be used; it is named
    """
    patience = _validate.patience("timeout", timeout)
    if max_bandwidth is not None:
        max_bandwidth = _validate.whole("max_bandwidth (bytes per second)", max_bandwidth, 1)
    listening = listening_address(interface)
    server = Server(
        patience=patience,
        bind=port_on(listening),
        same_host=same_host,
        max_bandwidth=max_bandwidth,
        secret=secret,
        tls=_validate.boolean("tls", tls),
    )
    return server, server.url(advertised_host(advertise, listening))


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
