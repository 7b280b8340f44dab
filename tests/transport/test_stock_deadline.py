"""A stock source fills the time of a receive with few bytes: instructions of a pickle take longer than bytes do."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from tensorferry.errors import FetchTimeout
from tensorferry.torchft import compat

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]

GIVEN = 1 << 20
BUFFER = 1 << 20


class Stream(io.RawIOBase):
    """The body ``head`` and then ``part`` for ever; the deadline is over when the first bytes are read."""

    def __init__(self, head: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._next, self._part = head, part * (BUFFER // len(part))
        self.served = 0
        monkeypatch.setattr(time, "monotonic", lambda: float(2 * GIVEN if self.served else 0))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._next:
            self._next = self._part
        size = min(len(buffer), len(self._next))
        buffer[:size], self._next = self._next[:size], self._next[size:]
        self.served += size
        return size


@pytest.mark.parametrize("part", [b"(", b"h\0", b"X\x01\0\0\0k", b"ca\nb\n"], ids=["marks", "memo", "text", "names"])
def test_a_list_of_records_without_end_is_read_until_the_deadline(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    body = Stream(b"\x80\x02", part, monkeypatch)
    with pytest.raises(FetchTimeout, match="timed out"):
        compat._records(compat._Exact(body, GIVEN))
    assert body.served <= 2 * BUFFER


@pytest.mark.parametrize("what", ["instructions", "records"])
def test_what_was_read_is_not_worked_on_beyond_the_deadline(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = b"ctorch.distributed._serialization\n_Entry\n)\x81}(X\x03\0\0\0keyX\x01\0\0\0kX\x0a\0\0\0is_storage\x89"
    entry += b"X\x06\0\0\0lengthK\0ubq\0"
    pickled = {
        "instructions": b"\x80\x02" + b"(" * (4 * BUFFER) + b"no pickle",
        "records": b"\x80\x02](" + entry + b"h\0" * (1 << 14) + b"e.",
    }[what]
    body = Stream(pickled, b"x", monkeypatch)
    stream = compat._Exact(body, GIVEN)
    monkeypatch.setattr(compat, "_pickled", lambda _: pickled)
    body.served = 1
    with pytest.raises(FetchTimeout, match="timed out"):
        compat._records(stream)
