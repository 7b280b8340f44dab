"""What README and docs promise holds: the line is torchft's import, addresses answer, links lead somewhere."""

import re
import sys
import tomllib
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from documents import ROOT, blocks, run

import tensorferry

#: Where the pages and files of the repository can be read, for those who have no checkout.
REPOSITORY = re.compile(
    r"https://(?:github\.com/tensorferry/tensorferry/blob|raw\.githubusercontent\.com/tensorferry/tensorferry)/main/"
)


# Those of docs/ are checked by mkdocs, in `make lint`.
@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        path = target.partition("#")[0]
        if ours := REPOSITORY.match(path):
            path = path[ours.end() :]
        elif re.match("https?:", path):
            continue
        else:
            # The package index shows the README alone.
            assert document != "README.md", f"{target} is relative"
        assert (ROOT / path).exists(), target


@pytest.mark.process
def test_the_swap_line_is_the_import_of_torchft(tmp_path: Path):
    pytest.importorskip("torchft")
    swapped = re.search(r"# was: (?P<line>from torchft.+)$", blocks("python")[0].code, re.MULTILINE)
    assert swapped is not None
    run(sys.executable, swapped["line"], tmp_path)


def test_addresses_that_the_docs_show_answer():
    page = (ROOT / "docs/guides/observability.md").read_text()
    shown = set(re.findall(r"http://host:port/<random>/([\w./-]+)", page))
    assert shown == {"checkpoint/12.safetensors", "metrics"}
    timeout = timedelta(seconds=20)
    transport = tensorferry.HTTPTransport(timeout, interface="127.0.0.1")
    try:
        transport.send_checkpoint([1], 12, {"weight": torch.ones(3)}, timeout)
        assert transport.metadata().endswith("/checkpoint/")
        base = transport.metadata().removesuffix("checkpoint/")
        for path in shown:
            with urllib.request.urlopen(base + path, timeout=20) as answer:
                assert answer.status == 200
                body = answer.read()
            assert (b"tensorferry_requests_total" in body) == (path == "metrics")
            assert (b'"weight"' in body) == path.endswith(".safetensors")
    finally:
        transport.shutdown()


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert tensorferry.__version__ == version
