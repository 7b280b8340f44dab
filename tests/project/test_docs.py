"""The examples in README and docs run: Python in an environment of only the wheel and torch, without numpy. Verbs
and options exist, links lead somewhere, and addresses answer.

A block of Python runs as it stands. ``needs=NAME`` behind the language says that it needs a package which that
environment does not have: then it runs in this one. ``file=NAME`` is a file of the reader's, which a test of its page
runs as the page says. :data:`SURROUNDINGS` has the code that a block presupposes.
"""

import functools
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tensorferry
from child import run_forked
from tensorferry import errors
from tensorferry.cli import app as cli_app
from tensorferry.cli import exits

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
#: Where the pages and files of the repository can be read, for those who have no checkout.
REPOSITORY = re.compile(
    r"https://(?:github\.com/tensorferry/tensorferry/blob|raw\.githubusercontent\.com/tensorferry/tensorferry)/main/"
)
BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<mark>[^\n]*))?\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)

_STATE = """
import torch
import torch.distributed.checkpoint as dcp
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter
state = {"weight": torch.ones(1000)}
"""
_PUBLISHED = f"""{_STATE}
writer = PeerWriter()
dcp.save(state, storage_writer=writer)
metadata = writer.metadata()
"""
_KEEPER = """
import atexit, os, signal
os.environ["TENSORFERRY_KEEPER_DIR"] = os.path.abspath("keeper")
import torch
import tensorferry.checkpointing
_started = tensorferry.checkpointing.Keeper(start=True)
atexit.register(os.kill, _started.status()["pid"], signal.SIGTERM)
"""
#: What Megatron needs besides what it says, by which its blocks are marked.
MEGATRON = "psutil"
#: One rank, without a GPU, with the release that the Makefile puts beside the environment.
_RELEASE = f"""
import sys
sys.path.insert(0, {str(Path(sys.prefix) / "megatron-0.19.2")!r})
"""
_MEGATRON = f"""
{_RELEASE}
import tempfile, torch
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
from megatron.core.dist_checkpointing import ShardedTensor
folder = tempfile.mkdtemp(dir=".")
sharded_state_dict = {{"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(8, 8)), "iteration": 3}}
"""
#: A manager needs a lighthouse and a store (`make demo` has them); this only checks that it accepts the arguments.
_MANAGER = """
import inspect
from datetime import timedelta
import torchft
from tensorferry import HTTPTransport
_signature = inspect.signature(torchft.Manager)
torchft.Manager = lambda *args, **options: _signature.bind_partial(*args, **options)
"""
#: A bucket on a server of this process.
_BUCKET = f"""{_STATE}
import logging, os, sys, warnings
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
warnings.simplefilter("ignore")
import atexit, stores
_server = stores.moto()
os.environ.update(stores.environment(_server.__enter__()))
atexit.register(_server.__exit__, None, None, None)
"""
#: The code that precedes blocks with these beginnings.
SURROUNDINGS = {
    'dcp.save(state, storage_writer=FileWriter("s3://': _BUCKET,
    "dcp.load(state, checkpoint_id=writer.folder())": _PUBLISHED,
    # A keeper of its own, and the folder of checkpoints below the one in which the test runs.
    "from tensorferry.checkpointing import make_async_checkpointer": f"""{_KEEPER}
import tensorferry.checkpointing
class _Here:
    def __init__(self, made): self.made = made
    def save(self, path, *state, **options): return self.made.save("." + path, *state, **options)
    def load(self, path, *state): return self.made.load("." + path, *state)
    def close(self): self.made.close()
_make = tensorferry.checkpointing.make_async_checkpointer
tensorferry.checkpointing.make_async_checkpointer = lambda **options: _Here(_make(**options))
state = {{"weight": torch.ones(1000)}}
""",
    "from tensorferry.checkpointing import Keeper": _KEEPER,
    "from tensorferry.checkpointing import Keeper, peer_metadata": f"""{_STATE}
import time
_saving = tensorferry.checkpointing.SyncCheckpointer(keeper="default")
_saving.save(os.path.abspath("step-1"), state)
while not tensorferry.checkpointing.Keeper().held(): time.sleep(0.01)
""",
    "addresses = [None] * world_size": f"""{_KEEPER}
from tensorferry.checkpointing import Keeper
rank, world_size, gpus_per_node, keeper = 0, 2, 1, Keeper()
def _gather(addresses, own): addresses[:] = [own, own]
torch.distributed.all_gather_object = _gather
""",
    "from datetime import timedelta\n\nimport torchft\n": _MANAGER
    + """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
""",
    "import tempfile\n\nimport torch\nfrom megatron.core": _RELEASE,
    "from megatron.core import dist_checkpointing": _MEGATRON,
    "from tensorferry import megatron\nfrom tensorferry.dcp import PeerWriter": _MEGATRON,
    # A rank that heals from another one, which is in the same process.
    "from megatron.core.dist_checkpointing.dict_utils": f"""{_MEGATRON}
from datetime import timedelta
import tensorferry
peer, step, timeout, is_healthy = 0, 7, timedelta(seconds=30), False
_healthy = tensorferry.HTTPTransport(timeout)
_healthy.send_checkpoint([1], step, {{"weight": torch.ones(8, 8), "iteration": 3}}, timeout)
peers_metadata = _healthy.metadata()
sharded_state_dict["weight"].data.zero_()
""",
    "from tensorferry.megatron import ZarrLoadShardedStrategy": f"""{_MEGATRON}
from megatron.core import dist_checkpointing
from tensorferry.megatron import ZarrSaveShardedStrategy
torch.cuda.synchronize = lambda *_: None
dist_checkpointing.save(sharded_state_dict, folder, ZarrSaveShardedStrategy())
""",
    "manager = torchft.Manager(": _MANAGER,
    "weights = model.state_dict()": _MANAGER
    + """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
load_state_dict = model.load_state_dict
""",
}


