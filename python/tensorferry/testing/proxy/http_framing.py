"""Tells heads and bodies of HTTP/1 answers apart in a stream of bytes."""

from __future__ import annotations

import re

__all__ = ["AnswerSplitter"]

_MAX_HEAD = 64 << 10
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r?\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r?\n", re.IGNORECASE)
_END = re.compile(rb"\r?\n\r?\n")


class AnswerSplitter:
    """Follows one connection's answers; a body without a length goes on to the end of the connection.

    It is no validator: what is not HTTP counts as body, so that a proxy forwards it all the same. Answers to HEAD are
    not told from others.
    """

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = 0  # of the body; None: until the connection ends

    def split(self, data: bytes) -> list[tuple[bool, bytes]]:
        """``(is body, bytes)`` for whole heads and pieces of bodies; the start of a head waits for its end."""
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
        """The start of a head that did not end."""
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
