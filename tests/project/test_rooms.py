"""Which module may use which, in both languages. Without a test the architecture would erode.

    command    __main__
    doors      torchft  dcp  checkpointing  megatron  frameworks  torchtitan  cli  testing
    rooms      state
               pickles
               storage -> net      memory
    ground     errors  _validate  _native  _fork  _reentry  _gc  _rebuild  _first_use  _settings  _log

    crates     wire <- core <- py
    engine     server  client  file
               publication
               swarm
               payload  same_host  trust
               memory
    ground     report  cancel  error  fork  priority

A module may use its own package and everything below it, floors skipped or not: doors need rooms, rooms need the rooms
below, and nothing needs a door. In Python, imports inside functions and those for type checkers count like others. In
Rust, unit tests inside a file may use any room: a client is tested against a server.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import tensorferry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RUST = Path(__file__).resolve().parents[2] / "rust"

GROUND = frozenset(
    {"errors", "_validate", "_native", "_fork", "_reentry", "_gc", "_rebuild", "_first_use", "_settings", "_log"}
)
ROOMS: dict[str, frozenset[str]] = {
    "net": GROUND,
    "memory": GROUND,
    "storage": GROUND | {"net"},
    "pickles": GROUND | {"net", "memory", "storage"},
    "state": GROUND | {"net", "memory", "storage", "pickles"},
}
DOORS: dict[str, frozenset[str]] = {
    "torchft": frozenset(),
    "dcp": frozenset(),
    "checkpointing": frozenset(),
    "megatron": frozenset({"dcp"}),
    "cli": frozenset({"checkpointing", "dcp", "megatron", "torchft"}),
    "frameworks": frozenset({"dcp", "torchft"}),
    "torchtitan": frozenset({"dcp", "frameworks"}),
    "testing": frozenset({"torchft"}),
}

#: The rooms of the crate ``tensorferry_core``. A room is a folder or a file below ``src``.
ENGINE: dict[str, frozenset[str]] = {
    "error": frozenset(),
    "fork": frozenset(),
    "priority": frozenset(),
    "report": frozenset({"error"}),
    "cancel": frozenset({"fork"}),
    "memory": frozenset({"error"}),
    "trust": frozenset({"error"}),
    "payload": frozenset({"error", "memory"}),
    "same_host": frozenset({"error", "memory"}),
    "swarm": frozenset({"error", "memory"}),
    "publication": frozenset({"error", "memory", "payload", "trust", "swarm"}),
    "server": frozenset({"error", "report", "fork", "memory", "payload", "trust", "same_host", "swarm", "publication"}),
    "client": frozenset(
        {"error", "report", "cancel", "fork", "priority", "memory", "payload", "trust", "same_host", "swarm"},
    ),
    "file": frozenset({"error", "cancel", "memory", "payload"}),
}


class Language(NamedTuple):
    """One tree of sources with its rooms.

    Attributes:
        root: the folder of the sources
        may_use: each room with the others that its modules may use; ``""`` is the package itself
        modules: finds the sources below a root: the module's names, outermost first, and its file
        uses: yields line and module, as dotted names, of each use of the package in a module's text; is given the
            module's names, its file, its text and the names of all modules
    """

    root: Path
    may_use: Mapping[str, frozenset[str]]
    modules: Callable[[Path], dict[tuple[str, ...], Path]]
    uses: Callable[[tuple[str, ...], Path, str, frozenset[str]], Iterator[tuple[int, str]]]


def python_modules(root: Path) -> dict[tuple[str, ...], Path]:
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return {**found, ("_native",): root / "_native.pyi"}


def python_uses(module: tuple[str, ...], path: Path, text: str, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["tensorferry", *module]
            above = node.level - (path.name == "__init__.py")
            start = package[: len(package) - above] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            targets = [
                joined if (joined := f"{base}.{alias.name}").removeprefix("tensorferry.") in known else base
                for alias in node.names
            ]
        else:
            continue
        for target in targets:
            if target == "tensorferry" or target.startswith("tensorferry."):
                yield node.lineno, target.removeprefix("tensorferry").removeprefix(".")


def rust_modules(root: Path) -> dict[tuple[str, ...], Path]:
    """`client/remote/mod.rs` is the module `client::remote`, `client/lane.rs` is `client::lane`."""
    found = {}
    for path in root.rglob("*.rs"):
        parts = path.relative_to(root).with_suffix("").parts
        found[parts[:-1] if parts[-1] in ("mod", "lib") else parts] = path
    return found


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


def rust_uses(module: tuple[str, ...], path: Path, text: str, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yields the rooms that are named by `crate::` or through `super::`."""
    del path, known
    code = code_of(text)
    for found in re.finditer(r"\b(?:crate|super)(?:::super)*\b(?=::)", code):
        if found[0].startswith("super") and found[0].count("super") < len(module):
            continue
        line = code.count("\n", 0, found.start()) + 1
        rest = code[found.end() + 2 :]
        if rest.startswith("{"):
            yield from ((line, name) for name in members(code, found.end() + 2))
        elif name := re.match(r"\w+", rest):
            yield line, name[0]


