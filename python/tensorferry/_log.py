"""The name of the package in front of its warnings, where Python would print them without any."""

import logging


def _name(record: logging.LogRecord) -> bool:
    """Puts the name in front of a line that no handler will format.

    Where logging is not configured, ``logging.lastResort`` prints warnings as bare text, so that a reader of the job's
    log could not tell whose they are. Handlers that somebody has added say it in their own format.
    """
    if not logger.hasHandlers():
        record.msg = f"tensorferry: {record.msg}"
    return True


logger = logging.getLogger("tensorferry")
logger.addFilter(_name)
