"""Messages between a trainer, the process that writes its checkpoints, and the keeper of a node; torch-free.

A *handover* gives a staged state away: where each entry lies in shared memory, the control entries of the container
(manifest, pickle), and the memory itself, as descriptors. It is one message of a ``SOCK_SEQPACKET`` socket, so it
arrives whole or not at all, however its sender ends. What is longer than a few hundred bytes, the table of entries and
the control entries, is in shared memory of its own: no byte of a tensor or a pickle goes through the socket, and
neither side unpickles anything. Whoever has received a handover holds the memory, whatever becomes of the sender.

Everything else is a *message*: a kind and a few fields, as JSON. The fields and kinds belong to those who talk to each
other; this module checks sizes, descriptors and types.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._native import SharedBuffer, Table
from ..errors import InvalidArgument, ProtocolError, SystemRefused
from ..storage.container import Container

#: The version of messages: both sides must have the same.
VERSION = 2
#: Longest message in bytes. A socket of default size takes it whole.
MOST_BYTES = 64 << 10
#: Most descriptors of one message.
MOST_DESCRIPTORS = 64
#: Most control entries of a handover, and the longest name of one.
_MOST_ENTRIES, _LONGEST_NAME = 64, 1024
#: The fields in which a handover says what its descriptors hold.
_TABLE, _CONTROL = "table", "control"


@dataclass(frozen=True)
class Message:
    """A kind and a few fields.

    Attributes:
        kind: what the message says
        fields: values that JSON can express
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Handover:
    """A staged state, and what is to become of it.

    Attributes:
        kind: what is to be done with it, such as ``"save"``
        fields: values that JSON can express
        rows: the entries of the container, which lie in ``buffers``
        control: name and bytes of each control entry
        buffers: the memory; whoever has it keeps it
    """

    kind: str
    fields: dict[str, Any]
    rows: Table
    control: Sequence[tuple[str, bytes]]
    buffers: Sequence[SharedBuffer]

    def container(self, about: Sequence[tuple[str, str]] = ()) -> Container:
        """Returns the state as a container, which holds the memory.

        Args:
            about: further keys and values for its ``__metadata__``
        """
        return Container(self.rows, self.buffers, True, self.control, about)


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets for messages, which are closed in programs that a child executes."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: Message | Handover, sent: list[int] | None = None) -> None:
    """Sends one message, whole or not at all.

    Args:
        sock: the socket
        message: what is sent
        sent: gets an item once the message has gone: a signal handler may raise right after that

    Raises:
        InvalidArgument: the message is too long or has too many buffers, its fields are not JSON, or a row lies in none
            of its buffers
        SystemRefused: there is no memory for the table of a handover
        OSError: the other side is gone, or a timeout of ``sock`` passed
    """
    fields = {**message.fields, "kind": message.kind, "version": VERSION}
    if not isinstance(message, Handover):
        _send(sock, fields, [], sent)
        return
    if len(message.buffers) >= MOST_DESCRIPTORS:
        raise InvalidArgument(f"a handover has at most {MOST_DESCRIPTORS - 1} buffers, not {len(message.buffers)}")
    table = message.rows.table(message.buffers)
    contents = SharedBuffer(len(table) + sum(len(data) for _, data in message.control))
    fields[_TABLE] = len(table)
    fields[_CONTROL] = [[name, len(data)] for name, data in message.control]
    with memoryview(contents) as view:  # type: ignore[arg-type]  # a buffer, which Python 3.11 has no type for
        at = 0
        for data in (table, *(data for _, data in message.control)):
            view[at : at + len(data)] = data
            at += len(data)
    _send(sock, fields, [contents.fileno(), *(buffer.fileno() for buffer in message.buffers)], sent)


