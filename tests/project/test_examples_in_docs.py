"""The examples in README and docs run: Python in an environment of only the wheel and torch, without numpy.

A block of Python runs as it stands; one that needs more than that environment has runs in this one (``documents.py``).
Interpreters are forked from one which has imported torch and the package, except for the first of the tutorial.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from documents import MEGATRON, ROOT, Block, blocks, run

import forked

pytestmark = pytest.mark.nightly


UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel, torch and its requirements, made by links into uv's cache."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    wheels = list((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1, f"the blocks run with the wheel in dist/, which has {len(wheels)}: run `make build`"
    python = folder / "bin" / "python"
    torch_version = torch.__version__.split("+")[0]
    for command in (
        [UV, "venv", "-q", "--python", sys.executable, folder],
        [UV, "pip", "install", "-q", "--python", python, f"torch=={torch_version}"],
        # The wheel's dependencies are checked, and must be installed already.
        [UV, "pip", "install", "-q", "--python", python, "--no-index", wheels[0]],
    ):
        subprocess.run(command, check=True, timeout=300)
    return python


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
    run(sys.executable if block.kind == "needs" else bare, block.whole(), tmp_path)


class Terminal:
    """A command of a page, started in a folder, or forked; what it prints is in a file there."""

    def __init__(self, command: list[str | Path], folder: Path, name: str, forks: bool = False) -> None:
        self.output = folder / name
        start = forked.Popen if forks else subprocess.Popen
        with self.output.open("w") as output:
            self.process = start(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

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
        terminals.append(Terminal([bare, "-I", *arguments], tmp_path, name, forks=bool(terminals)))
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
    [torchrun, *publish], [python, *load] = lay_out("docs/guides/dcp.md", tmp_path)
    assert (torchrun, python) == ("torchrun", "python")
    job = Terminal([sys.executable, "-m", "torch.distributed.run", *publish], tmp_path, "publish")
    try:
        while not (tmp_path / "metadata.txt").exists():
            job.wait_for("")
            time.sleep(0.05)
        done = forked.run([sys.executable, *load], cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "loaded\n"
        assert job.process.wait(60) == 0, job.output.read_text()
    finally:
        job.end()


def test_the_blocks_for_megatron_run(tmp_path: Path):
    pytest.importorskip(MEGATRON)
    found = [block for block in blocks("python") if block.name == MEGATRON]
    assert len(found) == 6
    # In one process: to import Megatron takes longer than all of them.
    run(sys.executable, "\n".join(block.whole() for block in found), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_wheel_passes_its_tests_without_numpy(bare: Path, tmp_path: Path):
    packages = ("pytest", "pytest-timeout", "hypothesis")
    command = [UV, "pip", "install", "-q", "--python", bare, "--target", tmp_path, *packages]
    subprocess.run(command, check=True, timeout=300)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 400, "check": False}
    listed = subprocess.run([bare, "-c", "import numpy"], **options)
    assert "No module named 'numpy'" in listed.stderr
    files = [f"tests/{name}.py" for name in WITHOUT_NUMPY]
    command = [bare, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    # torch warns that there is no numpy.
    command += ["-W", "ignore:Failed to initialize NumPy", *files]
    done = subprocess.run(command, cwd=ROOT, **options)
    assert done.returncode == 0, done.stdout[-4000:]


#: Tests that need only the wheel, torch and pytest.
WITHOUT_NUMPY = [
    "dcp/test_peers",
    "storage/test_slices",
    "transport/test_receiving",
]
