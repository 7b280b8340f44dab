"""A host process for each release of megatron-core, for all tests of this folder."""

from __future__ import annotations

import pytest
from placed import RELEASES, Host


@pytest.fixture(scope="session")
def hosts():
    """The host processes by release: each file of a worker asks for both, and importing one takes long."""
    made = {}
    yield made
    for host in made.values():
        host.end()


@pytest.fixture(
    scope="session", params=[*(pytest.param(one, marks=pytest.mark.nightly) for one in RELEASES[:-1]), RELEASES[-1]]
)
def host(request, hosts):
    if request.param not in hosts:
        hosts[request.param] = Host(request.param)
    yield hosts[request.param]
    hosts[request.param].end_jobs()


@pytest.fixture
def ranks(host):
    """Two ranks of one job."""
    return host.job(2)


@pytest.fixture
def alone(host):
    """A job of one rank."""
    return host.job(1)
