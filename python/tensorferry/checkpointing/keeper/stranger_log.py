"""The log line about those who were refused for want of the path or the secret: one a minute at most."""

from __future__ import annotations

import logging
import time

from ..._native import Server

logger = logging.getLogger("tensorferry")

#: Seconds between two lines.
_INTERVAL_S = 60.0
#: Most addresses in a line.
_MOST = 5


class StrangerLog:
    """Says of the peers that ``server`` has refused who they are and why; not more often than once a minute."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._due = 0.0
        #: How often each address had been refused for each reason when that was last said.
        self._said: dict[tuple[str, str], int] = {}

    def look(self, now: float | None = None) -> None:
        """Writes a line if there is something new to say, and the last line was written long enough ago."""
        now = time.monotonic() if now is None else now
        if now < self._due:
            return
        self._due = now + 1.0
        known = {(peer, why): count for peer, why, count in self._server.strangers()}
        # The server forgets addresses; one that comes again begins anew.
        news = {
            one: count - (self._said.get(one, 0) if count >= self._said.get(one, 0) else 0)
            for one, count in known.items()
            if count != self._said.get(one)
        }
        if not news:
            return
        self._said, self._due = known, now + _INTERVAL_S
        named = [f"{count} of {peer} ({why})" for (peer, why), count in list(news.items())[:_MOST]]
        more = f", and of {len(news) - _MOST} other addresses" if len(news) > _MOST else ""
        logger.warning("requests were refused: %s%s", ", ".join(named), more)
