"""The log lines of heals, the first of which is seen where nobody has configured logging."""

from __future__ import annotations

import logging

logger = logging.getLogger("tensorferry")

#: Gives True to the first caller of ``next`` in this process, whichever thread that is.
_first = iter((True,))


def log_heal(message: str, *arguments: object) -> None:
    """Logs a heal at INFO; the first one of a process is also shown where logging is not configured.

    Where logging is not configured, Python shows lines from WARNING on, by ``logging.lastResort``. The first heal takes
    the same way, so that a job without any configuration shows that it has healed. No logger is changed. A handler or
    level that was set, ``logging.disable`` and ``logging.lastResort = None`` are obeyed.

    Args:
        message: the line, with placeholders as in :meth:`logging.Logger.info`
        arguments: what takes their place
    """
    logger.info(message, *arguments, stacklevel=2)
    if _nothing_is_configured() and next(_first, False):
        line = logger.makeRecord(
            logger.name,
            logging.INFO,
            __file__,
            0,
            f"tensorferry: {message} (shown once; configure logging at INFO to see all)",
            arguments,
            None,
        )
        logging.lastResort.handle(line)  # type: ignore[union-attr]


def _nothing_is_configured() -> bool:
    """Returns whether no handler, no level and no switch says what is to become of a line at INFO."""
    return (
        logging.lastResort is not None
        and not logger.hasHandlers()
        and logger.level == logging.NOTSET
        and logger.getEffectiveLevel() <= logging.WARNING  # what the root logger has, unless it was set
        and logger.manager.disable < logging.INFO
        and not logger.disabled
    )
