"""A path names one place, whoever is given it and whenever it is used."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.errors import InvalidArgument
from tensorferry.storage.places import place_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with ``run``, a link to ``elsewhere/run``, so that ``run/..`` is ``elsewhere``."""
    found = tmp_path / "here"
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    found.mkdir()
    (found / "run").symlink_to(tmp_path / "elsewhere" / "run")
    monkeypatch.chdir(found)
    return found


def state_of(value: float) -> dict:
    return {"w": torch.full((10,), float(value))}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("ckpt/step-1", "here/ckpt/step-1"),
        ("./ckpt/./step-1/.", "here/ckpt/step-1"),
        ("run/../ckpt/step-1", "elsewhere/ckpt/step-1"),
        ("run/..", "elsewhere"),
        ("run", "here/run"),
        ("run/x", "elsewhere/run/x"),
        ("none/../x", "here/x"),
        ("~/x", "here/~/x"),
        (".", "here"),
        ("ck\udcff", "here/ck\udcff"),
    ],
)
def test_a_path_is_the_place_that_the_system_would_find(path, place, here) -> None:
    assert place_of(path) == here.parent / place
    assert place_of(Path(path)) == here.parent / place
    absolute = os.path.join(here, path)
    assert place_of(absolute) == here.parent / place
    assert place_of(place_of(path)) == place_of(path)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", b"a", None, 5, "s3://bucket/a", "http://x/"])
def test_what_names_no_place_is_refused(path) -> None:
    with pytest.raises(InvalidArgument):
        place_of(path)


@pytest.mark.process
def test_the_current_folder_may_change_once_save_has_returned(here, tmp_path, monkeypatch) -> None:
    held, go = threading.Event(), threading.Event()

    class Paused(FileWriter):
        def finish(self, metadata, results):
            held.set()
            assert go.wait(60)
            super().finish(metadata, results)

    one = AsyncCheckpointer()
    _, written = one.save("ckpt/step-1", state_of(1))
    saving = dcp.async_save(state_of(2), storage_writer=Paused("dcp"))
    assert held.wait(60)
    reader = FileReader("dcp")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    go.set()
    saving.result()
    written.result(60)
    state = state_of(0)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert float(state["w"][0]) == 2
    assert float(one.load(here / "ckpt" / "step-1")["w"][0]) == 1
    assert not any((tmp_path / "there").iterdir())
    one.close()
