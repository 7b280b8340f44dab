"""What a function shows and takes that declares the keyword arguments of servers."""

from __future__ import annotations

import inspect
from typing import Unpack

import pytest

from tensorferry.net.options import ServerArguments, takes_server_arguments


@takes_server_arguments
def publish(state: int, **server: Unpack[ServerArguments]) -> tuple[int, dict[str, object]]:
    """A door that is a function."""
    return state, dict(server)


def test_the_arguments_are_shown_one_by_one_and_taken():
    shown = inspect.signature(publish).parameters
    assert list(shown) == ["state", *ServerArguments.__annotations__]
    assert shown["tls"].default is None
    assert publish(3, port=7) == (3, {"port": 7})
    with pytest.raises(TypeError, match=r"publish\(\) got an unexpected keyword argument 'prot'"):
        publish(3, prot=7)
