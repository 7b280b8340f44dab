"""What failed in a run of many tests runs once more, each test alone: the plugin behind ``--again-alone``.

A test that passes then does not fail the run, but both results are printed, so that somebody mends what it waits for.
A file that cannot be collected fails the run, and keeps no test of the others from its second run. After the death of
a worker, or more failures than :data:`MOST`, which are no matter of load, nothing runs again. The last lines of the
output say which tests passed alone, or why none was tried.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 10
PATIENCE_S = 1800
PHASES = ("setup", "call", "teardown")
TITLE = "FAILED UNDER LOAD, PASSED ALONE"


def failed_tests(stats: dict[str, list[Any]]) -> tuple[dict[str, list[pytest.TestReport]], str]:
    """Returns the reports of each test that may run again, and otherwise the reason why none does."""
    tests: dict[str, list[pytest.TestReport]] = {}
    for report in [*stats.get("failed", ()), *stats.get("error", ())]:
        if isinstance(report, pytest.CollectReport):
            continue
        if report.when not in PHASES:
            return {}, "a worker died"  # xdist makes this report of it
        tests.setdefault(report.nodeid, []).append(report)
    return (tests, "") if len(tests) <= MOST else ({}, f"{len(tests)} tests failed, more than {MOST}")


def settle(stats: dict[str, list[Any]], test: str, reports: list[pytest.TestReport]) -> None:
    """Counts a test that has passed alone as passed, and its failures as ``rerun``."""
    for category in ("failed", "error"):
        stats[category] = [report for report in stats.get(category, ()) if report not in reports]
        if not stats[category]:
            del stats[category]
    stats.setdefault("rerun", []).append(reports[0])
    if all(report.nodeid != test for report in stats.get("passed", ())):
        passed = copy.copy(reports[0])
        passed.outcome, passed.longrepr, passed.sections = "passed", None, []
        stats.setdefault("passed", []).append(passed)


class SecondRun:
    """Registered where ``--again-alone`` is given, and not in the workers."""

    def __init__(self, config: pytest.Config, alone: Callable[[str], tuple[bool, str]] | None = None) -> None:
        self._config = config
        self._alone = alone or self._run
        self._settled: list[tuple[str, list[pytest.TestReport]]] = []
        self._refused = ""

    def _run(self, test: str) -> tuple[bool, str]:
        """Returns whether a test passes in a process of its own, and what that printed."""
        first = self._config.invocation_params.args
        without = {"--again-alone", *self._config.option.file_or_dir}
        # What comes last counts.
        options = [*(str(option) for option in first if option not in without), "--beside", ""]
        command = [sys.executable, "-m", "pytest", *options, "-n", "0", "-p", "no:cacheprovider", test]
        try:
            done = subprocess.run(
                command,
                cwd=self._config.rootpath,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"it did not end in {PATIENCE_S} s"
        last = done.stdout.rstrip().rpartition("\n")[2]
        return done.returncode == 0 and re.search(r"\d+ passed", last) is not None, done.stdout

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        if session.exitstatus == pytest.ExitCode.INTERRUPTED and reporter.stats.get("error"):
            self._refused = "the run was interrupted"  # as a file does that cannot be collected
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        tests, self._refused = failed_tests(reporter.stats)
        for test, reports in tests.items():
            reporter.write_line("")
            reporter.write_sep("=", f"{test} failed, and runs again alone")
            passed, output = self._alone(test)
            reporter.write_line(output)
            if passed:
                settle(reporter.stats, test, reports)
                self._settled.append((test, reports))
        if self._settled and not reporter.stats.get("failed") and not reporter.stats.get("error"):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for test, reports in self._settled:
            terminalreporter.write_sep("=", f"{TITLE}: {test}", red=True, bold=True)
            for report in reports:
                terminalreporter.write_line(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Names the tests below everything else, where a reader looks first."""
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for test, _ in self._settled:
            reporter.write_line(f"{TITLE}: {test}", red=True)
        if self._refused:
            reporter.write_line(f"NOTHING RAN AGAIN ALONE: {self._refused}", red=True)
