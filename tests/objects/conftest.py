"""The servers of object stores, each started once, with a new prefix in the bucket for each test."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from stores import BUCKET, Gateway, environment, moto, s3s, s3s_binary
from tensorferry.storage import leftovers

_numbers = itertools.count()
NIGHTLY = (pytest.mark.process, pytest.mark.nightly)


@pytest.fixture
def days_later(monkeypatch):
    """Has what no index names count as left, as it does a day after it was written."""
    return lambda: monkeypatch.setattr(leftovers, "_ABANDONED_S", -60.0)


@dataclass
class Server:
    """A server, and a place in its bucket that a test has alone."""

    url: str
    prefix: str

    @property
    def place(self):
        return f"s3://{BUCKET}/{self.prefix}"


@pytest.fixture(scope="session")
def moto_url():
    with moto() as url:
        yield url


@pytest.fixture(scope="session")
def s3s_url(tmp_path_factory):
    if s3s_binary() is None:
        pytest.skip("s3s-fs is not there: make object-stores builds it")
    with s3s(tmp_path_factory.mktemp("s3s")) as url:
        yield url


@pytest.fixture
def server(moto_url, monkeypatch):
    for name, value in environment(moto_url).items():
        monkeypatch.setenv(name, value)
    return Server(moto_url, f"test-{next(_numbers)}")


@pytest.fixture
def gateway(server, monkeypatch):
    """What does harm before the server, by which all requests go."""
    with Gateway(server.url) as between:
        for name, value in environment(between.url).items():
            monkeypatch.setenv(name, value)
        yield between


# They are asked for by name, where nobody sees that they start a process.
@pytest.fixture(params=[pytest.param("moto", marks=pytest.mark.process), pytest.param("s3s-fs", marks=NIGHTLY)])
def any_server(request, monkeypatch):
    url = request.getfixturevalue("moto_url" if request.param == "moto" else "s3s_url")
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)
    return Server(url, f"test-{next(_numbers)}")
