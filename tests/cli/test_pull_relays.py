"""``tensorferry pull``: hosts that pull from one source send each other what they have."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch

from commands import command, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = [pytest.mark.process, pytest.mark.beyond_torchft]
#: 48 MiB from the source to two receivers would take 12 s.
SLOW = ("--max-bandwidth", "8M")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "state.safetensors"
    save_file({str(i): torch.randn(3 << 19, generator=generator) for i in range(8)}, path)
    return path


def pulled(metadata: str, outputs: list[Path], *arguments: object) -> list[dict[str, Any]]:
    """Pulls into all files at the same time; returns what the pulls have said."""
    common = ("--quiet", "--json", *arguments)
    with (
        command("pull", metadata, "-o", outputs[0], *common) as one,
        command("pull", metadata, "-o", outputs[1], *common) as two,
    ):
        said = [process.communicate(timeout=100) for process in (one, two)]
    assert [process.returncode for process in (one, two)] == [0, 0], said
    return [json.loads(out) for out, _ in said]


def test_pulls_bring_each_other_what_they_have(checkpoint: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    outputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with serving(checkpoint, *SLOW) as (metadata,):
        told = pulled(metadata, outputs)
        assert sum(each["relayed"] for each in told) > 16 << 20
    for output in outputs:
        assert run("diff", checkpoint, output).status == 0
        assert run("verify", output).status == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def test_nothing_is_relayed_where_one_side_does_not_want_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    monkeypatch.setenv("TENSORFERRY_RELAY", "0")
    with serving(checkpoint, *SLOW[:-1], "64M") as (metadata,):
        assert [each["relayed"] for each in pulled(metadata, outputs)] == [0, 0]


def test_a_pull_without_a_port_fetches_alone(
    checkpoint: Path, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(checkpoint, *SLOW[:-1], "64M") as (metadata,),
        socket.create_server(("0.0.0.0", 0)) as taken,
        monkeypatch.context() as environment,
    ):
        environment.setenv("TENSORFERRY_PORT", str(taken.getsockname()[1]))
        done = run("pull", metadata, "-o", tmp_path / "a.safetensors", "--quiet")
        assert done.status == 0, done.err
    assert run("diff", checkpoint, tmp_path / "a.safetensors").status == 0
