"""Transports that hang, crash, raise and lie, for tests of the fault suite: it must see each."""

from __future__ import annotations

import os
import time

import torch

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


def torchft_that_does_not_wait(timeout, lanes):
    """Its trainer goes on while readers are still served from its memory."""
    from torchft.checkpointing import HTTPTransport

    class DoesNotWait(HTTPTransport):
        def disallow_checkpoint(self):
            pass

    return DoesNotWait(timeout, lanes)
