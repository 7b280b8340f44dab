"""Everything that the page on architecture and CONTRIBUTING.md name exists: every path, and every name behind one.

Paths are written as pytest writes them: ``state/tree.py::flatten``, ``client/lane.rs::Transfer::run_all``. One that
does not begin at the root of the repository is below the Python package or the sources of the engine. Python modules
are parsed and not imported. Of Rust files the declarations are read line by line, which rustfmt's layout allows.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import test_rooms

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "docs/explanation/architecture.md"
DOCUMENTS = (ARCHITECTURE, "CONTRIBUTING.md")
BASES = (ROOT, ROOT / "python" / "tensorferry", ROOT / "rust" / "core" / "src")

#: Folders that a build makes: a checkout in which only `make dev` has run has none.
BUILT = {"dist/"}

#: Names in backticks that belong to other projects.
FOREIGN = {"Cargo", "StorageWriter", "StorageReader", "Metadata", "PGTransport"}


def code_of(document: str) -> list[str]:
    """Returns all texts in backticks, without blocks of code."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def paths_of(document: str) -> list[tuple[str, str]]:
    """Yields each path in backticks and the name behind it, which may be empty; skips placeholders (``<door>``)."""
    named = [token.partition("::") for token in code_of(document)]
    is_path = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|pyi|rs|md|toml|sh))")
    return [(path, name) for path, _, name in named if is_path.fullmatch(path) and path not in BUILT]


def found(path: str) -> Path | None:
    places = [base / path for base in BASES]
    return next((place for place in places if place.is_dir() == path.endswith("/") and place.exists()), None)


@cache
def python_names(path: Path) -> frozenset[str]:
    """Returns functions, classes and variables of a module, and the names that its classes define."""

    def defined(body: list[ast.stmt], before: str) -> list[str]:
        names = []
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.append(before + node.name)
                if isinstance(node, ast.ClassDef):
                    names += defined(node.body, f"{before}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [before + target.id for target in targets if isinstance(target, ast.Name)]
        return names

    return frozenset(defined(ast.parse(path.read_text()).body, ""))


@cache
def rust_names(path: Path) -> frozenset[str]:
    """Returns the items at the top of a file, and the functions of its ``impl`` and ``trait`` blocks."""
    names, around = set(), ""
    for line in path.read_text().splitlines():
        if line == "#[cfg(test)]":
            break
        if line.startswith("}"):
            around = ""
        if item := re.match(r"(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:struct|enum|trait|type|const|static) (\w+)", line):
            names.add(item[1])
        if block := re.match(
            r"(?:unsafe )?impl(?:<[^>]*>)? (?:[^{]* for )?(?:\w+::)*(\w+)|(?:pub(?:\([^)]*\))? )?trait (\w+)", line
        ):
            around = block[1] or block[2]
        if function := re.match(r"(\s*)(?:pub(?:\([^)]*\))? )?(?:(?:async|const|unsafe) )*fn (\w+)", line):
            names.add(function[2] if not function[1] else f"{around}::{function[2]}")
    return frozenset(names)


def missing(document: str) -> list[str]:
    wrong = []
    for path, name in paths_of(document):
        place = found(path)
        if place is None:
            wrong.append(f"{path} is no path of this repository")
        elif name and name not in (python_names(place) if place.suffix in (".py", ".pyi") else rust_names(place)):
            wrong.append(f"{path} has no {name}")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_and_names_in_documents_exist(document: str) -> None:
    assert len(paths_of(document)) >= 10
    assert missing(document) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_classes_in_documents_exist(document: str) -> None:
    named = {token.split("(")[0].split(".")[0] for token in code_of(document)}
    classes = {name for name in named if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)} - FOREIGN
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "rust").rglob("src/**/*.rs")]
    declared = {
        name for source in sources for name in re.findall(r"\b(?:class|struct|enum|trait) (\w+)", source.read_text())
    }
    assert classes <= declared


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / ARCHITECTURE).read_text()
    for base in BASES[1:]:
        rooms = [path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith("__")]
        missing = [room for room in rooms if f"| `{room}/` |" not in text]
        assert missing == [], f"{ARCHITECTURE} has no row for these in the tables of rooms; the map has them, too"


def rows_of(heading: str) -> dict[str, set[str]]:
    """Returns each folder in the first column of the table below ``heading``, with those in the last column."""
    section = (ROOT / ARCHITECTURE).read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `/"): set(re.findall(r"`(\w+)/`", row[-1])) for row in rows}


def test_the_map_of_the_package_is_the_rule_for_its_imports() -> None:
    said = rows_of("Rooms of the Python package")
    assert {name: said[name] for name in test_rooms.ROOMS} == {
        name: set(others - test_rooms.GROUND) for name, others in test_rooms.ROOMS.items()
    }
    assert {name: said[name] for name in said.keys() - test_rooms.ROOMS.keys()} == {
        name: set(others) for name, others in test_rooms.DOORS.items() if name in said
    }


def test_the_map_of_the_engine_is_the_rule_for_its_rooms() -> None:
    said = rows_of("Rooms of the engine")
    assert said == {name: others & said.keys() for name, others in test_rooms.ENGINE.items() if name in said}


@pytest.mark.parametrize(
    ("token", "wrong"),
    [
        ("state/gone.py", "state/gone.py is no path of this repository"),
        ("state/tree.py::flattened", "state/tree.py has no flattened"),
        ("state/tree.py::Flat.leaves", "state/tree.py has no Flat.leaves"),
        ("error.rs::Error::because", "error.rs has no Error::because"),
        ("error.rs::kind", "error.rs has no kind"),
        ("attic/", "attic/ is no path of this repository"),
        ("state/tree.py::Flat.leaf", None),
        ("error.rs::Error::kind", None),
        ("rust/wire/src/request/mod.rs::parse_path", None),
        ("docs/reference/format.md", None),
    ],
)
def test_what_does_not_exist_is_found(
    token: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"One is `{token}`, and `HTTPTransport(timeout)` is no path.\n")
    monkeypatch.setattr("test_architecture.ROOT", tmp_path)
    assert missing("page.md") == ([] if wrong is None else [wrong])
