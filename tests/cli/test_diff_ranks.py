"""``diff`` and ``inspect`` of DTensors: what processes leave in them beside their values is no difference."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from child import run_forked
from tensorferry.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.beyond_torchft,
    pytest.mark.skipif(
        "_rank" not in inspect.signature(DeviceMesh.__init__).parameters,
        reason="this torch makes no mesh of a rank without the other ones",
    ),
]

#: Rank 0 of a job of two, without the other one. Before ``_KEEPS_HASH``, pickles had the hashes that torch keeps.
RUN = """
import sys
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.state import pickling

saver = SyncCheckpointer(rank=0, world_size=1)

def save(name, last=8.0, names=("a",)):
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=names, _init_backend=False, _rank=0)
    def spread(value, way):
        found = DTensor.from_local(value, mesh, [way], run_check=False)
        # As an operation does with the results that it has cached.
        hash(found._spec)
        return found
    rows = spread(torch.tensor([[1.0, 2.0], [3.0, last]]), Shard(0))
    state = {"model": {"rows": rows, "all": spread(torch.ones(4), Replicate())}, "plain": torch.ones(3)}
    saver.save(f"{sys.argv[1]}/{name}", state)

save("now")
save("changed", last=9.0)
save("renamed", names=("b",))
pickling._KEEPS_HASH = frozenset()
save("before")
saver.close()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two runs, each in a process with hashes of its own: a forked one has those of its parent."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "1")], env=environment, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    done = run_forked(RUN, folder / "2")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.process
@pytest.mark.parametrize(("one", "other"), [("now", "now"), ("before", "before"), ("before", "now")])
def test_equal_tensors_of_two_runs_are_the_same(saved: Path, run: Callable[..., Any], one: str, other: str) -> None:
    done = run("diff", saved / "1" / one, saved / "2" / other)
    assert (done.status, done.out) == (exits.OK, "")
    assert "DeviceMesh" not in done.err
    # Without the hashes, the digests of the pickles suffice.
    assert (", 0 by their bytes" in done.err) == ("before" not in (one, other)), done.err


@pytest.mark.process
@pytest.mark.parametrize(
    ("other", "lines"),
    [
        ("changed", ["model.rows: the bytes differ"]),
        ("renamed", ["model.rows: the values differ", "model.all: the values differ"]),
    ],
)
def test_other_values_placements_and_meshes_differ(
    saved: Path, run: Callable[..., Any], other: str, lines: list[str]
) -> None:
    done = run("diff", saved / "1" / "before", saved / "2" / other)
    assert (done.status, done.out.splitlines()) == (exits.NO, lines)
    short = run("diff", saved / "1" / "before", saved / "2" / other, "--summary")
    [line] = short.out.splitlines()
    assert line == f"model: {len(lines)} leaves differ, such as {lines[0].partition(':')[0]}"


@pytest.mark.process
def test_inspect_has_the_digest_of_a_part(saved: Path, run: Callable[..., Any]) -> None:
    def digests(name: str) -> dict[str, str]:
        [listing] = run("inspect", "--digests", "--json", saved / "1" / name).json
        return {leaf["path"]: leaf["digest"] for leaf in listing["leaves"]}

    now, changed = digests("now"), digests("changed")
    assert all(now.values())
    assert {path for path in now if now[path] != changed[path]} == {"model.rows"}
