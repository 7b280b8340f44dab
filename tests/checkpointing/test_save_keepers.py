"""``AsyncCheckpointer`` beside a keeper: whose memory is used again, and whose errors are heard."""

from __future__ import annotations

import contextlib

import pytest
import torch
from saves import MIB, WAIT_S, state_of

from tensorferry.checkpointing import (
    AsyncCheckpointer,
)
from tensorferry.checkpointing import checkpointers as module
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


def test_memory_that_a_keeper_holds_is_not_used_again(opened, tmp_path) -> None:
    keeper = _Keeper()
    checkpointer = opened(keeper=keeper)
    for n in range(4):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
    for n in range(4):
        given, released = keeper.offered.pop(0)
        assert (given.kind, given.fields["path"]) == ("keep", str(tmp_path / str(n)))
        memory = torch.frombuffer(given.buffers[0], dtype=torch.float32)
        assert (memory[: MIB // 4] == n).all()
        del given, memory
        released()
    held = checkpointer._saver._stager.held
    for n in range(4):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
        keeper.offered.pop()[1]()
    assert checkpointer._saver._stager.held <= held
    checkpointer.close()
    assert keeper.closed == 1


def test_a_keeper_lets_go_of_memory_that_a_save_needs(opened, tmp_path) -> None:
    keeper = _Keeper()
    checkpointer = opened(keeper=keeper, memory_limit=20 * MIB)
    for n in range(6):
        checkpointer.save(tmp_path / str(n), state_of(n, 4))[1].result(WAIT_S)
    assert len(keeper.offered) == 5
    with pytest.raises(NoRoom):
        checkpointer.save(tmp_path / "x", state_of(1, 40))
    assert not keeper.offered


def test_a_keeper_that_fails_never_reaches_the_trainer(opened, tmp_path, caplog) -> None:
    checkpointer = opened(keeper=_Keeper(fails=True))
    for n in range(3):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
    assert [record.message for record in caplog.records if "keeper" in record.message] == [
        "the keeper cannot be used, saving goes on without it: ConnectionError: the keeper is gone"
    ]


def test_a_connection_to_a_keeper_is_asked_for_by_name(monkeypatch) -> None:
    keeper = _Keeper()
    monkeypatch.setattr(module, "_connected", lambda name: keeper if name == "node" else None)
    with contextlib.closing(AsyncCheckpointer(keeper="node")) as checkpointer:
        assert checkpointer._keeper is keeper