@dataclass
class Block:
    document: str
    language: str
    kind: str
    name: str
    code: str

    def __str__(self) -> str:
        return f"{self.document}: {self.code.splitlines()[0][:50]}"

    def whole(self) -> str:
        before = [text for begins, text in SURROUNDINGS.items() if self.code.startswith(begins)]
        return "".join(before) + self.code


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        for match in BLOCK.finditer((ROOT / document).read_text()):
            mark = match["mark"] or ""
            kind, _, name = mark.partition("=")
            assert kind in ("", "needs", "file"), f"{document}: the mark {mark!r} of a block is unknown"
            if match["language"] == language:
                found.append(Block(document, language, kind, name, match["code"]))
    return found


def run(python: Path | str, code: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(code)
    # No modules of this checkout or of the user.
    done = subprocess.run([python, "-I", script], cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_block(python: Path | str, code: str, folder: Path) -> None:
    """Runs code in a process that is forked from one which has imported torch and the package."""
    if "__main__" in code or "multiprocessing" in code:
        run(python, code, folder)  # Its children look for a script.
        return
    done = run_forked(f"import os\nos.chdir({str(folder)!r})\n{code}", python=(python, "-I"))
    assert done.returncode == 0, done.stderr


def make_environment(folder: Path, *packages: str) -> Path:
    """Makes an environment of the wheel, torch and its requirements, by links into uv's cache."""
    wheels = list((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1, f"the blocks run with the wheel in dist/, which has {len(wheels)}: run `make build`"
    uv = Path(sys.executable).parent / "uv"
    python = folder / "bin" / "python"
    torch_version = torch.__version__.split("+")[0]
    for command in (
        [uv, "venv", "-q", "--python", sys.executable, folder],
        [uv, "pip", "install", "-q", "--python", python, f"torch=={torch_version}", *packages],
        # The wheel's dependencies are checked, and must be installed already.
        [uv, "pip", "install", "-q", "--python", python, "--no-index", wheels[0]],
    ):
        subprocess.run(command, check=True, timeout=300)
    return python


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("bare") / "env")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bare_environment_has_no_numpy(bare: Path, tmp_path: Path):
    code = (
        "import importlib.util as u, tensorferry; print(tensorferry.__file__);"
        "assert not [n for n in ('numpy', 'torchft', 'safetensors', 'aiohttp', 'pytest') if u.find_spec(n)]"
    )
    assert run(bare, code, tmp_path).startswith(str(bare.parent.parent))


@pytest.mark.slow
@pytest.mark.timeout(400)
# Pages may repeat a block of the README.
@pytest.mark.parametrize(
    "block",
    {b.code: b for b in reversed(blocks("python")) if b.kind != "file" and b.name != MEGATRON}.values(),
    ids=str,
)
def test_every_block_of_python_runs(block: Block, bare: Path, tmp_path: Path):
    if block.kind == "needs":
        pytest.importorskip(block.name, reason=f"{block} needs {block.name}")
    run_block(sys.executable if block.kind == "needs" else bare, block.whole(), tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_has_a_language_that_is_tested(document: str):
    fences = re.findall(r"^ *```.*$", (ROOT / document).read_text(), re.MULTILINE)
    # Text is output and grammars; ini and yaml configure other programs; the syntax of bash is checked below, also
    # in lists.
    known = re.compile(r"```(python|console|text|ini|yaml)( (needs|file)=[\w.]+)?| *```bash")
    assert [fence for fence in fences[::2] if not known.fullmatch(fence)] == []
    assert {fence.strip() for fence in fences[1::2]} <= {"```"}


class Terminal:
    """A command of a page, started in a folder; what it prints is in a file there."""

    def __init__(self, command: list[str | Path], folder: Path, name: str) -> None:
        self.output = folder / name
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

    def wait_for(self, what: str) -> None:
        end = time.monotonic() + 60
        while what not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.05)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


def lay_out(document: str, folder: Path) -> list[list[str]]:
    """Writes the files of a page into ``folder``; returns the commands that it runs them with."""
    files = [block for block in blocks("python") if block.document == document and block.kind == "file"]
    for block in files:
        (folder / block.name).write_text(block.code)
    lines = [line for block in blocks("console") if block.document == document for line in block.code.splitlines()]
    commands = [command for line in lines if (command := shlex.split(line))[-1] in {b.name for b in files} | {"600"}]
    assert len(commands) == len(files)
    return commands


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tutorial(bare: Path, tmp_path: Path):
    [[python, *arguments]] = lay_out("docs/tutorial.md", tmp_path)
    assert python == "python"
    terminals = []

    def start(name: str, first: str) -> Terminal:
        terminals.append(Terminal([bare, "-I", *arguments], tmp_path, name))
        terminals[-1].wait_for(first)
        return terminals[-1]

    try:
        first = start("first", "step 1: loss")
        second = start("second", "healed: continuing after step ")
        second.wait_for("\nstep ")
        # Nobody has the state any more.
        first.interrupt()
        second.interrupt()
        assert start("alone", "ConnectError: ").process.wait(30) == 1
    finally:
        for terminal in terminals:
            terminal.end()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_two_jobs_that_reshard(tmp_path: Path):
    pytest.importorskip("numpy")  # torch.distributed's object collectives warn without it
    [torchrun, *publish], [python, *load] = lay_out("docs/guides/reshard.md", tmp_path)
    assert (torchrun, python) == ("torchrun", "python")
    job = Terminal([sys.executable, "-m", "torch.distributed.run", *publish], tmp_path, "publish")
    try:
        while not (tmp_path / "metadata.txt").exists():
            job.wait_for("")
            time.sleep(0.05)
        done = subprocess.run(
            [sys.executable, *load], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "loaded\n"
        assert job.process.wait(60) == 0, job.output.read_text()
    finally:
        job.end()


def test_the_blocks_of_the_megatron_guides_run(tmp_path: Path):
    pytest.importorskip(MEGATRON)
    found = [block for block in blocks("python") if block.name == MEGATRON]
    assert len(found) == 5
    # In one process: to import Megatron takes longer than all of them.
    run(sys.executable, "\n".join(block.whole() for block in found), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stock_receivers_are_served_without_numpy(bare: Path, tmp_path: Path):
    code = """
import io, urllib.request
from datetime import timedelta
import torch
from tensorferry import HTTPTransport
timeout = timedelta(seconds=20)
whole = torch.arange(100.0)
for snapshot in ("borrow", "copy"):
    transport = HTTPTransport(timeout, snapshot=snapshot)
    transport.send_checkpoint([1], 3, {"part": whole[10:20], "whole": whole, "scalar": torch.tensor(2)}, timeout)
    with urllib.request.urlopen(transport.metadata() + "3/full") as answer:
        body = answer.read()
    assert len(body) > whole.nbytes
    transport.shutdown()
"""
    run(bare, code, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_wheel_passes_its_tests_without_numpy(tmp_path: Path):
    python = make_environment(tmp_path / "env", "pytest", "pytest-timeout", "hypothesis")
    listed = subprocess.run([python, "-c", "import numpy"], capture_output=True, text=True, timeout=110, check=False)
    assert "No module named 'numpy'" in listed.stderr
    files = [f"tests/{name}.py" for name in WITHOUT_NUMPY]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    # torch warns that there is no numpy.
    command += ["-W", "ignore:Failed to initialize NumPy", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


#: Tests that need only the wheel, torch and pytest.
WITHOUT_NUMPY = [
    "dcp/test_peers",
    "storage/test_slices",
    "transport/test_receiving",
]


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


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_table_of_the_readme_can_be_checked_by_eye():
    tables = [
        re.search(
            r"^<!-- figures heal: begin -->\n(.*?)^<!-- figures heal: end -->", (ROOT / page).read_text(), re.M | re.S
        )[1]
        for page in ("README.md", "docs/index.md")
    ]
    assert tables[0] == tables[1]
    rows = [line.strip("|").split("|") for line in tables[0].splitlines()[2:]]
    assert 1 <= len(rows) <= 8
    for _, theirs, *ours in rows:
        for ms, ratio in zip(ours[::2], ours[1::2], strict=True):
            assert f"{float(theirs) / float(ms):.1f}" == ratio.strip()


def test_the_log_line_of_a_receive_is_the_one_that_is_explained():
    [shown] = re.findall(r"^received step .*$", (ROOT / "docs/guides/slow-heal.md").read_text(), re.MULTILINE)
    source = re.sub(r'"\n +"', "", (ROOT / "python/tensorferry/net/report.py").read_text())
    [written] = re.findall(r'"(received step .*%s)"', source)
    shown = (
        shown.replace("HERE <- THERE", "ROUTES")
        .replace("WITHOUT", "with")
        # Either of them may be one.
        .replace("LANES lanes", "LANES")
        .replace("RETRIES retries", "RETRIES")
        .replace(", FOUND of OFFERED tensors in place", "")
    )
    written = written.replace("%s TLS, %s a secret", "with TLS, with a secret")
    assert re.sub(r"\b[A-Z]{4,}\b", "%", shown) == re.sub(r"%[.\d]*[df]|%s(?!\Z)", "%", written).removesuffix("%s")


def test_every_error_has_a_cause_and_a_remedy():
    text = (ROOT / "docs/reference/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(errors.__all__)
    for name, also in rows:
        bases = {base.__name__ for base in getattr(errors, name).__mro__}
        assert {base.rpartition(".")[2] for base in re.findall(r"`([\w.]+)`", also)} <= bases, name


def test_the_start_page_links_each_page():
    text = (ROOT / "docs/index.md").read_text()
    others = [page.removeprefix("docs/") for page in PAGES if page != "docs/index.md"]
    assert [page for page in others if f"]({page})" not in text] == []


def test_the_readme_begins_with_the_swap():
    code = [block.code for block in blocks("python") if block.document == "README.md"]
    assert code[0].startswith("from tensorferry import HTTPTransport")
    assert any("recv_checkpoint" in c for c in code)


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


def test_no_two_examples_save_into_one_folder():
    found = [
        (match[1], path.name)
        for path in (ROOT / "examples/frameworks").glob("*.py")
        if (match := re.search(r'^CHECKPOINTS = Path\("(.+)"\)$', path.read_text(), re.MULTILINE))
    ]
    assert len(found) > 1
    assert len({folder for folder, _ in found}) == len(found), found


def test_every_example_shows_what_is_logged():
    scripts = [*(ROOT / "examples").glob("*/*.py")]
    shows = {
        path.relative_to(ROOT / "examples").as_posix() for path in scripts if "logging.basicConfig(" in path.read_text()
    }
    begins = {
        path.relative_to(ROOT / "examples").as_posix()
        for path in scripts
        if "__main__" in path.read_text()
        and "tensorferry" in re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    }
    # The stories of make demo, make demo-fleet and make demo-restart start others, and tell what happens themselves.
    assert begins - shows <= {"heal/fleet_story.py", "heal/story.py", "restart/story.py"}


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