PACKAGE = Language(
    root=Path(tensorferry.__file__).parent,
    may_use={
        **dict.fromkeys(GROUND, GROUND),
        **ROOMS,
        **{door: GROUND | ROOMS.keys() | others for door, others in DOORS.items()},
        # The package itself: its public names, which it imports when they are used.
        "": GROUND | ROOMS.keys() | DOORS.keys(),
        "__main__": frozenset({"cli"}),
    },
    modules=python_modules,
    uses=python_uses,
)
CORE = Language(
    root=RUST / "core" / "src",
    # `lib.rs` gives the public names to other crates.
    may_use={**ENGINE, "": frozenset(ENGINE)},
    modules=rust_modules,
    uses=rust_uses,
)
LANGUAGES = {"python": PACKAGE, "rust": CORE}


@functools.cache
def uses_in(
    uses: Callable[..., Iterator[tuple[int, str]]], names: tuple[str, ...], path: Path, text: str, known: frozenset[str]
) -> tuple[tuple[int, str], ...]:
    """Returns what ``uses`` yields. A text that was read before, as most of a copied tree is, is not parsed again."""
    return tuple(uses(names, path, text, known))


def offences(language: Language, root: Path) -> list[str]:
    """Returns the uses below ``root`` that the rule forbids."""
    found = []
    modules = language.modules(root)
    known = frozenset(".".join(names) for names in modules)
    for names, path in modules.items():
        room = names[0] if names else ""
        if room not in language.may_use:
            continue  # test_every_module_is_in_a_room says so, once.
        for line, target in uses_in(language.uses, names, path.relative_to(root), path.read_text(), known):
            other = target.partition(".")[0]
            if other != room and other not in language.may_use[room]:
                found.append(f"{path.relative_to(root)}:{line}: {room or 'the package'} uses {target or 'it'}")
    return sorted(found)


def homeless(language: Language, root: Path) -> list[str]:
    """Returns a report of each package or module below ``root`` that is in no room."""
    rooms = {names[0] if names else "" for names in language.modules(root)}
    table = "ENGINE" if language is CORE else "DOORS, or to ROOMS or GROUND if doors share it,"
    where = f"{table} in tests/project/test_rooms.py, and to the table of rooms in docs/explanation/architecture.md"
    return [f"`{room}` is in no room: add it to {where}" for room in sorted(rooms - language.may_use.keys())]


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_every_module_uses_only_what_is_below_it(language: Language) -> None:
    assert len(language.modules(language.root)) > 40
    assert offences(language, language.root) == []


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_every_module_is_in_a_room(language: Language) -> None:
    assert homeless(language, language.root) == []
    # Doors of the package may be still to come; the engine has no room that is not there.
    rooms = {names[0] if names else "" for names in language.modules(language.root)}
    assert language is PACKAGE or rooms == language.may_use.keys()


