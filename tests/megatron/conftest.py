"""A host process for each release of megatron-core, for all tests of this folder."""

from __future__ import annotations

import pytest
from placed import RELEASES, Host


@pytest.fixture(scope="session", params=RELEASES)
def host(request):
    made = Host(request.param)
    yield made
    made.end()
