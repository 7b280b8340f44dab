"""torchft's own tests, as its wheel ships them, run with tensorferry's class in HTTPTransport's place."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import end

from forked import Popen

pytest.importorskip("torchft")

pytestmark = [pytest.mark.nightly, pytest.mark.beyond_torchft]


HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """A file of tests, what must pass in it, and the least it must do with the transport.

    Some of torchft's tests listen on fixed ports (19530 and up): two of these must not run at the same time.
    """

    module: str
    passed: int
    built: int = 0
    sent: int = 0
    received: int = 0
    seconds: int = 120

    @property
    def path(self) -> Path:
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin)


# The counts are those of torchft 0.2.0 with its own class, without a GPU: a GPU only turns skips into passes.
# How often a replica heals depends on timing, hence the lower bounds.
SUITES = [
    Suite("torchft.checkpointing.http_transport_test", passed=5, built=7, sent=5, received=10),
    Suite("torchft.manager_test", passed=23, built=22, sent=3, received=3),
    Suite("torchft.manager_integ_test", passed=7, built=14, sent=4, received=4),
    Suite("torchft.local_sgd_integ_test", passed=28, built=50, sent=20, received=20, seconds=180),
    Suite("torchft.local_sgd_test", passed=8),
    Suite("torchft.ddp_test", passed=2),
    Suite("torchft.optim_test", passed=1),
]


def lost_torchfts_race(failure: dict[str, str]) -> bool:
    """Returns whether a test failed through a race of its own, which no transport can prevent.

    In the upscale tests three threads leave a barrier together, and two of them finish the job without the third when
    a busy machine runs it some 30 ms later: it then waits for a quorum that no other replica will join.
    """
    return (
        "::test_streaming_diloco_upscale" in failure["test"]
        and "self._client._quorum(" in failure["text"]
        and "Timeout expired" in failure["text"]
        and "got exception in recovery" not in failure["text"]
    )


def run_in_child(tests: list[str], directory: Path, seconds: int) -> tuple[int | None, str, dict]:
    """Run tests in a process of their own; returns its status (None: timed out), output and swap report."""
    report = directory / "swap.json"
    report.unlink(missing_ok=True)
    log = directory / "pytest.log"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(directory), "--confcutdir", str(HERE)]
    # These suites hang rather than fail: let the child show where it hangs before it is killed.
    command += ["-p", "swap_plugin", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={seconds - 15}", "-rA"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHFT_", "PYTEST_"))}
    env |= {
        "SWAP_REPORT": str(report),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }
    with log.open("wb") as output:
        child = Popen(
            [*command, *tests],
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(child)
    counted = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return status, log.read_text(encoding="utf-8", errors="replace"), counted


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.module.rpartition(".")[2])
def test_shipped_suite_passes(suite: Suite, tmp_path: Path):
    tests = [str(suite.path)]
    passed = 0
    for attempt in range(3):
        status, output, report = run_in_child(tests, tmp_path, suite.seconds)
        print(f"attempt {attempt}\n{output}")
        assert status is not None, f"{suite.module} did not end within {suite.seconds} s"
        assert report, f"{suite.module} did not get to the end of its session (status {status})"
        assert report["failures"] == []
        passed += report["outcomes"].get("passed", 0)
        if attempt == 0:
            first = report
        if not report["failed"] or not all(map(lost_torchfts_race, report["failed"])):
            break
        tests = [f"{suite.path}::{failure['test'].partition('::')[2]}" for failure in report["failed"]]
    assert status == 0, f"{suite.module} exited with {status}"
    assert report["outcomes"].get("failed", 0) == 0
    assert passed >= suite.passed
    used = first["counts"]
    assert used["built"] >= suite.built
    assert used["sent"] >= suite.sent
    assert used["received"] >= suite.received
