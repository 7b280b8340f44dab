"""What README and docs say of the package holds: verbs and options exist, links lead somewhere, addresses answer."""

import functools
import re
import subprocess
import sys
import tomllib
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tensorferry
from documents import DOCUMENTS, PAGES, ROOT, blocks, run
from tensorferry.cli import app as cli_app
from tensorferry.cli import exits

#: Where the pages and files of the repository can be read, for those who have no checkout.
REPOSITORY = re.compile(
    r"https://(?:github\.com/tensorferry/tensorferry/blob|raw\.githubusercontent\.com/tensorferry/tensorferry)/main/"
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_has_a_language_that_is_tested(document: str):
    fences = re.findall(r"^ *```.*$", (ROOT / document).read_text(), re.MULTILINE)
    # Text is output and grammars; ini and yaml configure other programs; the syntax of bash is checked below, also
    # in lists.
    known = re.compile(r"```(python|console|text|ini|yaml)( (needs|file)=[\w.]+)?| *```bash")
    assert [fence for fence in fences[::2] if not known.fullmatch(fence)] == []
    assert {fence.strip() for fence in fences[1::2]} <= {"```"}


def anchors(document: Path) -> set[str]:
    """Returns what a link may have behind ``#``: the headings in the form they have in addresses."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_somewhere(document: str):
    page = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if ours := REPOSITORY.match(path):
            place = ROOT / path[ours.end() :]
        elif re.match("https?:", path):
            continue
        else:
            place = (page.parent / path).resolve() if path else page
            # The package index shows the README alone, and the site is made of docs/ alone.
            assert document != "README.md", f"{target} is relative"
            assert not document.startswith("docs/") or place.is_relative_to(ROOT / "docs"), target
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_the_swap_line_is_the_import_of_torchft(tmp_path: Path):
    pytest.importorskip("torchft")
    swapped = re.search(r"# was: (?P<line>from torchft.+)$", blocks("python")[0].code, re.MULTILINE)
    assert swapped is not None
    run(sys.executable, swapped["line"], tmp_path)


def verbs() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def suite_help() -> str:
    command = [sys.executable, "-m", "tensorferry.testing", "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_verbs_that_documents_name_exist(document: str):
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= verbs()
    makefile = (ROOT / "Makefile").read_text()
    for variable in re.findall(r"(?:`|^)make [a-z-]+ ([A-Z_]+)=", text, re.MULTILINE):
        assert f"$({variable})" in makefile


def test_what_console_blocks_run_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    options = suite_help()
    command = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--help"]
    keeper = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout
    convert = (ROOT / "python/tensorferry/megatron/convert.py").read_text()
    for block in blocks("console"):
        for line in block.code.splitlines():
            command = re.sub(r"\s+#.*", "", line)
            match re.split(r"\s+", command, maxsplit=3):
                case ["make", verb, *_]:
                    assert verb in verbs(), line
                case ["pip", "install", what, *_]:
                    if what == ".":  # from a checkout
                        continue
                    found = re.fullmatch(r"'?tensorferry(?:\[([\w-]+)\])?'?", what)
                    assert found is not None, line
                    assert found[1] is None or all(one in extras for one in found[1].split(",")), line
                case ["python", "-m", "tensorferry.testing", *rest]:
                    assert all(option in options for option in re.findall(r"--[a-z-]+", " ".join(rest))), line
                # A block may say on which node a command is run.
                case ["$" | "node1$" | "node2$", "tensorferry-keeper", *rest]:
                    assert all(option in keeper for option in re.findall(r"--[a-z-]+", " ".join(rest))), line
                case ["python", "-m", "tensorferry.megatron.convert", *rest]:
                    assert all(option in convert for option in re.findall(r"--[a-z-]+", " ".join(rest))), line
                # torchtitan 0.3.0 has a module and no command.
                case ["torchrun", "...", "-m", module] if module.startswith("torchtitan.train "):
                    overrides = (ROOT / "python/tensorferry/torchtitan/__init__.py").read_text()
                    for name in re.findall(r"--override.imports '?tensorferry\.torchtitan\.(\w+)", module):
                        assert f"def {name}(" in overrides
                case ["torchrun", "...", "-m", module]:
                    path = ROOT / "python" / module.split()[0].replace(".", "/")
                    assert path.with_suffix(".py").exists(), line
                case ["cat", path]:
                    assert Path(path).exists(), line
                case ["python" | "torchrun", *rest]:  # The page's own files, which its test runs.
                    names = [other.name for other in blocks("python") if other.document == block.document]
                    assert any(name and name in " ".join(rest).split() for name in names), line
                # What they find there is held by the tests of the runbook.
                case ["$", "curl", url]:
                    assert re.fullmatch(r"http://node1:9400/(metrics)?", url), line
                case ["$", "tensorferry", verb, *rest]:
                    assert verb in cli_app.VERBS, line
                    assert all(option in command_help(verb) for option in re.findall(r"--[a-z-]+", " ".join(rest))), (
                        line
                    )
                case _:
                    pytest.fail(f"{block.document}: nothing is known of {line!r}")


def test_scripts_and_manifests_are_well_formed():
    # Scripts stand in lists, too.
    fence = re.compile(r"^( *)```bash\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    scripts = [(page, code) for page in PAGES for _, code in fence.findall((ROOT / page).read_text())]
    manifests = blocks("yaml")
    assert scripts
    assert manifests
    for page, code in scripts:
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=110, check=False)
        assert done.stderr == "", f"{page}: {code}"
        for name in re.findall(r"TENSORFERRY_[A-Z_]+", code):
            assert name in VARIABLES, f"{page}: nothing reads {name}"
    yaml = pytest.importorskip("yaml")
    for block in manifests:
        assert list(yaml.safe_load_all(block.code)), block
        for name in re.findall(r"TENSORFERRY_[A-Z_]+", block.code):
            assert name in VARIABLES, f"{block}: nothing reads {name}"


#: Every variable of the environment that the package names.
VARIABLES = {
    name
    for file in (ROOT / "python").rglob("*.py")
    for name in re.findall(r"TENSORFERRY_[A-Z_]*[A-Z]", file.read_text())
}


@functools.cache
def command_help(verb: str) -> str:
    command = [sys.executable, "-m", "tensorferry", verb, "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout


def test_the_reference_of_the_command_has_every_verb_and_status():
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert all(f"\n## {verb}\n" in page for verb in cli_app.VERBS)
    listed = re.findall(r"^\| ([\d, ]+) \| (.*?) \|", page.partition("## Exit statuses")[2], re.MULTILINE)
    found = {int(status): names for statuses, names in listed for status in statuses.split(",")}
    for kind, status in exits.STATUS.items():
        assert f"`{kind.__name__}`" in found[status] or status == exits.OTHER
    others = (exits.OK, exits.NO, exits.BUG, exits.INTERRUPTED, exits.TERMINATED, exits.BROKEN_PIPE)
    assert found.keys() == {*exits.STATUS.values(), *others}


def test_the_options_of_the_fault_suite_exist():
    options = suite_help()
    named = re.findall(r"`(--[a-z-]+)", (ROOT / "docs/guides/faults.md").read_text())
    assert named
    assert all(option in options for option in named)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_addresses_that_documents_show_answer(document: str):
    shown = set(re.findall(r"http://host:port/<random>/([\w./-]+)", (ROOT / document).read_text()))
    if document == "README.md":
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
