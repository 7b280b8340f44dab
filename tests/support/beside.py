"""A command that runs beside the tests, as one more of them: the plugin behind ``--beside``.

Tests wait for processes and time-outs most of the time; the builds of Rust use what they leave of the processor. The
command's standard input ends when the tests have: ``BUILD && (read -r _ || true) && TEST`` tests on a quiet machine.
What it prints stands before the last lines, and its failure is an error of the run.
"""

from __future__ import annotations

import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Beside:
    """Runs a command of the shell from the beginning of a session to its end."""

    def __init__(self, command: str, config: pytest.Config) -> None:
        self._command = command
        self._config = config
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the session
        self._status = 0
        self._process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT
        )

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Waits for the command, so that what failed has the machine to itself when it runs again."""
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._process.terminate()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._status = self._process.wait()
        result = yield
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._status and reporter is not None:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            text = f"{self._command} ended with {self._status}"
            failed = pytest.TestReport(self._command, ("", 0, ""), {}, "failed", text, "call")
            reporter.stats.setdefault("error", []).append(failed)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._output.seek(0)
        terminalreporter.write_sep("=", f"beside the tests: {self._command}")
        terminalreporter.write_line(self._output.read().decode(errors="replace"))
        self._output.close()
