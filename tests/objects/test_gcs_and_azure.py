"""Checkpoints in GCS and Azure, as far as servers that answer as their documentation says can show it."""

from __future__ import annotations

import pytest
import torch
from dcp_doors import load, save
from other_stores import Azure, Gcs

from tensorferry import checkpointing
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.errors import IncompleteCheckpoint

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(params=[Gcs, Azure])
def store(request, monkeypatch):
    with request.param() as made:
        for name, value in made.variables.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.waits
def test_what_is_saved_is_loaded_and_replaced_under_a_condition(store):
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = {"w": torch.randn(1 << 16), "v": torch.randn(100)}
        save(state, store.place)
        loaded = load(state, store.place)
        assert all(torch.equal(loaded[name], one) for name, one in state.items())
    # What the first one had is removed.
    assert sorted(key.partition("-")[0] for key in store.objects) == [
        "run/.metadata",
        "run/index.safetensors",
        "run/rank00000",
    ]
    names = {"x-goog-if-generation-match", "if-none-match", "if-match"}
    puts = [headers for method, path, headers in store.asked if method == "PUT" and "/index." in path]
    first, second = [{name: headers[name] for name in names & headers.keys()} for headers in puts]
    assert first in ({"x-goog-if-generation-match": "0"}, {"if-none-match": "*"})
    assert len(second) == 1
    assert second != first


@pytest.mark.waits
@pytest.mark.parametrize("is_first", [True, False], ids=["where nothing is", "where a checkpoint is"])
def test_a_save_that_commits_between_the_look_and_the_write_stays(store, is_first):
    if not is_first:
        save({"u": torch.ones(2)}, store.place)
    others = []

    def look(method, path):
        # The condition of this write was chosen already.
        if method == "PUT" and "index" in path and not others:
            others.append(path)
            # It began later, and so it wins.
            save({"v": torch.ones(3)}, store.place)

    store.before = look
    with pytest.raises(IncompleteCheckpoint, match="began later has finished before"):
        save({"w": torch.ones(5)}, store.place)
    assert others
    assert load({"v": torch.zeros(3)}, store.place)["v"].tolist() == [1, 1, 1]
    assert len(store.objects) == 3


@pytest.mark.waits
def test_a_series_of_checkpoints_keeps_the_last_ones(store):
    checkpointer = SyncCheckpointer(keep_last=2)
    for step in range(4):
        checkpointer.save(f"{store.place}/step-{step}", {"w": torch.full((10,), step)})
    folders = {key.split("/")[1] for key in store.objects}
    assert folders == {"step-2", "step-3"}
    newest = checkpointing.latest_checkpoint(store.place)
    assert str(newest) == f"{store.place}/step-3"
    assert checkpointer.load(newest)["w"].unique().item() == 3
