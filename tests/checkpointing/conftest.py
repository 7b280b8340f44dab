"""The fixtures that the tests of checkpointers and of the keeper share."""

from __future__ import annotations

import contextlib

import pytest

from started import ended_with_the_block
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import TensorferryError


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    """Ranks, trainers and keepers of a test that fails in the middle end with it."""
    with ended_with_the_block():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which keepers of this test, and their clients, meet."""
    found = tmp_path / "sockets"
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(found))
    return found


@pytest.fixture
def opened():
    """Makes checkpointers that are closed at the end, whatever has become of their saves."""
    made = []

    def make(**options):
        made.append(AsyncCheckpointer(**options))
        return made[-1]

    yield make
    for checkpointer in made:
        with contextlib.suppress(TensorferryError):
            checkpointer.close()
