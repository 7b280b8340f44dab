"""The fixture that the tests of the keeper share."""

from __future__ import annotations

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which keepers of this test, and their clients, meet."""
    found = tmp_path / "sockets"
    monkeypatch.setenv("TENSORFERRY_KEEPER_DIR", str(found))
    return found