def test_a_package_without_a_room_is_reported_once(tmp_path: Path) -> None:
    for name in ("mailbox/__init__.py", "mailbox/post.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("from ..dcp import FileReader\n")
    (tmp_path / "_native.pyi").touch()
    assert offences(PACKAGE, tmp_path) == []
    (report,) = homeless(PACKAGE, tmp_path)
    assert report.startswith("`mailbox` is in no room: add it to DOORS")


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_the_rule_itself_has_no_circle(language: Language) -> None:
    left = {room: set(below - {room}) for room, below in language.may_use.items() if room not in GROUND}
    done = set(GROUND) if language is PACKAGE else set()
    while left:
        free = {room for room, below in left.items() if below <= done}
        assert free, f"a circle among {sorted(left)}"
        done |= free
        left = {room: below for room, below in left.items() if room not in free}


@pytest.mark.parametrize(
    ("language", "module", "line", "what"),
    [
        ("python", "state/tree.py", "from ..torchft import compat", "state uses torchft.compat"),
        ("python", "state/tree.py", "def f():\n    from ..dcp.reader import SliceReader", "state uses dcp.reader"),
        ("python", "pickles/allowlist.py", "from ..state.tree import Flat", "pickles uses state.tree"),
        ("python", "net/serve.py", "if TYPE_CHECKING:\n    from ..storage import slices", "net uses storage.slices"),
        ("python", "net/serve.py", "import tensorferry.memory.tensors as t", "net uses memory.tensors"),
        ("python", "net/serve.py", "from tensorferry.state import tree", "net uses state.tree"),
        ("python", "memory/tensors.py", "from ..net import serve", "memory uses net.serve"),
        ("python", "storage/slices.py", "from ..memory.tensors import over", "storage uses memory.tensors"),
        ("python", "dcp/index.py", "from ..torchft.transport import HTTPTransport", "dcp uses torchft.transport"),
        ("python", "torchft/compat.py", "from ..testing import FaultProxy", "torchft uses testing"),
        ("python", "state/tree.py", "from .. import HTTPTransport", "state uses it"),
        ("python", "errors.py", "from .net import serve", "errors uses net.serve"),
        ("python", "_validate.py", "from .state.tree import Flat", "_validate uses state.tree"),
        ("rust", "client/lane.rs", "use crate::server::Server;", "client uses server"),
        ("rust", "client/remote/open.rs", "use crate::{error::Error, server::{Lease, Store}};", "client uses server"),
        ("rust", "file/read.rs", "let cancel = crate::client::Cancel::new();", "file uses client"),
        ("rust", "memory/arena.rs", "use super::super::payload::{Layout, Extent};", "memory uses payload"),
        ("rust", "memory/mod.rs", "pub(crate) use super::publication::Store;", "memory uses publication"),
        ("rust", "error.rs", "use super::{fork::without_fork};", "error uses fork"),
        ("rust", "server/mod.rs", 'let text = "\n//";\nuse crate::client::Remote;', "server uses client"),
    ],
)
def test_a_use_that_goes_up_is_found(language: str, module: str, line: str, what: str, tmp_path: Path) -> None:
    where = LANGUAGES[language]
    for path in where.modules(where.root).values():
        copy = tmp_path / path.relative_to(where.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    changed = tmp_path / module
    changed.write_text(f"{line}\n{changed.read_text()}")
    last = line.count("\n") + 1
    assert offences(where, tmp_path) == [f"{module}:{last}: {what}"]


def test_comments_and_unit_tests_of_the_engine_may_name_any_room() -> None:
    text = "// use crate::server::Server;\n#[cfg(test)]\nmod tests { use crate::server::Server; }"
    assert list(rust_uses(("client", "lane"), CORE.root, text, frozenset())) == []


def loaded_by(statements: str) -> set[str]:
    """Returns the modules that a process has loaded after these statements."""
    report = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_storage_net_and_the_ground_know_no_torch() -> None:
    modules = python_modules(PACKAGE.root)
    names = [".".join(module) for module in modules if module and module[0] in {*GROUND, "net", "storage"}]
    assert {"net.addresses", "storage.commits", "errors", "_native"} <= set(names)
    loaded = loaded_by("\n".join(f"import tensorferry.{name}" for name in names))
    assert "torch" not in loaded
    assert "numpy" not in loaded


def test_the_package_loads_neither_torch_nor_the_native_module() -> None:
    loaded = loaded_by(
        "import tensorferry; tensorferry.__version__; dir(tensorferry); tensorferry.errors.InvalidArgument"
    )
    assert "tensorferry.errors" in loaded
    assert not {"torch", "tensorferry._native"} & loaded


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
    for path in CORE.root.rglob("*.rs"):
        assert "pyo3" not in code_of(path.read_text()), path


def files_with_unsafe_code(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.rs")
        if re.search(r"\bunsafe\b", code_of(path.read_text()))
    }


def test_all_unsafe_code_of_the_binding_is_in_one_room(tmp_path: Path) -> None:
    found = files_with_unsafe_code(RUST / "py" / "src")
    assert {name.partition("/")[0] for name in found} == {"memory"}
    (tmp_path / "runtime.rs").write_text("// unsafe is not meant here\nfn f() { unsafe { g() } }\n")
    (tmp_path / "errors.rs").write_text("// unsafe is not meant here\n")
    assert files_with_unsafe_code(tmp_path) == {"runtime.rs"}
