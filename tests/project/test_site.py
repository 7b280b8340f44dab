"""The documentation as a site: it builds without a warning, its links lead somewhere, it needs nothing from outside.

``make docs`` builds the same.
"""

from __future__ import annotations

import ast
import os
import py_compile
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="the site is built by mkdocs, of the extra docs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).resolve().parents[2]
#: All that have public names; those of torchtitan are in its guide.
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT / "python/tensorferry"))
    for path in (ROOT / "python/tensorferry").rglob("__init__.py")
    if "\n__all__ = " in path.read_text() and path.parent.name != "torchtitan"
)


class Page(HTMLParser):
    """What a page of the site refers to.

    Attributes:
        links: the targets of its links
        loaded: what a browser loads to show it
        anchors: what may stand behind ``#``
        text: its text
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value is not None}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if "src" in named:
            self.loaded.append(named["src"])
        if tag == "link" and "href" in named and named.get("rel") != "canonical":
            self.loaded.append(named["href"])

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    # Or left out on purpose, which is written with a slash in front.
    assert pages == {line.split()[-1].removeprefix("/") for line in lines if line.endswith(".md")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site") / "built"
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # docs/*.py are imported while the site is built: their bytecode lies beside them, and must not become a part of it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for module in (ROOT / "docs").glob("*.py"):
        py_compile.compile(str(module))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_built(site: dict[Path, Page]):
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    built = {str(path.with_suffix("")).partition("/built/")[2] for path in site}
    assert {str(page) for page in pages} == built


def test_the_site_has_pages_and_what_they_show_alone(site: dict[Path, Page]):
    root = next(path for path in site if path.name == "index.html").parent
    kinds = {path.suffix for path in root.rglob("*") if path.is_file()}
    assert ".html" in kinds
    assert kinds <= {".html", ".css", ".js", ".json", ".map", ".png", ".svg", ".xml", ".gz"}, "no .py, no .pyc"


def test_links_of_the_site_lead_somewhere(site: dict[Path, Page]):
    wrong = []
    for path, page in site.items():
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            if not place.exists() or (parts.fragment and unquote(parts.fragment) not in site[place].anchors):
                wrong.append(f"{path.name}: {target}")
    assert sum(len(page.links) for page in site.values()) > 100
    assert wrong == []


def test_the_site_loads_nothing_from_outside(site: dict[Path, Page]):
    loaded = {target for page in site.values() for target in page.loaded}
    assert any(target.endswith(".css") for target in loaded)
    assert [target for target in loaded if urlsplit(target).netloc] == []


def test_no_markup_is_left_in_the_text(site: dict[Path, Page]):
    left = {"```", ":class:", ":meth:", ":func:", ":::"}
    assert {
        path.name: found for path, page in site.items() if (found := {mark for mark in left if mark in page.text})
    } == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str, site: dict[Path, Page]):
    # Read and not imported: megatron-core may be missing.
    [public] = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "python/tensorferry" / package / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    anchors = {anchor for path, page in site.items() if path.parent.name == "reference" for anchor in page.anchors}
    documented = {
        name for *modules, name in (anchor.split(".") for anchor in anchors) if modules[:1] == ["tensorferry"]
    }
    missing = [name for name in public if name not in documented]
    page = "api.md" if package == "." else f"api-{package}.md"
    assert missing == [], (
        f"no page of docs/reference has these names of {package}: give each a line `::: tensorferry.<module>.<name>` "
        f"in docs/reference/{page}, which has a line in mkdocs.yml"
    )
