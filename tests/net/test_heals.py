"""The first heal of a process is seen where logging is not configured, and only there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.process


#: Two heals, from a source that is put in; nothing else may write to stderr.
HEALS = """
from datetime import timedelta
import torch
from tensorferry import HTTPTransport
{imports}
timeout = timedelta(seconds=30)
source, healing = {source}, HTTPTransport(timeout)
for step in (3, 4):
    source.send_checkpoint([1], step, {{"w": torch.ones(1000)}}, timeout)
    healing.recv_checkpoint(0, source.metadata(), step, timeout)
    source.disallow_checkpoint()
source.shutdown()
healing.shutdown()
"""
NATIVE = HEALS.format(imports="", source="HTTPTransport(timeout)")
STOCK = HEALS.format(
    imports="from torchft.checkpointing import HTTPTransport as Stock", source="Stock(timeout, num_chunks=0)"
)
KEEPER = """
import contextlib, os, subprocess, sys, time
import torch
from tensorferry.checkpointing import Keeper, SyncCheckpointer

command = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--interface", "127.0.0.1"]
process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
try:
    keeper, up = Keeper(), False
    while not up:
        with contextlib.suppress(ConnectionError):
            up = bool(keeper.status())
    checkpointer = SyncCheckpointer(keeper=keeper)
    checkpointer.save(os.path.abspath("run/step-3"), {"w": torch.ones(1000)}, step=3)
    while not keeper.held():
        time.sleep(0.01)
    for _ in range(2):
        checkpointer.load(os.path.abspath("run/step-3"))
    checkpointer.close()
finally:
    process.terminate()
    process.wait()
"""
#: What counts as configured: none of it may bring a second way to the terminal, or undo a choice.
CONFIGURED = {
    "a level of this package": "logging.getLogger('tensorferry').setLevel(logging.WARNING)",
    "a level of all": "logging.getLogger().setLevel(logging.ERROR)",
    "a handler of nothing": "logging.getLogger('tensorferry').addHandler(logging.NullHandler())",
    "a handler at its default level": "logging.basicConfig()",
    "a switch": "logging.disable(logging.INFO)",
    "no last resort": "logging.lastResort = None",
}


def stderr_of(code: str, folder: Path) -> list[str]:
    environment = {**os.environ, "TENSORFERRY_KEEPER_DIR": str(folder / "keeper"), "OMP_NUM_THREADS": "1"}
    # Torch's warning of a missing NumPy comes from the interpreter's own filters, and is no line of a log.
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "begins"),
    [
        (NATIVE, "tensorferry: received step 3: "),
        (STOCK, "tensorferry: received step 3 from a stock torchft source in "),
        (KEEPER, "tensorferry: loading step 3 of "),
    ],
    ids=["native", "stock", "keeper"],
)
def test_the_first_heal_is_seen_without_any_configuration(code: str, begins: str, tmp_path: Path):
    if code is STOCK:
        pytest.importorskip("torchft")
    [line] = [line for line in stderr_of(code, tmp_path) if "tensorferry" in line]
    assert line.startswith(begins)
    assert line.endswith("(shown once; configure logging at INFO to see all)")


@pytest.mark.parametrize("configuration", CONFIGURED.values(), ids=CONFIGURED)
def test_a_configuration_of_logging_is_obeyed(configuration: str, tmp_path: Path):
    code = f"import logging\n{configuration}\n{NATIVE}"
    assert [line for line in stderr_of(code, tmp_path) if "step" in line] == []


def test_each_heal_is_one_line_where_logging_is_configured(tmp_path: Path):
    code = f"import logging\nlogging.basicConfig(level=logging.INFO)\n{NATIVE}"
    lines = [line for line in stderr_of(code, tmp_path) if "received step" in line]
    assert [line[:34] for line in lines] == [f"INFO:tensorferry:received step {step}: " for step in (3, 4)]


def test_a_warning_says_whose_it_is(tmp_path: Path):
    # Of a sender: it stands among the lines of the job's other packages.
    code = """
import logging
{configured}
from datetime import timedelta
from tensorferry import HTTPTransport

class Own:
    pass

with HTTPTransport(timedelta(seconds=30)) as source:
    source.send_checkpoint([1], 1, {{"own": Own()}}, timedelta(seconds=30))
"""
    [line] = stderr_of(code.format(configured=""), tmp_path)
    assert line.startswith("tensorferry: receivers will refuse this state")
    [line] = stderr_of(code.format(configured="logging.basicConfig()"), tmp_path)
    assert line.startswith("WARNING:tensorferry:receivers will refuse this state")


def test_nothing_of_logging_is_changed(tmp_path: Path):
    code = f"""
import logging
{NATIVE}
logger = logging.getLogger("tensorferry")
assert not logger.handlers and not logging.root.handlers
assert logger.level == logging.NOTSET and logging.root.level == logging.WARNING
assert logging.lastResort.level == logging.WARNING
"""
    stderr_of(code, tmp_path)
