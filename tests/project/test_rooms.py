"""Which module of the engine may use which, and what the rooms of the package load.

    crates     wire <- core <- py
    engine     server  client  file
               publication
               swarm
               payload  same_host  trust
               memory
    ground     report  cancel  error  fork  priority

A module may use its own room and those below it. Unit tests inside a file may use any room: a client is tested against
a server. For the package import-linter holds the same rule, in pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tensorferry

if TYPE_CHECKING:
    from collections.abc import Iterator

RUST = Path(__file__).resolve().parents[2] / "rust"
ENGINE_SOURCES = RUST / "core/src"
PACKAGE = Path(tensorferry.__file__).parent

#: The rooms of the crate ``tensorferry_core``. A room is a folder or a file below ``src``.
ENGINE: dict[str, frozenset[str]] = {
    "error": frozenset(),
    "fork": frozenset(),
    "priority": frozenset(),
    "sync": frozenset(),
    "report": frozenset({"error"}),
    "cancel": frozenset({"fork", "sync"}),
    "memory": frozenset({"error", "sync"}),
    "trust": frozenset({"error"}),
    "payload": frozenset({"error", "memory"}),
    "same_host": frozenset({"error", "memory"}),
    "swarm": frozenset({"error", "memory", "payload"}),
    "publication": frozenset({"error", "sync", "memory", "payload", "trust", "swarm"}),
    "server": frozenset(
        {"error", "report", "fork", "sync", "memory", "payload", "trust", "same_host", "swarm", "publication"},
    ),
    "client": frozenset(
        {"error", "report", "cancel", "fork", "priority", "sync", "memory", "payload", "trust", "same_host", "swarm"},
    ),
    "file": frozenset({"error", "cancel", "sync", "memory", "payload"}),
}


def code_of(text: str) -> str:
    """Returns Rust code without comments, string literals and unit tests, its lines where they were."""
    text = re.split(r"^#\[cfg\(test\)\]$", text, maxsplit=1, flags=re.MULTILINE)[0]
    literal_or_comment = r"""//[^\n]*|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)'"""
    return re.sub(literal_or_comment, lambda found: "''" + "\n" * found[0].count("\n"), text, flags=re.DOTALL)


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


def uses(depth: int, text: str) -> Iterator[tuple[int, str]]:
    """Yields lines, and the rooms that they name by ``crate::`` or through ``super::``, of a module ``depth`` deep."""
    code = code_of(text)
    for found in re.finditer(r"\b(?:crate|super)(?:::super)*\b(?=::)", code):
        if found[0].startswith("super") and found[0].count("super") < depth:
            continue
        line = code.count("\n", 0, found.start()) + 1
        rest = code[found.end() + 2 :]
        if rest.startswith("{"):
            yield from ((line, name) for name in members(code, found.end() + 2))
        elif name := re.match(r"\w+", rest):
            yield line, name[0]


def offences(path: Path, text: str) -> list[str]:
    """Returns the uses in a source that the rule forbids; ``path`` is relative to the sources of the engine."""
    parts = path.with_suffix("").parts
    room = parts[0]
    if room == "lib":  # It gives the public names to other crates.
        return []
    depth = len(parts) - (parts[-1] == "mod")
    return [
        f"{path}:{line}: {room} uses {other}"
        for line, other in uses(depth, text)
        if other != room and other not in ENGINE[room]
    ]


def test_every_module_of_the_engine_uses_only_what_is_below_it() -> None:
    sources = [path.relative_to(ENGINE_SOURCES) for path in ENGINE_SOURCES.rglob("*.rs")]
    assert len(sources) > 40
    assert {path.with_suffix("").parts[0] for path in sources} == {*ENGINE, "lib"}
    assert [found for path in sources for found in offences(path, (ENGINE_SOURCES / path).read_text())] == []


def loaded_by(statements: str) -> set[str]:
    """Returns the modules that a process has loaded after these statements."""
    report = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.process
def test_storage_net_and_the_ground_know_no_torch() -> None:
    found = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = [
        "_native",
        *(
            ".".join(path.parts)
            for path in found
            if path.name not in ("__init__", "__main__")
            and (len(path.parts) == 1 or path.parts[0] in ("net", "storage"))
        ),
    ]
    assert {"net.addresses", "storage.commits", "errors", "_native"} <= set(names)
    loaded = loaded_by("\n".join(f"import tensorferry.{name}" for name in names))
    assert "torch" not in loaded
    assert "numpy" not in loaded


@pytest.mark.process
def test_the_package_loads_neither_torch_nor_the_native_module() -> None:
    loaded = loaded_by(
        "import tensorferry; tensorferry.__version__; dir(tensorferry); tensorferry.errors.InvalidArgument"
    )
    assert "tensorferry.errors" in loaded
    assert not {"torch", "tensorferry._native"} & loaded


def test_all_unsafe_code_of_the_binding_is_in_one_room() -> None:
    root = RUST / "py/src"
    found = {path for path in root.rglob("*.rs") if re.search(r"\bunsafe\b", code_of(path.read_text()))}
    assert {path.relative_to(root).parts[0] for path in found} == {"memory"}
