"""Checkpoints of several ranks: complete or refused, and loaded by other numbers of ranks with other placements."""

from __future__ import annotations

import pytest
import torch

from checkpoint_loads import load_state, save_states
from checkpoint_ranks import run
from rank_worker import SHARDED, TENSORS
from tensorferry.checkpointing import latest_checkpoint
from tensorferry.errors import CorruptCheckpoint, IncompleteCheckpoint
from tensorferry.storage.folder import read_index

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def test_spread_tensors_are_put_together_for_other_ranks_and_placements(tmp_path):
    folder = tmp_path / "c"
    # With its own placements and with others, and then with another number of ranks.
    run("save", 2, folder)
    run("load", 3, folder)
    # In a process without ranks, every DTensor is whole.
    state = load_state(folder)
    for name, (value, *_) in TENSORS.items():
        assert torch.equal(torch.as_tensor(state[name]), value), name
    assert (state["note"], state["plain"].tolist()) == (0, [0, 0, 0])
    assert torch.equal(state["sharded"], SHARDED)
    asked = {name: torch.zeros_like(value[0]) for name, value in TENSORS.items()}
    asked["sharded"] = torch.zeros_like(SHARDED)
    load_state(folder, asked)
    assert torch.equal(asked.pop("sharded"), SHARDED)
    for name, (value, *_) in TENSORS.items():
        assert torch.equal(asked[name], value), name
    # Damage in the file of another rank is noticed by whoever reads it.
    file = folder / read_index(folder).files[1][0]
    data = bytearray(file.read_bytes())
    at = data.find(TENSORS["rows"][0][5:].contiguous().numpy().tobytes())
    data[at + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        load_state(folder, {"rows": torch.zeros(10, 7)})
    assert load_state(folder, {"note": None})["note"] == 0


def test_a_folder_that_lacks_the_file_of_a_rank_is_refused_by_all(tmp_path):
    save_states(tmp_path / "c", [{"rank": rank, "w": torch.full((4,), float(rank))} for rank in range(2)])
    for rank, expected in ((0, 0), (1, 1), (2, 0)):
        loaded = load_state(tmp_path / "c", rank=rank, world_size=2 if rank < 2 else 3)
        assert loaded["rank"] == expected
        assert loaded["w"].eq(expected).all()
    name = read_index(tmp_path / "c").files[1][0]
    (tmp_path / "c" / name).unlink()
    for rank in range(2):
        with pytest.raises(IncompleteCheckpoint, match=name):
            load_state(tmp_path / "c", rank=rank, world_size=2)
    assert latest_checkpoint(tmp_path) is None
