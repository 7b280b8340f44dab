"""Ending what a server publishes, without harm to the trainer."""

from __future__ import annotations

import logging
from datetime import timedelta

from ._native import Server
from .errors import ForkedProcess

logger = logging.getLogger("tensorferry")


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
