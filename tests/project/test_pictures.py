"""The pictures of the documentation are drawn from text that is in the repository, and stand in the pages."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tensorferry import _settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = ["life", "ports", "survivors"]


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_pictures_are_those_that_the_script_draws(pictures, tmp_path: Path):
    pictures.draw(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == NAMES
    for path in tmp_path.iterdir():
        assert path.read_text() == (DOCS / "pictures" / path.name).read_text(), "run python docs/pictures.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_whole_named_and_in_a_page(name: str):
    svg = ET.parse(DOCS / "pictures" / f"{name}.svg").getroot()
    width, height = (float(svg.attrib[side]) for side in ("width", "height"))
    title = svg.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 < float(text.attrib["x"]) < width
        assert 0 < float(text.attrib["y"]) < height
    shown = [
        page.name for page in DOCS.rglob("*.md") if re.search(rf"!\[[^\]]+\]\([^)]*{name}\.svg\)", page.read_text())
    ]
    assert shown


def test_the_picture_of_ports_names_what_the_code_reads():
    named = re.findall(r"TENSORFERRY_[A-Z_]+", (DOCS / "pictures" / "ports.svg").read_text())
    assert len(named) == 2
    assert set(named) <= set(_settings.SETTINGS)
