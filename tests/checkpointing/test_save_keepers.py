"""Saves beside a keeper: whose memory is used again, and whose errors are heard."""

from __future__ import annotations

import contextlib

import pytest
import torch
from saves import MIB, WAIT_S, state_of

from tensorferry.checkpointing.orders import Options
from tensorferry.checkpointing.ranks import Ranks
from tensorferry.checkpointing.saving import Saver
from tensorferry.checkpointing.shared_stager import SharedStager
from tensorferry.memory.shared import NoRoom

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class _Keeper:
    """A keeper that counts, and keeps what it is offered until it is told to release."""

    def __init__(self, fails: bool = False) -> None:
        self.offered: list = []
        self.fails = fails
        self.closed = 0

    def offer(self, given, released) -> None:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        self.offered.append((given, released))

    def let_go(self) -> bool:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        if self.offered:
            self.offered.pop(0)[1]()
            return True
        return False

    def close(self) -> None:
        self.closed += 1


def saver(keeper: _Keeper, memory_limit: int | None = None):
    return contextlib.closing(Saver(Ranks(0, 1), Options(), SharedStager(memory_limit), keeper))


def test_memory_that_a_keeper_holds_is_not_used_again(tmp_path) -> None:
    keeper = _Keeper()
    with saver(keeper) as saves:
        for n in range(4):
            saves.save(state_of(n), tmp_path / str(n))[1].result(WAIT_S)
        while len(keeper.offered) < 4:
            pass
        for n in range(4):
            given, released = keeper.offered.pop(0)
            assert (given.kind, given.fields["path"]) == ("keep", str(tmp_path / str(n)))
            memory = torch.frombuffer(given.buffers[0], dtype=torch.float32)
            assert (memory[: MIB // 4] == n).all()
            del given, memory
            released()
        held = saves._stager.held
        saves.save(state_of(0), tmp_path / "0")[1].result(WAIT_S)
        assert saves._stager.held <= held
    assert keeper.closed == 1


def test_a_keeper_lets_go_of_memory_that_a_save_needs(tmp_path) -> None:
    keeper = _Keeper()
    with saver(keeper, 20 * MIB) as saves:
        for n in range(6):
            saves.save(state_of(n, 4), tmp_path / str(n))[1].result(WAIT_S)
        with pytest.raises(NoRoom):
            saves.save(state_of(1, 40), tmp_path / "x")
    assert not keeper.offered


def test_a_keeper_that_fails_never_reaches_the_trainer(tmp_path, caplog) -> None:
    with saver(_Keeper(fails=True)) as saves:
        for n in range(3):
            saves.save(state_of(n), tmp_path / str(n))[1].result(WAIT_S)
    assert [record.message for record in caplog.records if "keeper" in record.message] == [
        "the keeper cannot be used, saving goes on without it: ConnectionError: the keeper is gone"
    ]
