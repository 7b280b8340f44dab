"""The class and its metadata have the interface that torchft and its users expect."""

from __future__ import annotations

import errno
import gc
import os
import re
import socket
import urllib.parse
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from exchange import TIMEOUT, small_state, until
from tensorferry import HTTPTransport
from tensorferry.errors import TransportClosed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(90)


def test_metadata_is_a_constant_url_and_a_capability(open_transport: Callable[..., Any], ours: bool) -> None:
    transport, other = open_transport(), open_transport()
    metadata = transport.metadata()
    assert metadata.startswith("http://")
    assert metadata.endswith("/checkpoint/")
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    transport.disallow_checkpoint()
    assert transport.metadata() == transport.address() == metadata
    if ours:
        tokens = {re.fullmatch(r".*/([0-9a-f]{32})/checkpoint/", one.metadata())[1] for one in (transport, other)}
        assert len(tokens) == 2


def test_is_a_checkpoint_transport(transport_class: Any, open_transport: Callable[..., Any]) -> None:
    base = pytest.importorskip("torchft.checkpointing").CheckpointTransport
    assert isinstance(open_transport(), base)
    assert issubclass(transport_class, base)


@pytest.mark.process
@pytest.mark.beyond_torchft
def test_it_says_where_it_listens_and_what_it_serves_but_not_its_capability(transport_class: Any) -> None:
    with transport_class(TIMEOUT) as transport:
        url = urllib.parse.urlsplit(transport.metadata())
        assert repr(transport) == f"<HTTPTransport http://{url.netloc}: serving nothing>"
        transport.send_checkpoint([1], 7, small_state(), TIMEOUT)
        assert repr(transport) == f"<HTTPTransport http://{url.netloc}: serving step 7>"
        child = os.fork()
        if not child:
            os._exit(0 if repr(transport).endswith(": of the parent process>") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert repr(transport).endswith(": closed>")


@pytest.mark.beyond_torchft
def test_the_end_of_a_with_block_shuts_it_down(transport_class: Any) -> None:
    with pytest.raises(ZeroDivisionError), transport_class(TIMEOUT) as transport:
        1 / 0  # noqa: B018
    with pytest.raises(TransportClosed):
        transport.send_checkpoint([1], 1, small_state(), TIMEOUT)


@pytest.mark.beyond_torchft
def test_a_transport_that_is_dropped_gives_everything_back_without_a_collection() -> None:
    """torchtitan turns the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        live = {"w": torch.zeros(4)}
        source = HTTPTransport(TIMEOUT, interface="127.0.0.1")
        target = HTTPTransport(TIMEOUT, interface="127.0.0.1", state_dict=lambda: live)
        state = {"w": torch.ones(4), "views": torch.ones(8)[::2], "lr": 0.5}
        source.send_checkpoint([1], 1, state, TIMEOUT)
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
        port = urllib.parse.urlsplit(source.metadata()).port
        held = [weakref.ref(one) for one in (source, target, state["w"])]
        del source, target, state
        # A thread of the server may hold the state, and the port, for a moment more.
        until(lambda: [one() for one in held] == [None] * 3, "nothing is held")

        def is_closed() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED

        until(is_closed, "the port is closed")
    finally:
        gc.enable()
