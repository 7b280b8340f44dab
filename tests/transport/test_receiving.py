"""The ways to receive: without the network, into reused memory, with progress reports, and from several sources."""

import gc
import logging
import weakref
from datetime import timedelta

import pytest
import torch

import tensorferry
from equality import assert_same_state
from exchange import until
from tensorferry import join_metadata

TIMEOUT = timedelta(seconds=30)
MIB = 1 << 20


pytestmark = pytest.mark.beyond_torchft


def state_of(seed, mib=6):
    torch.manual_seed(seed)
    return {"w": torch.randn(mib * MIB // 4), "small": [torch.arange(seed, seed + 9), "text"]}


def send(source, state, step=3):
    source.send_checkpoint([1], step, state, TIMEOUT)
    return source.metadata()


def logged(caplog, text):
    return [r for r in caplog.records if r.name == "tensorferry" and text in r.getMessage()]


@pytest.mark.parametrize(("source_wants", "receiver_wants"), [(True, True), (True, False), (False, True)])
def test_bytes_go_around_the_network_if_both_sides_want_it(open_transport, caplog, source_wants, receiver_wants):
    state = state_of(1, mib=20)
    metadata = send(open_transport(same_host=source_wants), state)
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert_same_state(open_transport(same_host=receiver_wants).recv_checkpoint(0, metadata, 3, TIMEOUT), state)
    (line,) = logged(caplog, "received step 3")
    assert ("over shared memory" in line.getMessage()) == (source_wants and receiver_wants)
    assert (" <- " in line.getMessage()) != (source_wants and receiver_wants)


@pytest.mark.parametrize(
    ("tls", "secret", "said"),
    [
        ([True], "0123456789abcdef", "with TLS, with a secret"),
        ([False], None, "without TLS, without a secret"),
        ([True, False], None, "without TLS, without a secret"),
    ],
)
def test_the_line_of_a_receive_says_what_protected_it(open_transport, caplog, tls, secret, said):
    sources = [open_transport(tls=one, secret=secret) for one in tls]
    metadata = join_metadata([send(source, {"w": torch.ones(9)}) for source in sources])
    with caplog.at_level(logging.INFO, "tensorferry"):
        open_transport(secret=secret).recv_checkpoint(0, metadata, 3, TIMEOUT)
    (line,) = logged(caplog, "received step 3")
    assert f", {said}" in line.getMessage()
    assert "0123456789abcdef" not in line.getMessage()


def test_the_environment_decides_where_the_argument_does_not(open_transport, caplog, monkeypatch):
    metadata = send(open_transport(same_host=True), state_of(1, mib=20))
    for variable, argument, around in (("1", {}, True), ("0", {}, False), ("0", {"same_host": True}, True)):
        monkeypatch.setenv("TENSORFERRY_SAME_HOST", variable)
        caplog.clear()
        with caplog.at_level(logging.INFO, "tensorferry"):
            open_transport(**argument).recv_checkpoint(0, metadata, 3, TIMEOUT)
        assert bool(logged(caplog, "over shared memory")) == around


def test_memory_is_used_again_once_its_tensors_are_gone(open_transport):
    first, second = state_of(1), state_of(2)
    source, receiver = open_transport(), open_transport(reuse_bytes=64 * MIB)
    held = receiver.recv_checkpoint(0, send(source, first), 3, TIMEOUT)
    addresses = {held["w"].data_ptr()}
    # One tensor keeps the whole memory in use: none of it may be overwritten.
    kept = held["small"][0]
    del held
    other = receiver.recv_checkpoint(0, send(source, second), 3, TIMEOUT)
    assert_same_state(other, second)
    assert_same_state(kept, first["small"][0])
    addresses.add(other["w"].data_ptr())
    assert len(addresses) == 2
    del kept, other
    again = receiver.recv_checkpoint(0, send(source, second), 3, TIMEOUT)
    assert again["w"].data_ptr() in addresses
    assert_same_state(again, second)


def test_nothing_of_a_state_waits_for_the_garbage_collector(open_transport):
    state = {"w": torch.zeros(MIB), "deep": [{"x": (torch.ones(3), "text")}], "module": torch.nn.Linear(3, 3)}
    source, receiver = open_transport(), open_transport(reuse_bytes=64 * MIB, safe_globals=[torch.nn.Linear])
    metadata = send(source, state)
    gc.collect()
    gc.disable()
    try:
        received = receiver.recv_checkpoint(0, metadata, 3, TIMEOUT)
        here, there = weakref.ref(received["w"]), weakref.ref(state["w"])
        del received
        assert here() is None
        assert receiver._pool.held > 0
        source.disallow_checkpoint()
        del state
        until(lambda: there() is None, "the storage is gone")
    finally:
        gc.enable()


def test_progress_is_reported_up_to_the_end(open_transport):
    reported = []
    state = state_of(1, mib=20)
    receiver = open_transport(progress=lambda done, total: reported.append((done, total)))
    assert_same_state(receiver.recv_checkpoint(0, send(open_transport(), state), 3, TIMEOUT), state)
    total = reported[-1][1]
    assert reported[-1] == (total, total)
    assert total > 20 * MIB
    assert reported == sorted(reported)


def test_a_source_that_is_gone_or_serves_something_else_is_left_with_a_warning(open_transport, caplog):
    state = state_of(1, mib=24)
    good, other, dead = open_transport(), open_transport(), open_transport()
    joined = join_metadata([send(good, state), send(other, state_of(2, mib=24)), send(dead, state)])
    dead.shutdown()
    with caplog.at_level(logging.WARNING, "tensorferry"):
        assert_same_state(open_transport(num_chunks=6).recv_checkpoint(0, joined, 3, TIMEOUT), state)
    warnings = [r.getMessage() for r in logged(caplog, "were fetched over other connections")]
    assert len(warnings) == 2
    assert any("another snapshot" in w for w in warnings), warnings


class Unknown:
    """A class that is on no allow-list."""


def test_a_refused_class_is_named_with_the_leaf_that_needs_it(open_transport, caplog):
    state = {"model": {"w": torch.ones(3)}, "user": [1, {"extra": Unknown()}]}
    with caplog.at_level(logging.WARNING, "tensorferry"):
        metadata = send(open_transport(), state)
    (warning,) = logged(caplog, "receivers will refuse")
    with pytest.raises(tensorferry.errors.UnsafePickle) as caught:
        open_transport().recv_checkpoint(0, metadata, 3, TIMEOUT)
    for reported in (warning.getMessage(), str(caught.value)):
        assert "'user.1.extra'" in reported
        assert f"safe_globals=[{Unknown.__module__}.Unknown]" in reported
    received = open_transport(safe_globals=[Unknown]).recv_checkpoint(0, metadata, 3, TIMEOUT)
    assert isinstance(received["user"][1]["extra"], Unknown)
