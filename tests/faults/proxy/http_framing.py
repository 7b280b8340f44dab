"""Separates the heads and the bodies of HTTP/1 responses in a stream of bytes."""

from __future__ import annotations

import re

_MAX_HEAD = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r?\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r?\n", re.IGNORECASE)
_END = re.compile(rb"\r?\n\r?\n")


class ResponseSplitter:
    """Splits the bytes of one connection's responses; a body without a length extends to the end of the connection.

    It validates nothing: bytes that are not HTTP count as body, so that the proxy forwards them as well. Responses to
    HEAD requests are treated like all others.
    """

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = 0  # bytes of the body still to come; None: until the connection ends

    def split(self, data: bytes) -> list[tuple[bool, bytes]]:
        """Returns ``(is body, bytes)`` for complete heads and pieces of bodies; an incomplete head is kept back."""
        parts: list[tuple[bool, bytes]] = []
        while data:
            if self._left == 0:
                data = self._read_head(data, parts)
                continue
            taken = data if self._left is None else data[: self._left]
            if self._left is not None:
                self._left -= len(taken)
            parts.append((True, taken))
            data = data[len(taken) :]
        return parts

    def rest(self) -> bytes:
        """Returns and forgets the bytes of an incomplete head."""
        head, self._head = self._head, b""
        return head

    def _read_head(self, data: bytes, parts: list[tuple[bool, bytes]]) -> bytes:
        self._head += data
        if not b"HTTP/1.".startswith(self._head[:7]):
            self._left = None
            return self.rest()
        end = _END.search(self._head)
        if end is None:
            if len(self._head) > _MAX_HEAD:
                self._left = None
                return self.rest()
            return b""
        rest, head = self._head[end.end() :], self._head[: end.end()]
        self._head = b""
        parts.append((False, head))
        status, length = _STATUS.match(head), _LENGTH.search(head)
        code = int(status[1]) if status else 0
        if code < 200 or code in (204, 304):
            self._left = 0
        else:
            self._left = int(length[1]) if length else None
        return rest