def _send(sock: socket.socket, fields: dict[str, Any], descriptors: list[int], sent: list[int] | None) -> None:
    """Sends one message: ``fields`` as JSON, and beside it the descriptors; ``sent`` as for :func:`send`."""
    try:
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"a message has a field that JSON cannot express: {e}") from e
    if len(text) > MOST_BYTES:
        raise InvalidArgument(f"a message has {len(text)} bytes; it may have {MOST_BYTES}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    # Not SIGPIPE: the other side may be gone. `extend` calls and appends in one step of the interpreter, between whose
    # steps signal handlers run: there is an item exactly if the message has gone.
    ([] if sent is None else sent).extend(map(sock.sendmsg, [[text]], [rights], [socket.MSG_NOSIGNAL]))


class OtherVersion(ProtocolError):
    """The other side runs another version of this package."""


class Arrived:
    """A handover of which only the message was looked at: its memory is not mapped, its table not read.

    It owns the descriptors until :meth:`open` or :meth:`close`.

    Attributes:
        kind: as for :class:`Handover`
        fields: as for :class:`Handover`
        nbytes: all memory that came with it, as the kernel says
        buffers: in how many pieces
        table: bytes of the table of entries
        control: bytes of the control entries, with their names

    Raises:
        ProtocolError: the message contradicts itself
    """

    def __init__(self, kind: str, fields: dict[str, Any], descriptors: Sequence[int]) -> None:
        size, listed = fields.pop(_TABLE), fields.pop(_CONTROL, None)
        if not descriptors:
            raise ProtocolError("a handover came without memory")
        self.kind, self.fields = kind, fields
        self.nbytes, self.buffers = sum(os.fstat(one).st_size for one in descriptors), len(descriptors)
        self.table = _length(size)
        self._control_lengths = _control_lengths(listed)
        self.control = sum(len(name) + length for name, length in self._control_lengths)
        self._descriptors = list(descriptors)

    def open(self) -> Handover:
        """Maps the memory and reads the table. The descriptors are closed in any case, so this can be called only once.

        Raises:
            InvalidArgument: it was opened or closed before
            ProtocolError: the table or the lengths are not valid
            SystemRefused: the memory cannot be mapped
        """
        if not self._descriptors:
            raise InvalidArgument("a handover can be opened only once, and this one was opened or closed before")
        try:
            contents, *buffers = [SharedBuffer.open(descriptor) for descriptor in self._descriptors]
        finally:
            self.close()
        ends = [self.table]
        for _, length in self._control_lengths:
            ends.append(ends[-1] + length)
        if ends[-1] > len(contents):
            raise ProtocolError("a handover is shorter than it says")
        with memoryview(contents) as view:  # type: ignore[arg-type]  # as above
            # Copied out first: the sender could change what is looked at.
            rows = Table.from_table(bytes(view[: ends[0]]), buffers)
            control = [
                (name, bytes(view[end - length : end]))
                for (name, length), end in zip(self._control_lengths, ends[1:], strict=True)
            ]
        return Handover(self.kind, self.fields, rows, control, buffers)

    def close(self) -> None:
        """Closes the descriptors. Calling it again does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def receive(sock: socket.socket) -> Message | Handover | None:
    """Receives one message.

    Returns:
        The message; ``None`` if the other side has closed the socket or is gone.

    Raises:
        ProtocolError: it is not a message, or its descriptors are not what it says
        SystemRefused: the memory of a handover cannot be mapped, or no descriptor is left for it
        OSError: the socket cannot be read, or its timeout passed
    """
    message = arrive(sock)
    return message.open() if isinstance(message, Arrived) else message


def arrive(sock: socket.socket) -> Message | Arrived | None:
    """Like :func:`receive`, but leaves the memory of a handover unmapped and its table unread.

    Raises:
        ProtocolError: it is not a message
        OtherVersion: it is one of another version
        SystemRefused: no descriptor is left for the memory of a handover
        OSError: the socket cannot be read, or its timeout passed
    """
    ancillary = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    while True:
        try:
            text, rights, flags, _ = sock.recvmsg(MOST_BYTES, ancillary, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The other side is gone and had not read everything. That is reported once, before what it had sent.
            continue
        break
    descriptors = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        if not text and not descriptors:
            return None
        if flags & socket.MSG_CTRUNC and len(descriptors) < MOST_DESCRIPTORS:
            raise SystemRefused(f"the memory of a handover cannot be received: {os.strerror(errno.EMFILE)}")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("a message is too long, or has too many descriptors")
        fields = _decode(text)
        kind = fields.pop("kind")
        if _TABLE in fields:
            arrived = Arrived(kind, fields, descriptors)
            stack.pop_all()
            return arrived
        if descriptors:
            raise ProtocolError(f"a message {kind!r} came with descriptors, and is no handover")
        return Message(kind, fields)


def _decode(text: bytes) -> dict[str, Any]:
    """Returns the fields of a message, ``kind`` among them, after checking its version."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"a message cannot be read: {e}") from e
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ProtocolError("a message does not say what it is")
    if (version := fields.pop("version", None)) != VERSION:
        raise OtherVersion(
            f"a message has version {str(version)[:20]}, not {VERSION}: run one version of tensorferry on a machine"
        )
    return fields


def _control_lengths(listed: Any) -> list[tuple[str, int]]:
    """Returns name and length of each control entry that a handover lists, after checking them."""
    if not isinstance(listed, list) or len(listed) > _MOST_ENTRIES:
        raise ProtocolError("a handover does not list its control entries")
    lengths = []
    for entry in listed:
        match entry:
            case [str(name), length] if 0 < len(name) <= _LONGEST_NAME:
                lengths.append((name, _length(length)))
            case _:
                raise ProtocolError("a control entry of a handover has no name or no length")
    return lengths


def _length(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ProtocolError("a length in a handover is no length")
    return number
