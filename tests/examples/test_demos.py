"""The demos of one script, as `make` runs them or in miniature: each ends well, and says what it has shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import end

EXAMPLES = Path(__file__).parents[2] / "examples"
RELEASE = Path(sys.prefix) / "megatron-0.19.2"
#: By name: the script and its arguments, what it says at its end, and whether it needs megatron-core.
DEMOS = {
    "reshard": ("reshard/live_reshard.py", "the same to the last bit", False),
    "megatron": ("megatron/layouts.py", "the losses are the same", True),
    "restart": (
        "restart/story.py --steps 4 --every 2 --kill-after 2 --width 64",
        "the final state equal the reference bit for bit",
        False,
    ),
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_ends_well(name: str) -> None:
    line, said, needs_megatron = DEMOS[name]
    if name == "reshard" and torch.__version__ < "2.9":
        pytest.skip("torch 2.8 trains on otherwise after set_state_dict, whatever has loaded it")
    if needs_megatron and not RELEASE.is_dir():
        pytest.skip("megatron-core is not installed: make build")
    script, *arguments = line.split()
    environment = os.environ | ({"PYTHONPATH": str(RELEASE)} if needs_megatron else {})
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, env=environment, text=True, start_new_session=True) as demo:
        try:
            out, _ = demo.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(demo)
            raise
    assert demo.returncode == 0, out
    assert said in out
