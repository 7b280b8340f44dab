"""A receive into the live state that fails midway: the state is neither sent on nor trained with."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch

from tensorferry import HalfReceived, StateMismatch, TensorferryError

SECONDS = timedelta(seconds=20)
SIZE = 4 << 20

pytestmark = pytest.mark.beyond_torchft


class Broken(Exception):
    """What ends a receive in the middle."""


class Pair:
    """A source, and a receiver with a live state, whose receives fail midway while `fails` is set."""

    def __init__(self, open_transport, **target):
        self.fails = True
        self.live = {"w": torch.zeros(SIZE)}
        self.source = open_transport(interface="127.0.0.1")
        about = {"state_dict": lambda: self.live, "interface": "127.0.0.1", "progress": self._progress} | target
        self.target = open_transport(**about)

    def _progress(self, done, _all):
        if self.fails and done:
            raise Broken

    def send(self, step=1, **state):
        self.source.send_checkpoint([1], step, state or {"w": torch.ones(SIZE)}, SECONDS)

    def receive(self, step=1):
        return self.target.recv_checkpoint(0, self.source.metadata(), step, SECONDS)

    def fail(self):
        self.send()
        with pytest.raises(Broken):
            self.receive()


@pytest.fixture
def pair(open_transport):
    return Pair(open_transport)


def test_a_half_received_state_is_not_trained_with(pair, caplog):
    caplog.set_level(logging.ERROR, "tensorferry")
    pair.fail()
    assert "some of its tensors may have new values" in caplog.text
    # torchft ends the step in which the receive failed like any other one, and does not commit it.
    pair.target.disallow_checkpoint()
    with pytest.raises(HalfReceived, match=r"step 1 failed \(Broken: .*accept_live_state\(\)"):
        pair.target.disallow_checkpoint()
    # It stays so.
    with pytest.raises(HalfReceived):
        pair.target.disallow_checkpoint()


def test_it_is_not_sent_to_others(pair):
    pair.fail()
    with pytest.raises(HalfReceived):
        pair.target.send_checkpoint([0], 1, pair.live, SECONDS)
    assert pair.target._disallowed


def test_what_was_published_before_is_withdrawn_all_the_same(pair):
    pair.target.send_checkpoint([0], 0, pair.live, SECONDS)
    pair.fail()
    pair.target.disallow_checkpoint()
    assert pair.target._disallowed


def test_each_receive_that_fails_is_given_its_step(pair):
    for _ in range(3):
        pair.fail()
        pair.target.disallow_checkpoint()


def test_a_complete_receive_mends_it(pair):
    pair.fail()
    pair.target.disallow_checkpoint()
    pair.fails = False
    pair.receive()
    assert torch.equal(pair.live["w"], torch.ones(SIZE))
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


def test_so_does_who_loads_a_checkpoint(pair):
    pair.fail()
    pair.target.accept_live_state()
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


def test_receives_that_write_nothing_change_nothing(pair):
    pair.send(w=torch.ones(3))
    with pytest.raises(StateMismatch, match="nothing was overwritten"):
        pair.receive()
    pair.source.disallow_checkpoint()
    with pytest.raises(TensorferryError):
        pair.target.recv_checkpoint(0, "http://127.0.0.1:9/nobody/checkpoint/", 1, timedelta(seconds=1))
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()


def test_nor_do_receives_into_fresh_memory(open_transport):
    pair = Pair(open_transport, state_dict=None)
    pair.fail()
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


def test_a_later_receive_that_finds_no_source_is_given_its_step_and_mends_nothing(pair):
    pair.fail()
    pair.target.disallow_checkpoint()
    with pytest.raises(TensorferryError):
        pair.target.recv_checkpoint(0, "http://127.0.0.1:9/nobody/checkpoint/", 1, timedelta(seconds=1))
    pair.target.disallow_checkpoint()
    with pytest.raises(HalfReceived):
        pair.target.disallow_checkpoint()
