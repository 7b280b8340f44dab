"""The public names of the package, which are there before what they need is loaded."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import urllib.error

import pytest

import tensorferry
from tensorferry import errors
from tensorferry.torchft.transport import HTTPTransport

pytestmark = pytest.mark.beyond_torchft


def test_every_public_name_is_there_and_is_listed() -> None:
    assert set(dir(tensorferry)) == {*tensorferry.__all__, "__version__", "errors"}
    for name in tensorferry.__all__:
        assert getattr(tensorferry, name).__name__ == name
    # What a program handles; a caller corrects its call for the others.
    assert len(set(errors.__all__) & set(tensorferry.__all__)) == 8
    assert tensorferry.HTTPTransport is HTTPTransport
    assert tensorferry.errors is errors


def test_a_name_that_is_none_of_them_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tensorferry' has no attribute 'HTTPTransprot'"):
        tensorferry.HTTPTransprot  # noqa: B018


@pytest.mark.process
def test_the_first_use_may_be_on_several_threads() -> None:
    block = (
        "import threading, tensorferry; found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(tensorferry.HTTPTransport)) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; assert len(set(map(id, found))) == 1, found\n"
        "assert len(found) == 4"
    )
    subprocess.run([sys.executable, "-c", block], timeout=100, check=True)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_comes_through_a_pickle_and_a_copy(name: str) -> None:
    """Torch's checkpoint collectives send the errors of one rank to the others."""
    kind = getattr(errors, name)
    made = (
        errors._refused(kind, 400, "what went wrong")
        if issubclass(kind, errors.SourceRefused)
        else kind("what went wrong")
    )
    made.add_note("a note")
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert type(again) is kind
        assert str(again) == str(made)
        assert again.__notes__ == ["a note"]
        assert getattr(again, "code", None) == getattr(made, "code", None)


def test_the_text_of_an_error_is_what_is_wrong() -> None:
    for kind in (errors.ConnectError, errors.UnprovenSource):
        assert (
            str(kind("nobody listens")) == str(pickle.loads(pickle.dumps(kind("nobody listens")))) == "nobody listens"
        )
        assert isinstance(kind("nobody listens"), urllib.error.URLError), "as torchft's transport raises it"
    # torchft's own tests look for this.
    assert str(errors.FetchTimeout("timed out")) == "<urlopen error timed out>"
