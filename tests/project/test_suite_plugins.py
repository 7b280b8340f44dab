"""The plugins of this suite: what fails under load runs again alone, and a test that starts a process says so."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import second_run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(170)

CONFTEST = """
import pytest
from beside import Beside
from every_nth import keep_every_nth
from process_marks import ProcessMarks
from second_run import SecondRun

def pytest_addoption(parser):
    parser.addoption("--again-alone", action="store_true")
    parser.addoption("--beside")
    parser.addoption("--every", type=int, default=1)

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    keep_every_nth(config, items, config.getoption("--every"))

def pytest_configure(config):
    config.addinivalue_line("markers", "process: starts processes")
    config.pluginmanager.register(ProcessMarks(config.rootpath))
    if config.getoption("--again-alone") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRun(config))
    if config.getoption("--beside") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Beside(config.getoption("--beside"), config))
"""

#: Fails as often as there is a file to remove.
SOMETIMES = """
import os, pathlib
def fails_while(name):
    path = pathlib.Path(__file__).with_name(name)
    if path.exists():
        path.unlink()
        raise OSError("the first result of " + name)
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(SOMETIMES + tests)
    # Of all plugins that are installed, which take a second to import, only the one that is needed.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist.plugin", *options]
    places = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": places, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def summary(output: str) -> str:
    """Returns pytest's own last line, below which only the plugin of the second run prints."""
    return [line for line in output.splitlines() if line.startswith("====") and " in " in line][-1]


def below(output: str) -> list[str]:
    """Returns what stands below it."""
    return output.rpartition(summary(output))[2].split("\n")[1:-1]


def test_both_results_of_a_test_that_passes_alone_are_printed_and_the_run_passes(tmp_path: Path):
    (tmp_path / "call").touch()
    (tmp_path / "teardown").touch()
    tests = """
import pytest
@pytest.fixture
def late():
    yield
    fails_while("teardown")
def test_call(): fails_while("call")
def test_teardown(late): pass
def test_good(): pass
"""
    status, output = run(tmp_path, tests, "--again-alone", "-n", "0")
    assert status == 0, output
    for test, name in (("test_call", "call"), ("test_teardown", "teardown")):
        assert f"{second_run.TITLE}: test_it.py::{test}\n" in output
        assert f"the first result of {name}" in output
    named = [f"{second_run.TITLE}: test_it.py::{test}" for test in ("test_call", "test_teardown")]
    assert below(output) == named, output
    assert "3 passed, 2 rerun in " in summary(output), output


def test_what_fails_alone_as_well_fails_the_run(tmp_path: Path):
    (tmp_path / "once").touch()
    tests = "def test_once(): fails_while('once')\ndef test_ever(): raise OSError\n"
    status, output = run(tmp_path, tests, "--again-alone", "-n", "0")
    assert status == 1, output
    assert "1 failed, 1 passed, 1 rerun in " in summary(output), output


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        pytest.param(
            "def test_once(): fails_while('once')\ndef test_dies(): os._exit(3)\n",
            "a worker died",
            id="a worker that died",
        ),
        pytest.param(
            "".join(f"def test_{n}(): fails_while('{n}')\n" for n in range(11)),
            "11 tests failed, more than 10",
            id="many failures",
        ),
    ],
)
def test_what_is_no_matter_of_load_fails_at_once_and_says_so(tmp_path: Path, tests: str, why: str):
    for name in ("once", *map(str, range(11))):
        (tmp_path / name).touch()
    status, output = run(tmp_path, tests, "--again-alone", "-n", "1")
    assert status == 1, output
    assert "runs again alone" not in output
    assert "rerun" not in summary(output)
    assert below(output) == [f"NOTHING RAN AGAIN ALONE: {why}"], output


