"""torchft 0.2.0's own format, so that a fleet can be upgraded replica by replica.

A body is a pickled list of entries and then the records in order, each storage as its raw bytes: what
``torch.distributed._serialization`` writes and reads. Sending, the storages are served straight from memory; receiving,
the pickle goes through the same allow-list as ours.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import _serialization
from torch.utils._pytree import tree_flatten

from ._native import _check_machine_has
from .allowlist import Allowed
from .errors import ConnectError, FetchTimeout, ProtocolError, SourceRefused, SystemRefused, UnsafePickle

_PROTOCOL = 2
_READ = 1 << 20
#: The longest name of a class or function in a pickle.
_LINE = 1 << 16
_MOST = 2**63 - 1


class _Parts(list[Any]):
    """The parts of a body, and what keeps their memory alive."""

    keep: Any = None


class _Recorder:
    """Takes what ``torch.serialization`` writes, without writing it."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, int]] = []

    def write_record(self, key: str, data: Any, length: int) -> None:
        self.records.append((key, data, length))

    def serialization_id(self) -> str:
        return "tensorferry"


def body(value: Any) -> list[Any]:
    """``value`` in torchft's format: bytes, and ``(address, nbytes)`` of each storage."""
    recorder = _Recorder()
    torch.serialization._save(value, recorder, pickle, _PROTOCOL, False)
    storage = torch.UntypedStorage
    entries = [_serialization._Entry(key, isinstance(data, storage), size) for key, data, size in recorder.records]
    parts = _Parts([pickle.dumps(entries, protocol=_PROTOCOL)])
    for _, data, size in recorder.records:
        if isinstance(data, storage):
            parts.append((data.data_ptr() if size else 0, size))
        else:
            parts.append(data.encode() if isinstance(data, str) else bytes(data))
    parts.keep = recorder.records
    return parts


def bodies(state: Callable[[], Any], num_chunks: int) -> Callable[[str], list[Any] | None]:
    """What a stock receiver may ask for: ``full``, ``metadata`` or the number of a chunk; ``None`` for anything else.

    Args:
        state: the state with all tensors on the host
        num_chunks: into how many chunks its leaves are dealt
    """

    def render(name: str) -> list[Any] | None:
        if name == "full":
            return body(state())
        values, spec = tree_flatten(state())
        if name == "metadata":
            return body(spec)
        chunks = [values[i::num_chunks] for i in range(num_chunks)]
        try:
            return body(chunks[int(name)])
        except (IndexError, ValueError):
            return None

    return render


class _Reader(io.RawIOBase):
    """The body of an answer, with one deadline for all of it."""

    def __init__(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, end: float) -> None:
        self._response = response
        self._connection = connection
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        # One receive at a time: a source that drips bytes must not keep us past the deadline.
        data = self._response.read1(min(len(buffer), _READ))
        buffer[: len(data)] = data
        return len(data)


class _Exact(io.BufferedReader):
    """Reads exactly what is asked for: the format has no other way to say that it was cut short.

    How much that is, the source says: never more than the machine has, and no line longer than a name can be.
    """

    _announced = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        del size
        line = super().readline(_LINE)
        if not line.endswith(b"\n"):
            raise ProtocolError(f"the source sent a name of more than {_LINE} bytes, or a part of one")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise ProtocolError(f"the source announced a record of {size} bytes")
        # The next one may be as long again: all of them together are the state.
        self._announced += size
        _check_machine_has(min(self._announced, _MOST), "what the source announced")
        data = super().read(size)
        if size > len(data):
            raise ConnectError(f"the source closed the connection with {size - len(data)} bytes of a record missing")
        return data


class _PickleModule:
    """What ``torch.serialization`` takes for the pickle module: our allow-list instead of everything."""

    def __init__(self, allowed: Allowed) -> None:
        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return allowed.find(module, name, super().find_class)

        self.Unpickler = Unpickler

    __name__ = "tensorferry.stock"


def is_stock(metadata: str) -> bool:
    """Whether ``metadata`` comes from torchft's own transport: its path has no random part.

    Asking the source would do, too, but torchft logs a traceback for every path it does not know.
    """
    try:
        url = urlsplit(metadata)
        return url.path == "/checkpoint/" and url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:  # No URL at all: the engine says what is wrong with it.
        return False


def _load(stream: _Exact, allowed: Allowed) -> Any:
    file = _serialization._PseudoZipFile()
    with warnings.catch_warnings():
        # torch lays tensors over bytes it has just read, and warns that nobody should write to bytes.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        # Its read_from would do, were it not that torch 2.8's fails on storages without bytes (pytorch#180481).
        for entry in torch._weights_only_unpickler.load(stream):
            if type(entry.length) is not int or not isinstance(entry.key, str):
                raise ProtocolError(f"the source announced a record {entry.key!r} of {entry.length!r} bytes")
            data: Any = stream.read(entry.length)
            if entry.is_storage:
                data = torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)
            file.records[entry.key] = (data, entry.length)
        return torch.serialization._load(file, None, _PickleModule(allowed), encoding="utf-8")


def receive(metadata: str, step: int, timeout: timedelta, allowed: Allowed) -> Any:
    """Fetches a state from torchft's own server.

    Raises:
        FetchTimeout, ConnectError, SourceRefused, UnsafePickle, ProtocolError: as for our own format
        SystemRefused: the source announced more than this machine has memory for
    """
    end = time.monotonic() + timeout.total_seconds()
    url = urlsplit(f"{metadata}{step}/full")
    connection = http.client.HTTPConnection(
        url.hostname or "", url.port or 80, timeout=max(timeout.total_seconds(), 1e-3)
    )
    try:
        connection.request("GET", url.path)
        with contextlib.closing(connection.getresponse()) as response:
            if response.status != 200:
                raise SourceRefused.of(response.status, response.reason)
            stream = _Exact(_Reader(response, connection, end), _READ)
            return _load(stream, allowed)
    except (SourceRefused, UnsafePickle, ConnectError, ProtocolError, SystemRefused):
        raise
    except TimeoutError as e:
        raise FetchTimeout(f"timed out: receiving step {step} from {url.netloc} took longer than {timeout}") from e
    except OSError as e:
        raise ConnectError(f"the connection to {url.netloc} broke: {e}") from e
    except Exception as e:
        raise ProtocolError(
            f"what {url.netloc} sent for step {step} cannot be read ({type(e).__name__}: {e}); if the source failed to "
            "pickle its state, the reason is in its log"
        ) from e
    finally:
        connection.close()
