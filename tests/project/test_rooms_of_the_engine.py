"""The rooms of the Rust crates and which of them may use which: without a test, the architecture would erode.

Unit tests inside a file may use any room: a client is tested against a server.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

RUST = Path(__file__).resolve().parents[2] / "rust"
CORE = RUST / "core" / "src"

# Each room of `tensorferry_core` with those it may use. A room is a folder or a file below `src`, and `lib.rs` is the
# door: it may use all of them.
ROOMS: dict[str, set[str]] = {
    "error": set(),
    "fork": set(),
    "priority": set(),
    "report": set(),
    "cancel": {"fork"},
    "memory": {"error"},
    "trust": {"error"},
    "payload": {"error", "memory"},
    "same_host": {"error", "memory"},
    "publication": {"error", "memory", "payload", "trust"},
    "server": {"error", "report", "fork", "memory", "payload", "trust", "same_host", "publication"},
    "client": {"error", "report", "cancel", "fork", "priority", "memory", "payload", "trust", "same_host"},
    "file": {"error", "cancel", "memory", "payload"},
}


def code_of(text: str) -> str:
    """Returns `text` without comments, string literals and unit tests."""
    text = re.split(r"^#\[cfg\(test\)\]$", text, maxsplit=1, flags=re.MULTILINE)[0]
    literal_or_comment = r"""//[^\n]*|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)'"""
    return re.sub(literal_or_comment, "''", text)


def members(code: str, at: int) -> Iterator[str]:
    """Returns the first names of the items in the braces that open at `code[at]`."""
    depth, begin = 0, at + 1
    for index in range(at, len(code)):
        depth += {"{": 1, "}": -1}.get(code[index], 0)
        if (depth == 1 and code[index] == ",") or depth == 0:
            if name := re.match(r"\s*(\w+)", code[begin:index]):
                yield name[1]
            begin = index + 1
        if depth == 0:
            return


def rooms_used(module: tuple[str, ...], text: str) -> set[str]:
    """Returns the rooms that the file of the module `crate::<module>` names, by `crate::` or through `super::`."""
    code, used = code_of(text), set()
    for path in re.finditer(r"\b(?:crate|super)(?:::super)*\b(?=::)", code):
        supers = path[0].count("super")
        if path[0].startswith("super") and supers < len(module):
            continue
        rest = code[path.end() + 2 :]
        if rest.startswith("{"):
            used.update(members(code, path.end() + 2))
        elif name := re.match(r"\w+", rest):
            used.add(name[0])
    return used


def module_of(path: Path) -> tuple[str, ...]:
    """`client/remote/mod.rs` is the module `client::remote`, `client/lane.rs` is `client::lane`."""
    parts = path.relative_to(CORE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


def offences(path: Path, text: str) -> list[str]:
    module = module_of(path)
    room = module[0]
    allowed = ROOMS[room] | {room}
    return [f"{path.relative_to(RUST)}: {room} -> {used}" for used in sorted(rooms_used(module, text) - allowed)]


def test_every_room_is_listed() -> None:
    found = {path.stem for path in CORE.iterdir()} - {"lib"}
    assert found == set(ROOMS)
    assert all(needed <= ROOMS.keys() for needed in ROOMS.values())


def test_no_room_uses_one_above_it_and_no_two_one_another() -> None:
    found = [path for path in CORE.rglob("*.rs") if path != CORE / "lib.rs"]
    assert len(found) > 40
    assert [offence for path in found for offence in offences(path, path.read_text())] == []
    # The allowed uses must have no cycle, whether or not the files make use of all of them.
    order: list[str] = []
    while len(order) < len(ROOMS):
        free = [room for room, needed in ROOMS.items() if room not in order and needed <= set(order)]
        assert free, f"a circle among {sorted(ROOMS.keys() - set(order))}"
        order += free


@pytest.mark.parametrize(
    ("file", "line", "used"),
    [
        ("client/lane.rs", "use crate::server::Server;", "server"),
        ("client/remote/open.rs", "use crate::{error::Error, publication::{Lease, Store}};", "publication"),
        ("file/read.rs", "let cancel = crate::client::Cancel::new();", "client"),
        ("memory/arena.rs", "use super::super::payload::{Layout, Extent};", "payload"),
        ("memory/mod.rs", "pub(crate) use super::publication::Store;", "publication"),
        ("error.rs", "use super::{fork::without_fork};", "fork"),
    ],
)
def test_an_offence_is_found(file: str, line: str, used: str) -> None:
    room = module_of(CORE / file)[0]
    assert offences(CORE / file, line) == [f"core/src/{file}: {room} -> {used}"]
    assert offences(CORE / file, f"// {line}\n#[cfg(test)]\nmod tests {{ {line} }}") == []


def dependencies(crate: str) -> set[str]:
    manifest = tomllib.loads((RUST / crate / "Cargo.toml").read_text())
    return set(manifest["dependencies"])


def test_the_format_does_no_io_and_the_engine_knows_no_python() -> None:
    assert not dependencies("wire") & {"tensorferry-core", "tokio", "hyper", "libc", "rustix", "socket2", "pyo3"}
    assert "pyo3" not in dependencies("core")
    assert not {name for name in dependencies("core") if "python" in name or name == "tensorferry-py"}
    for path in (RUST / "wire" / "src").rglob("*.rs"):
        found = re.findall(r"\b(?:tokio|pyo3|unsafe|std::(?:net|fs|os|process|thread))\b", code_of(path.read_text()))
        assert found == [], path
    for path in CORE.rglob("*.rs"):
        assert "pyo3" not in code_of(path.read_text()), path
