"""Broken transports, which hang, crash, raise or corrupt: the fault suite must notice each of them."""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial
from http.server import HTTPServer

import torch
from torch.utils._pytree import tree_map

from tensorferry import HTTPTransport


class HangsInReceive(HTTPTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):  # noqa: ARG002
        time.sleep(600)


class LateInReceive(HTTPTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        time.sleep(timeout.total_seconds() + 1.5)
        return super().recv_checkpoint(src_rank, metadata, step, timeout)


class CrashesInReceive(HTTPTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):  # noqa: ARG002
        os._exit(3)


class ReceivesOneWrongByte(HTTPTransport):
    def recv_checkpoint(self, *arguments, **more):
        state = super().recv_checkpoint(*arguments, **more)
        state["model"]["layer3.weight"].view(torch.uint8)[77] ^= 1
        return state


class RaisesInDisallow(HTTPTransport):
    def disallow_checkpoint(self):
        raise TimeoutError("timed out waiting for readers")


class StallsInDisallow(HTTPTransport):
    def disallow_checkpoint(self):
        time.sleep(600)


class CrashesInDisallow(HTTPTransport):
    def disallow_checkpoint(self):
        os._exit(3)


class ServesNothingAfterwards(HTTPTransport):
    def disallow_checkpoint(self):
        self.send_checkpoint = lambda *_: None
        super().disallow_checkpoint()


class ServesAddresses(HTTPTransport):
    """Serves the memory that tensors had when they were sent, even after it was freed."""

    def send_checkpoint(self, dst_ranks, step, state_dict, timeout):
        super().send_checkpoint(dst_ranks, step, tree_map(_at_its_address, state_dict), timeout)


class ReceivesAtAddresses(HTTPTransport):
    """Writes to the memory that live tensors had at the start, even after it was freed."""

    def __init__(self, timeout, lanes, state_dict=None, **more):
        live = None if state_dict is None else (lambda: tree_map(_at_its_address, state_dict()))
        super().__init__(timeout, lanes, state_dict=live, **more)


def _at_its_address(leaf):
    if not isinstance(leaf, torch.Tensor) or not leaf.nbytes:
        return leaf
    memory = (ctypes.c_char * leaf.nbytes).from_address(leaf.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(leaf.dtype).view(leaf.shape)


class StaysOnTheNetwork(HTTPTransport):
    def __init__(self, timeout, lanes, same_host=True, **more):
        del same_host
        super().__init__(timeout, lanes, same_host=False, **more)


def torchft_with_one_thread(timeout, lanes, **more):
    """Serves one connection after the other, so an idle first connection keeps all others waiting."""
    del more
    from torchft.checkpointing import HTTPTransport

    transport = HTTPTransport(timeout, lanes)
    server = transport._server
    server.process_request = partial(HTTPServer.process_request, server)
    return transport


def torchft_that_does_not_wait(timeout, lanes):
    """Does not wait for readers on withdrawal: the trainer writes over memory that is still being served."""
    from torchft.checkpointing import HTTPTransport

    class DoesNotWait(HTTPTransport):
        def disallow_checkpoint(self):
            pass

    return DoesNotWait(timeout, lanes)
