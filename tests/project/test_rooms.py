"""Which module may import which: doors need rooms, rooms need the rooms below, and nothing needs a door.

    doors      torchft  dcp  checkpointing  megatron  cli  testing
    rooms      state
               storage -> net      memory
    ground     errors  _validate  _native  _fork  _gc  _rebuild

A module may import from its own package and from everything below it, floors skipped or not. Imports inside functions
and those for type checkers count like others.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tensorferry

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(tensorferry.__file__).parent

GROUND = frozenset({"errors", "_validate", "_native", "_fork", "_gc", "_rebuild"})
ROOMS: dict[str, frozenset[str]] = {
    "net": GROUND,
    "memory": GROUND,
    "storage": GROUND | {"net"},
    "state": GROUND | {"net", "memory", "storage"},
}
DOORS: dict[str, frozenset[str]] = {
    "torchft": frozenset(),
    "dcp": frozenset(),
    "checkpointing": frozenset(),
    "megatron": frozenset({"dcp"}),
    "cli": frozenset(),
    "testing": frozenset({"torchft"}),
}
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    **ROOMS,
    **{door: GROUND | ROOMS.keys() | others for door, others in DOORS.items()},
    # The package itself: its public names, which it imports when they are used.
    "": GROUND | ROOMS.keys() | DOORS.keys(),
}


def modules(root: Path) -> dict[str, Path]:
    """Returns every module of the package by its name in it; the package itself is ``""``."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {**found, "_native": root / "_native.pyi"}


def imported(name: str, source: str, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yields line and name of each module of this package that the source of module ``name`` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["tensorferry", *name.split(".")] if name else ["tensorferry"]
            above = node.level - is_package
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


def offences(root: Path) -> list[str]:
    """Returns the imports that the rule forbids."""
    found = []
    known = modules(root)
    for name, path in known.items():
        room = name.partition(".")[0]
        for line, target in imported(name, path.read_text(), path.name == "__init__.py", set(known)):
            other = target.partition(".")[0]
            if other != room and other not in MAY_IMPORT[room]:
                found.append(f"{path.relative_to(root)}:{line}: {room or 'the package'} imports {target or 'it'}")
    return sorted(found)


def test_every_module_imports_only_what_is_below_it() -> None:
    assert offences(ROOT) == []


def test_every_module_is_in_a_room() -> None:
    assert {name.partition(".")[0] for name in modules(ROOT)} <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("module", "line", "what"),
    [
        ("state/tree.py", "from ..torchft import compat", "state imports torchft.compat"),
        ("state/tree.py", "def f():\n    from ..dcp.files import FileReader", "state imports dcp.files"),
        ("net/serve.py", "if TYPE_CHECKING:\n    from ..storage import slices", "net imports storage.slices"),
        ("net/serve.py", "import tensorferry.memory.tensors as t", "net imports memory.tensors"),
        ("net/serve.py", "from tensorferry.state import tree", "net imports state.tree"),
        ("memory/tensors.py", "from ..net import serve", "memory imports net.serve"),
        ("storage/slices.py", "from ..memory.tensors import over", "storage imports memory.tensors"),
        ("dcp/index.py", "from ..torchft.transport import HTTPTransport", "dcp imports torchft.transport"),
        ("torchft/compat.py", "from ..testing import FaultProxy", "torchft imports testing"),
        ("state/tree.py", "from .. import HTTPTransport", "state imports it"),
        ("errors.py", "from .net import serve", "errors imports net.serve"),
        ("_validate.py", "from .state.tree import Flat", "_validate imports state.tree"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, line: str, what: str, tmp_path: Path) -> None:
    for name, path in modules(ROOT).items():
        if name != "_native":
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    (tmp_path / "_native.pyi").touch()
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    (found,) = offences(tmp_path)
    assert found.endswith(f": {what}")


def loaded_by(statements: str) -> set[str]:
    """Returns the modules that a process has loaded after these statements."""
    report = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_storage_net_and_the_ground_know_no_torch() -> None:
    names = [name for name in modules(ROOT) if name.partition(".")[0] in {*GROUND, "net", "storage"}]
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
