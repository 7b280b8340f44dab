"""A host process for each release of megatron-core, for all tests of this folder."""

from __future__ import annotations

import pytest
from placed import RELEASES, Host


@pytest.fixture(scope="session")
def hosts():
    """The host processes by release: importing one takes long."""
    made = {}

    def of(release):
        if release not in made:
            made[release] = Host(release)
        return made[release]

    yield of
    for host in made.values():
        host.end()


@pytest.fixture
def host(hosts):
    """The newest release, for what no release changes."""
    yield hosts(RELEASES[-1])
    hosts(RELEASES[-1]).end_jobs()


@pytest.fixture(params=[*(pytest.param(one, marks=pytest.mark.nightly) for one in RELEASES[:-1]), RELEASES[-1]])
def each_host(request, hosts):
    """Every release, for what they do in different ways; by day, the newest one."""
    yield hosts(request.param)
    hosts(request.param).end_jobs()


@pytest.fixture
def ranks(host):
    """Two ranks of one job."""
    return host.job(2)


@pytest.fixture
def alone(host):
    """A job of one rank."""
    return host.job(1)
