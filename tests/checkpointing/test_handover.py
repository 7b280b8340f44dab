"""The messages between trainer, writer and keeper: what arrives is what was sent, and nothing else is believed."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from pathlib import Path

import pytest

from tensorferry._native import SharedBuffer, Table, _copy_memory
from tensorferry.checkpointing import handover
from tensorferry.checkpointing.handover import Handover, Message
from tensorferry.errors import InvalidArgument, ProtocolError

pytestmark = pytest.mark.process


def rows_in(*entries: tuple[str, str, tuple[int, ...], int, int]) -> Table:
    rows = Table()
    for number, (name, dtype, shape, address, nbytes) in enumerate(entries):
        rows.append(None, name, dtype, shape, address, nbytes, number % 4)
    return rows


def example() -> Handover:
    first, second = SharedBuffer(5000), SharedBuffer(1 << 20, threads=2)
    memoryview(first)[:8] = struct.pack("<2f", 1.5, -2.0)
    memoryview(second)[-3:] = b"end"
    rows = rows_in(
        ("a/ä", "F32", (2, 1), first.address, 8),
        ("empty", "BF16", (0, 3), 0, 0),
        ("last", "U8", (3,), second.address + (1 << 20) - 3, 3),
        ("scalar", "I64", (), first.address + 16, 8),
    )
    return Handover("save", {"save": "x", "path": "/näme"}, rows, [("m", b"{}"), ("p", b"")], [first, second])


def passed_on(message: Message | Handover) -> Message | Handover | None:
    ours, theirs = handover.pair()
    with ours, theirs:
        handover.send(ours, message)
        return handover.receive(theirs)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_handover_arrives_as_it_was_sent_and_keeps_the_memory() -> None:
    sent = example()
    before = descriptors()
    got = passed_on(sent)
    assert isinstance(got, Handover)
    assert descriptors() == before + 2, "a descriptor for each buffer, and none beside"
    assert (got.kind, got.fields, got.control) == (sent.kind, sent.fields, sent.control)
    for column in ("names", "dtypes", "shapes", "sizes", "flags", "nbytes"):
        assert getattr(got.rows, column) == getattr(sent.rows, column), column
    del sent
    for row, data in ((0, struct.pack("<2f", 1.5, -2.0)), (2, b"end")):
        copied = SharedBuffer(16)
        _copy_memory([(got.rows.address(row), copied.address, len(data))], 2)
        assert bytes(memoryview(copied)[: len(data)]) == data
    with pytest.raises(TypeError, match="read-only"):
        memoryview(got.buffers[0])[0] = 1


def test_a_message_arrives_as_it_was_sent_and_a_closed_socket_is_none() -> None:
    assert passed_on(Message("written", {"bytes": 5, "text": "ü"})) == Message("written", {"bytes": 5, "text": "ü"})
    ours, theirs = handover.pair()
    with theirs:
        handover.send(ours, Message("one"))
        ours.close()
        assert handover.receive(theirs) == Message("one")
        assert handover.receive(theirs) is None
        with pytest.raises(OSError, match="Broken pipe"):
            handover.send(theirs, Message("two"))


def test_what_has_arrived_says_its_size_before_it_is_read_and_leaves_nothing() -> None:
    ours, theirs = handover.pair()
    with ours, theirs:
        before = descriptors()
        given = example()
        sent = sum(map(len, given.buffers))
        handover.send(ours, given)
        arrived = handover.arrive(theirs)
        assert isinstance(arrived, handover.Arrived)
        assert (arrived.table, arrived.buffers) == (len(given.rows.table(given.buffers)), 1 + len(given.buffers))
        assert arrived.control == sum(len(name) + len(data) for name, data in given.control)
        assert sent < arrived.nbytes <= sent + arrived.table + arrived.control
        arrived.close()
        with pytest.raises(InvalidArgument, match="opened only once"):
            arrived.open()
        del arrived
        given = None
        assert descriptors() == before


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"{", "cannot be read"),
        (b"[" * 50000, "cannot be read"),
        (b'{"kind":1}', "does not say what it is"),
        (b'{"kind":"x","version":1}', "version 1, not 2"),
        (b'{"kind":"x","version":2,"table":0,"control":[]}', "without memory"),
        (b"x" * (handover.MOST_BYTES + 1), "too long"),
    ],
)
def test_what_is_no_message_is_refused(text: bytes, match: str) -> None:
    ours, theirs = handover.pair()
    with ours, theirs:
        ours.send(text)
        with pytest.raises(ProtocolError, match=match):
            handover.receive(theirs)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"table": 5, "control": []}, "table of a state cannot be used"),
        ({"table": 1 << 20, "control": []}, "shorter than it says"),
        ({"table": True, "control": []}, "no length"),
        ({"table": 24, "control": [["m", 1 << 40]]}, "shorter than it says"),
        ({"table": 24, "control": [["m", -24]]}, "no length"),
        ({"table": 24, "control": [["m"]]}, "no name"),
        ({"table": 24, "control": [["m", 0]] * 65}, "does not list"),
        ({}, "no handover"),
    ],
)
def test_a_handover_that_contradicts_itself_is_refused_and_leaves_no_descriptor(fields: dict, match: str) -> None:
    ours, theirs = handover.pair()
    with ours, theirs:
        memory = SharedBuffer(4096)
        before = descriptors()
        text = json.dumps({"kind": "save", "version": handover.VERSION, **fields}).encode()
        ours.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.fileno()]))])
        with pytest.raises(ProtocolError, match=match):
            handover.receive(theirs)
        assert descriptors() == before


def test_a_descriptor_that_is_no_sealed_memory_is_refused(tmp_path: Path) -> None:
    shrinking = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinking, 4096)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4096)
    ours, theirs = handover.pair()
    with ours, theirs:
        text = json.dumps({"kind": "save", "version": handover.VERSION, "table": 24, "control": []}).encode()
        for descriptor in (shrinking, file, theirs.fileno()):
            ours.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
            with pytest.raises(ProtocolError, match="memory that cannot shrink"):
                handover.receive(theirs)
    for descriptor in (shrinking, file):
        os.close(descriptor)


def test_no_change_of_a_table_is_believed() -> None:
    buffers = [SharedBuffer(4096), SharedBuffer(64)]
    rows = rows_in(
        ("a", "F32", (2, 2), buffers[0].address, 16),
        ("bc", "U8", (64,), buffers[1].address, 64),
        ("d", "F64", (0,), 0, 0),
    )
    table = rows.table(buffers)
    places = [range(b.address, b.address + len(b)) for b in buffers]
    for at in range(len(table)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            changed = table[:at] + bytes([value]) + table[at + 1 :]
            try:
                got = Table.from_table(changed, buffers)
            except ProtocolError:
                continue
            for row, size in enumerate(got.sizes):
                inside = [p for p in places if got.address(row) in p and got.address(row) + size <= p.stop]
                assert size == 0 or inside, (at, value)
    for end in range(len(table)):
        with pytest.raises(ProtocolError):
            Table.from_table(table[:end], buffers)
    with pytest.raises(ProtocolError):
        Table.from_table(table + b"\0", buffers)
    with pytest.raises(ProtocolError, match="no buffer"):
        Table.from_table(table, buffers[:1])


def test_what_cannot_be_sent_is_refused_before_it_is() -> None:
    ours, theirs = handover.pair()
    with ours, theirs:
        for fields in ({"a": object()}, {"a": float("nan")}, {"a": "x" * handover.MOST_BYTES}):
            with pytest.raises(InvalidArgument, match="a message has"):
                handover.send(ours, Message("x", fields))
        memory = SharedBuffer(1)
        with pytest.raises(InvalidArgument, match="at most 63 buffers"):
            handover.send(ours, Handover("save", {}, rows_in(), [], [memory] * 64))
        handover.send(ours, Handover("save", {}, rows_in(), [], [memory] * 63))
        got = handover.receive(theirs)
        assert isinstance(got, Handover)
        assert len(got.buffers) == 63