@pytest.mark.parametrize("options", [["-n", "0", "--continue-on-collection-errors"], ["-n", "1"]], ids=" ".join)
def test_a_file_that_cannot_be_collected_fails_the_run_and_tests_of_others_run_again(
    tmp_path: Path, options: list[str]
):
    (tmp_path / "once").touch()
    (tmp_path / "test_bad.py").write_text("raise OSError('at the import')\n")
    status, output = run(tmp_path, "def test_once(): fails_while('once')\n", "--again-alone", *options)
    assert status == 1, output
    assert "1 passed, 1 error, 1 rerun in " in summary(output), output
    assert below(output) == [f"{second_run.TITLE}: test_it.py::test_once"], output


def test_a_run_that_was_interrupted_says_that_nothing_ran_again(tmp_path: Path):
    """As one process does at once if it cannot collect a file."""
    (tmp_path / "test_bad.py").write_text("raise OSError('at the import')\n")
    status, output = run(tmp_path, "def test_good(): pass\n", "--again-alone", "-n", "0")
    assert status == 2, output
    assert below(output) == ["NOTHING RAN AGAIN ALONE: the run was interrupted"], output


def test_a_command_beside_the_tests_is_printed_and_its_failure_is_one_of_the_run(tmp_path: Path):
    (tmp_path / "once").touch()
    tests = "def test_once(): fails_while('once')\n"
    status, output = run(
        tmp_path, tests, "--again-alone", "-n", "0", "--beside", "echo what it $((1 + 1)) says; exit 7"
    )
    assert status == 1, output
    assert output.count("what it 2 says") == 1
    assert "1 passed, 1 error, 1 rerun in " in summary(output), output
    status, output = run(
        tmp_path, tests, "-n", "0", "--beside", "read -r _ || echo what it $((1 + 1)) says at their end"
    )
    assert status == 0, output
    assert "what it 2 says at their end" in output


def test_of_many_cases_every_nth_runs_whatever_else_is_left_out(tmp_path: Path):
    tests = """
import pytest
@pytest.mark.parametrize("case", range(20))
def test_many(case): print("case", case)
@pytest.mark.parametrize("case", range(5))
def test_few(case): print("case", case)
"""
    _, output = run(tmp_path, tests, "-n", "0", "--every", "4", "-s", "")
    assert "10 passed, 15 deselected" in summary(output)
    assert [f"case {case}" in output for case in range(20)] == [case < 5 or not case % 4 for case in range(20)]
    _, output = run(tmp_path, tests, "-n", "0", "-k", "many and (0 or 1)", "--every", "4")
    # Of 0, 1 and 10 to 19, and not of the twenty that there are.
    assert "3 passed, 22 deselected" in summary(output)


def test_nothing_runs_again_unasked(tmp_path: Path):
    (tmp_path / "once").touch()
    status, output = run(tmp_path, "def test_once(): fails_while('once')\n", "-n", "0")
    assert status == 1, output
    assert "rerun" not in summary(output)


def test_a_test_that_starts_a_process_is_marked_or_fails(tmp_path: Path):
    tests = """
import pytest, subprocess, sys
hidden = getattr(subprocess, "check_" + "output")
@pytest.fixture(scope="module")
def shared():
    return globals()["hid" + "den"]([sys.executable, "-c", ""])
def test_unmarked(): globals()["hid" + "den"]([sys.executable, "-c", ""])
def test_of_a_fixture(shared): pass
def test_of_the_same_fixture(shared): pass
@pytest.mark.process
def test_marked(): globals()["hid" + "den"]([sys.executable, "-c", ""])
def helper(): return subprocess.run([sys.executable, "-c", ""])
def test_found(): helper()
def test_without(): pass
"""
    status, output = run(tmp_path, tests, "-n", "0", "-m", "process or not process")
    assert status == 1, output
    assert "6 passed, 3 errors in " in summary(output), output
    # Where pytest does not know the width of a terminal, or CI is set, its summary repeats each message.
    errors = output.partition(" short test summary info ")[0]
    assert errors.count("no mark: add @pytest.mark.process") == 3, output
    status, output = run(tmp_path, tests, "-n", "0", "-m", "not process", "--deselect", "test_it.py::test_unmarked")
    assert "passed, 3 deselected, 2 errors in " in summary(output), output
