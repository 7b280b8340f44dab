"""Saves states while the trainer goes on: into shared memory first, from which another process writes them.

A save goes through four moments: its copy is begun; the process that writes has accepted it, so that it is not lost any
more; it is committed; its memory may be used again, which a keeper can put off. At most two saves are between the first
and the third moment (:data:`turns.GENERATIONS`), each with memory of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _validate
from .._reentry import CallLock
from ..errors import InvalidArgument, SystemRefused, TransportClosed, message_of
from ..memory.host_pool import Buffer
from ..memory.shared import NoRoom
from ..state.snapshot import StateSnapshot
from ..storage.folder_save import abandon
from ..storage.objects.place import ObjectPlace
from ..storage.places import any_place
from .futures import SaveFuture
from .handover import Handover
from .orders import Options, Order
from .ranks import Ranks
from .shared_stager import SharedStager
from .turns import Turns
from .writer import Delivery, Writer

if TYPE_CHECKING:
    from .keeper.client import Keeper

logger = logging.getLogger("tensorferry")

#: Seconds for which an interpreter that exits without ``close`` waits for saves; they go on without it after that.
_EXIT_WAIT_S = 60.0
#: The kinds of handovers.
_SAVE, _KEEP = "save", "keep"


class Saver:
    """Saves states in the background, for one rank.

    Args:
        ranks: who saves together
        options: how states are written
        stager: makes the copies
        keeper: also gets every state; ``None`` for none

    Raises:
        SystemRefused: the process that writes cannot be started
    """

    def __init__(self, ranks: Ranks, options: Options, stager: SharedStager, keeper: Keeper | None = None) -> None:
        self._ranks, self._options, self._stager, self._keeper = ranks, options, stager, keeper
        self._turns = Turns()
        self._writes: list[SaveFuture] = []
        #: The memory of what the keeper was offered and has not released, the oldest first.
        self._offered: list[list[Buffer]] = []
        self._offering = threading.RLock()
        self._writer = Writer()
        self._saving = CallLock("save() or close()")
        #: Saves whose copies a thread completes and hands over, in their order. No signal handler can interrupt that.
        self._copies: queue.SimpleQueue[tuple[Saver, _Save] | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=_copy, args=(self._copies,), name="tensorferry-stage", daemon=True)
        self._is_open, self._is_closed = True, False
        self._warned = False
        if _exits.is_set():
            self._turns.end()
        self._writer.start()
        try:
            self._copier.start()
        except RuntimeError as e:
            self._writer.close(0)
            raise SystemRefused(f"the thread that completes copies cannot be started: {e}") from e
        weakref.finalize(self, _let_finish, self._copies, self._writer).atexit = False
        _savers.add(self)

    @property
    def writer(self) -> Writer:
        """The process that writes."""
        return self._writer

    def save(self, state: Any, path: Any, step: int | None = None) -> tuple[SaveFuture, SaveFuture]:
        """Copies ``state``, and has it written into the folder ``path``.

        Returns:
            Two futures of ``None``: for when the state may change, since it is copied and the process that writes has
            accepted it; and for when the checkpoint is on the disk and committed.

        Raises:
            TransportClosed: it was closed, or the interpreter is exiting
            ForkedProcess: this is a forked child
            InvalidArgument: ``path`` or ``step`` cannot be used, or there is a keeper and ``path`` is in a store; a
                signal handler, a ``__del__`` or a callback calls it in the middle of a save of the same thread; or a
                callback of a future calls it
            TensorferryError: the state cannot be copied
            Exception: what a device reports when it copies
        """
        self._writer.check_process()
        if not self._is_open:
            raise TransportClosed("this checkpointer was closed: make a new one")
        self._turns.check()
        self._check_thread()
        folder = any_place(path, timeout=timedelta(seconds=self._options.patience))
        if self._keeper is not None and isinstance(folder, ObjectPlace):
            raise InvalidArgument(
                f"{folder}: a keeper holds what is saved into folders: save to a store with a checkpointer without one"
            )
        step = None if step is None else _validate.step_number(step)
        self._log_failures()
        if self._keeper is not None and isinstance(folder, Path):
            # By the folder itself, a keeper tells jobs apart. If it cannot be made, the save fails.
            with contextlib.suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
        with self._saving.held():
            order = Order(folder, self._ranks.new_save(step, folder), self._options)
            try:
                snapshot = self._stage(state)
            except BaseException as e:
                if order.save.world_size > 1:
                    abandon(folder, order.save, f"{type(e).__name__}: {e}")
                raise
            save = _Save(order, snapshot, self._turns)
            self._writes = [*(write for write in self._writes if not write.is_settled), save.written]
            self._copies.put((self, save))
        return save.staged, save.written

    def _check_thread(self) -> None:
        """Refuses calls that would wait for what their own thread has to do.

        Raises:
            InvalidArgument: this thread is in a save, or is one that runs the callbacks of futures
        """
        self._saving.check()
        if self._writer.is_listening or threading.current_thread() is self._copier:
            raise InvalidArgument(
                "save() and close() cannot be called in a callback of a save's future, whose thread they would wait "
                "for: let the callback wake a thread of your own"
            )

    def close(self) -> None:
        """Waits for all saves, ends the process that writes, releases the memory and closes the keeper.

        It may be called again.

        Raises:
            InvalidArgument: it would wait for ever: it is called in the middle of a save of the same thread, by a
                signal handler for example, or by a callback of a future
            ForkedProcess: this is a forked child
            Exception: the error of a save that has failed, at whose future nobody has looked; all is closed then
        """
        if self._is_closed:
            return
        self._writer.check_process()
        self._check_thread()
        self._is_open = False
        self._turns.wait_for_all(None)
        self._copies.put(None)
        self._writer.close()
        self._stager.close()
        if self._keeper is not None:
            self._keeper.close()
        # Not before: after a Ctrl-C, the next call goes on from here.
        self._is_closed = True
        self._raise_failures()

    def _stage(self, state: Any) -> StateSnapshot:
        """Waits for a turn, and copies the state; if memory is short, waits until others give some back."""
        self._turns.take()
        try:
            while True:
                try:
                    return self._stager.stage(state)
                except NoRoom:
                    # An earlier save may be about to give memory back, and the keeper has what it can do without.
                    if not (self._turns.wait_for_another() or self._keeper_lets_go() or self._leave_to_keeper()):
                        raise
        except BaseException:
            self._turns.give()
            raise

    def complete(self, save: _Save) -> None:
        """Completes the copy of a save, gives it to the process that writes, and offers it to the keeper.

        If the process cannot be given it, the save fails with that error, and is not offered.
        """
        snapshot = save.snapshot
        try:
            snapshot.complete()
            given = self._stager.handover(_SAVE, save.order.fields(), snapshot)
            self._writer.hand_over(Delivery(given, save.order, save.accept, save.finish))
        except BaseException as e:  # Its thread has nobody else to tell.
            self._abandon(save, e)
            return
        if self._keeper is not None:
            self._offer(self._keeper, given, snapshot)

    def _offer(self, keeper: Keeper, given: Handover, snapshot: StateSnapshot) -> None:
        """Offers a snapshot to the keeper, and holds its buffers for as long as the keeper has it."""
        buffers = snapshot.buffers()
        with self._offering:
            self._offered = [*filter(None, self._offered), buffers]
        try:
            keeper.offer(Handover(_KEEP, given.fields, given.rows, given.control, given.buffers), buffers.clear)
        except Exception as e:  # A keeper never hurts a trainer.
            buffers.clear()
            self._warn(e)

    def _keeper_lets_go(self) -> bool:
        """Asks the keeper to give back what memory it can do without; returns whether it did."""
        try:
            return self._keeper is not None and self._keeper.let_go()
        except Exception as e:  # As above.
            self._warn(e)
            return False

    def _leave_to_keeper(self) -> bool:
        """Leaves the oldest memory that the keeper holds on to to the keeper alone; returns whether there was any.

        The keeper may be stopped, or lend it to a process that reads it. So this trainer never uses it again, but does
        not count it as its own any more: what a keeper does is not to fail a save.
        """
        with self._offering:
            oldest = next(filter(None, self._offered), None)
        if oldest is None:
            return False
        for buffer in list(oldest):
            buffer.sound = False
        oldest.clear()
        return True

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            name = type(error).__name__
            logger.warning("the keeper cannot be used, saving goes on without it: %s: %s", name, message_of(error))

    def _abandon(self, save: _Save, error: BaseException) -> None:
        """Fails a save with ``error``, and tells the other ranks of it."""
        if save.order.save.world_size > 1:
            abandon(save.order.path, save.order.save, f"{type(error).__name__}: {error}")
        save.finish(error if isinstance(error, Exception) else SystemRefused(f"the save was interrupted: {error!r}"))

    def _failures(self) -> list[SaveFuture]:
        """Returns the futures of failed saves that nobody has looked at."""
        return [write for write in self._writes if write.done() and not write.is_settled]

    def _raise_failures(self) -> None:
        """Raises the errors of saves whose futures nobody has looked at, each once."""
        errors = [error for write in self._failures() if (error := write.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"A further save has failed: {type(other).__name__}: {other}")
            raise errors[0]

    def _log_failures(self) -> None:
        """Logs the errors of saves whose futures nobody has looked at, each once."""
        for write in self._failures():
            error = write.failure
            if error is not None and not write.is_logged:
                write.is_logged = True
                name = type(error).__name__
                logger.error("a save has failed, and nobody has asked its future: %s: %s", name, message_of(error))

    def finish_at_exit(self, deadline: float) -> None:
        """Waits for saves until ``deadline``, and leaves those that take longer to the process that writes.

        Those that it has not accepted by then are lost. Errors of saves at whose futures nobody has looked are logged.

        Threads that the interpreter does not wait for may still save: nothing would hear how that went, or pass it on.
        """
        self._turns.end()
        if not self._turns.wait_for_all(max(deadline - time.monotonic(), 0.0)):
            logger.warning("the trainer ends before its last checkpoint is written; the process that writes goes on")
        self._log_failures()
        self._writer.detach()


class _Save:
    """One save under way."""

    def __init__(self, order: Order, snapshot: StateSnapshot, turns: Turns) -> None:
        self.order = order
        self.staged, self.written = SaveFuture(), SaveFuture()
        self._snapshot: StateSnapshot | None = snapshot
        self._turns = turns
        for future in (self.staged, self.written):
            # From here on, nobody can cancel it.
            future.set_running_or_notify_cancel()

    @property
    def snapshot(self) -> StateSnapshot:
        """The copy, as long as it is needed."""
        assert self._snapshot is not None
        return self._snapshot

    def accept(self) -> None:
        """The process that writes holds the memory."""
        self.staged.set_result(None)

    def finish(self, told: dict[str, Any] | Exception) -> None:
        """Ends the save: gives memory and turn back first, so that whoever waits for the future finds them free."""
        self._snapshot = None
        self._turns.give()
        error = told if isinstance(told, Exception) else None
        for future in (self.staged, self.written):
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


def _copy(copies: queue.SimpleQueue[tuple[Saver, _Save] | None]) -> None:
    """Completes the copies of one :class:`Saver`, which this thread does not keep alive between them."""
    while (item := copies.get()) is not None:
        saver, save = item
        saver.complete(save)
        del item, saver, save


def _let_finish(copies: queue.SimpleQueue[Any], writer: Writer) -> None:
    copies.put(None)
    writer.close(0)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
#: Set when the interpreter exits.
_exits = threading.Event()


@atexit.register
def _finish_at_exit() -> None:
    _exits.set()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for saver in list(_savers):
        if saver.writer.is_own:
            saver.finish_at_exit(deadline)
