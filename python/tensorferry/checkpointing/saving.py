"""Saves states while the trainer goes on: into shared memory first, from which another process writes them.

A save goes through four moments: its copy is begun; the process that writes has accepted it, so that it is not lost any
more; it is committed; its memory may be used again, which a keeper can put off. At most two saves are between the first
and the third moment (:data:`GENERATIONS`), each with memory of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import _validate
from .._reentry import CallLock
from ..errors import InvalidArgument, SystemRefused, TransportClosed, message_of
from ..memory.accelerator import ACCELERATOR, Accelerator
from ..memory.host_pool import Buffer
from ..memory.shared import Budget, NoRoom, SharedHostMemory
from ..memory.staging import Stager
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..state.ranks import WITHOUT_NUMPY, lack_numpy
from ..state.snapshot import StateSnapshot
from ..storage import folder as folders
from ..storage.folder import KnownSaves, SaveId
from ..storage.places import place_of
from .handover import Handover
from .writer import Pending, Writer
from .writer_process import Order

logger = logging.getLogger("tensorferry")

#: How many saves may be unfinished: one is written while the next is copied.
GENERATIONS = 2
#: Seconds for which an interpreter that exits without ``close`` waits for saves; they go on without it after that.
_EXIT_WAIT_S = 60.0
#: The kinds of handovers.
_SAVE, _KEEP = "save", "keep"
#: What is wrong with a call in a callback of a future that would wait for ever.
_IN_CALLBACK = (
    "{} cannot be called in a callback of a save's future: the thread that runs callbacks is the one that hears how "
    "saves went. Let the callback wake a thread of your own"
)


class Keeper(Protocol):
    """What keeps staged states in memory, beside the process that writes them."""

    def offer(self, given: Handover, released: Callable[[], None]) -> None:
        """Offers a state; never raises and never waits long.

        Args:
            given: the state, and whose it is: the fields of an :class:`Order`. It holds the memory, so it must be gone
                when ``released`` is called
            released: to be called once, on any thread: when the state is refused, evicted, or the keeper is gone
        """

    def let_go(self) -> bool:
        """Asks for the release of the oldest state, because memory is short; returns whether one was released."""

    def close(self) -> None:
        """Ends the connection; states that are kept stay."""


class Ranks:
    """The processes that save together.

    Args:
        rank: the rank of this process; by default that of ``torch.distributed``, or 0 without it
        world_size: how many there are; likewise
        agree: returns on every rank what rank 0 passes to it; by default a broadcast of ``torch.distributed``
        group: the process group of the broadcast

    Raises:
        InvalidArgument: the arguments do not make sense, or several ranks have no way to agree
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        agree: Callable[[Any], Any] | None = None,
        group: Any = None,
    ) -> None:
        dist = torch.distributed
        started = dist.is_available() and dist.is_initialized()
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank and world_size go together")
        if rank is None or world_size is None:
            rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if started else (0, 1)
        self.world_size = _validate.integer("world_size", world_size, 1)
        self.rank = _validate.integer("rank", rank, 0, self.world_size - 1)
        self._agree = _validate.function("agree", agree)
        self._group = group
        self._saves = KnownSaves()
        if self.world_size > 1 and agree is None and not (started and dist.get_world_size(group) == self.world_size):
            raise InvalidArgument(
                f"{self.world_size} ranks have to agree on each save: initialise torch.distributed with as many, or "
                "pass agree=, a function that returns on every rank what rank 0 passes to it"
            )

    def new_save(self, step: int | None, folder: Path, known: Iterable[int] = ()) -> SaveId:
        """Returns the id of a new save into ``folder``, after agreeing on it with all other ranks.

        It begins after the saves that rank 0 finds in the folder and in the folders of its series.

        Args:
            step: the number that the caller gave the state
            folder: the folder
            known: when other saves began after which it is to begin; those that rank 0 passes count
        """
        if self.rank != 0:
            own = SaveId.new(self.rank, self.world_size, step)
        else:
            own = SaveId.new(0, self.world_size, step, [*self._saves.began(folder), *known])
            self._saves.add(own.began)
        if self.world_size == 1:
            return own
        agreed = self.from_first([own.save, own.began])
        return SaveId(str(agreed[0]), int(agreed[1]), self.rank, self.world_size, step)

    def gather(self, value: Any) -> list[Any] | None:
        """Returns what each rank passes, by rank; ``None`` where ranks agree by a function, which cannot collect."""
        if self.world_size == 1:
            return [value]
        if self._agree is not None:
            return None
        self._check_numpy()
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _check_numpy(self) -> None:
        if lack_numpy(self._group):
            raise InvalidArgument(WITHOUT_NUMPY)

    def from_first(self, value: Any) -> Any:
        """Returns on every rank what rank 0 passes."""
        if self.world_size == 1:
            return value
        if self._agree is not None:
            return self._agree(value)
        self._check_numpy()
        dist = torch.distributed
        values = [value]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(values, src=first, group=self._group)
        return values[0]


class SaveFuture(Future[Any]):
    """A standard future that notes whether anyone has asked it how the save went."""

    seen = False

    def result(self, timeout: float | None = None) -> Any:
        """As for ``Future``."""
        self.seen = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As for ``Future``."""
        self.seen = True
        return super().exception(timeout)

    @property
    def is_settled(self) -> bool:
        """Whether its outcome needs no further report: it succeeded, or somebody has read its error."""
        return self.done() and (self.seen or super().exception() is None)


class _Turns:
    """Counts the saves that are unfinished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def take(self, may_wait: bool) -> None:
        """Waits until another save may begin.

        Raises:
            InvalidArgument: it would have to wait, and may not
        """
        with self._changed:
            if not may_wait and self._count >= GENERATIONS:
                raise InvalidArgument(_IN_CALLBACK.format("a save that has to wait for an earlier one"))
            self._changed.wait_for(lambda: self._count < GENERATIONS)
            self._count += 1

    def give(self) -> None:
        """A save is over."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_another(self) -> bool:
        """Waits until a save is over besides the calling one; false if there is none."""
        with self._changed:
            count = self._count
            if count < 2:
                return False
            self._changed.wait_for(lambda: self._count < count)
            return True

    @property
    def is_any_taken(self) -> bool:
        """Whether a save is unfinished."""
        return self._count > 0

    def wait_for_all(self, timeout: float | None) -> bool:
        """Waits until all saves are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout)


class SharedStager:
    """Makes snapshots of states in memory that other processes can map.

    Args:
        memory_limit: bytes of shared memory that there may be at a time; ``None`` allows what is available
        accelerator: the accelerators, or a stand-in
        allowed: what a load will allow; globals that it does not are warned of
    """

    def __init__(
        self, memory_limit: int | None = None, accelerator: Accelerator = ACCELERATOR, allowed: Allowed | None = None
    ) -> None:
        if memory_limit is not None:
            _validate.integer("memory_limit", memory_limit, 1)
        self._budget = Budget(memory_limit)
        self._stager = Stager(
            accelerator,
            pinned=SharedHostMemory(accelerator, self._budget),
            pageable=SharedHostMemory(None, self._budget),
        )
        self._refusals = RefusalWarnings(allowed or Allowed(), REFUSED_LATER)

    @property
    def held(self) -> int:
        """Bytes of shared memory that are used, or kept for the next save."""
        return self._budget.held

    def stage(self, state: Any) -> StateSnapshot:
        """Returns a snapshot; what lies on the host is copied, ``complete`` copies what lies on accelerators.

        Raises:
            NoRoom: there is not enough memory
            UnsupportedLeaf: a leaf cannot be saved
            InvalidArgument: a graph is being captured on a device that holds a part of the state
        """
        snapshot = StateSnapshot(state, self._stager, "copy")
        self._refusals.warn(snapshot.globals)
        return snapshot

    def handover(self, kind: str, fields: dict[str, Any], snapshot: StateSnapshot) -> Handover:
        """Returns what other processes get of a complete snapshot."""
        container = snapshot.container()
        buffers = [self._budget.find(buffer.address) for buffer in snapshot.buffers()]
        return Handover(kind, fields, container.rows, container.control, buffers)

    def close(self) -> None:
        """Releases the memory that is not in use."""
        self._stager.close()


class Options:
    """How states are written.

    Args:
        threads: threads with which a rank writes; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses, see ``FileWriter``
        keep_last: how many checkpoints of a folder's series stay, see ``storage/folder.py``; ``None`` keeps all
        patience: seconds without a sign of life of another rank after which a save has failed

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        cached: bool | None = None,
        keep_last: int | None = None,
        patience: float = 600.0,
    ) -> None:
        self.threads = None if threads is None else _validate.integer("threads", threads, 1)
        self.cached = None if cached is None else _validate.boolean("cached", cached)
        self.keep_last = None if keep_last is None else _validate.integer("keep_last", keep_last, 1)
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 1e9:
            raise InvalidArgument(f"patience must be a positive number of seconds, not {_validate.brief(patience)}")
        self.patience = float(patience)

    def order(self, folder: Path, save: SaveId) -> Order:
        """Returns the order to write one save."""
        return Order(
            str(folder),
            save.save,
            save.began,
            save.rank,
            save.world_size,
            save.step,
            self.threads,
            self.cached,
            self.patience,
            self.keep_last,
        )


class Staged(SaveFuture):
    """A copy that was begun, and is complete when this future is done.

    Attributes:
        snapshot: the copy
        stager: who makes it
    """

    def __init__(self, snapshot: StateSnapshot, stager: SharedStager) -> None:
        super().__init__()
        self.snapshot, self.stager = snapshot, stager

    @property
    def failure(self) -> BaseException | None:
        """Why the copy could not be made, once it is done."""
        return Future.exception(self)


class Saver:
    """Saves states in the background, for one rank.

    Args:
        ranks: who saves together
        options: how states are written
        stager: makes the copies
        keeper: also gets every state; ``None`` for none
    """

    def __init__(self, ranks: Ranks, options: Options, stager: SharedStager, keeper: Keeper | None = None) -> None:
        self._ranks, self._options, self._stager, self._keeper = ranks, options, stager, keeper
        self._turns = _Turns()
        self._writes: list[SaveFuture] = []
        #: The memory of what the keeper was offered and has not released, the oldest first.
        self._offered: list[list[Buffer]] = []
        self._offering = threading.RLock()
        self._writer = Writer()
        self._saving = CallLock("save() or close()")
        self._is_open = True
        self._warned = False
        self._writer.start()
        weakref.finalize(self, self._writer.close, 0).atexit = False
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
            TransportClosed: it was closed
            InvalidArgument: a signal handler, a ``__del__`` or a callback calls it in the middle of a save of the same
                thread; or a callback of a future calls it that would have to wait
            TensorferryError: the state cannot be copied; or an earlier save has failed and nobody has looked at its
                future: then nothing is saved, and the next call saves again
        """
        return self._begin(path, step, lambda: (self._stage(state), None))

    def write_staged(self, staged: Staged, path: Any, step: int | None = None) -> SaveFuture:
        """As :meth:`save`, for a state whose copy was begun elsewhere; returns the second future."""

        def take() -> tuple[StateSnapshot, Staged]:
            self._turns.take(not self._writer.is_listening)
            return staged.snapshot, staged

        return self._begin(path, step, take)[1]

    def _begin(
        self, path: Any, step: int | None, stage: Callable[[], tuple[StateSnapshot, Staged | None]]
    ) -> tuple[SaveFuture, SaveFuture]:
        self._writer.check_process()
        if not self._is_open:
            raise TransportClosed("this checkpointer was closed: make a new one")
        folder = place_of(path)
        step = None if step is None else _validate.step_number(step)
        with self._alone():
            order = self._options.order(folder, self._ranks.new_save(step, folder, self._begun(folder)))
            try:
                self._raise_unseen()
                snapshot, staged = stage()
            except BaseException as e:
                if order.world_size > 1:
                    folders.abandon(folder, order.save, f"{type(e).__name__}: {e}")
                raise
            one = _Save(order, snapshot, self._stager if staged is None else staged.stager, self._turns)
            self._writes = [write for write in self._writes if not write.is_settled]
            self._writes.append(one.written)
            if staged is not None:
                staged.add_done_callback(lambda _: self._go_on(one, staged.failure))
            elif snapshot.is_complete:
                self._pass_on(one)
            else:
                name = "tensorferry-stage"
                threading.Thread(target=self._complete, args=(one,), name=name, daemon=True).start()
        return one.staged, one.written

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While the block runs, no other save begins."""
        self._saving.check()
        if self._writer.is_listening:
            # The save that is under way may wait for what this thread has to hear.
            if not self._saving.reentrant.acquire(blocking=False):
                raise InvalidArgument(_IN_CALLBACK.format("save() while another thread is in save()"))
            try:
                yield
            finally:
                self._saving.reentrant.release()
            return
        with self._saving.held():
            yield

    def close(self) -> None:
        """Waits for all saves, ends the process that writes, and releases the memory. It may be called again.

        Raises:
            InvalidArgument: it would wait for ever: it is called in the middle of a save of the same thread, by a
                signal handler for example, or by a callback of a future while another save is unfinished
            TensorferryError: a save has failed, and nobody has looked at its future
        """
        if not self._is_open:
            return
        self._writer.check_process()
        self._saving.check()
        if self._writer.is_listening and self._turns.is_any_taken:
            raise InvalidArgument(_IN_CALLBACK.format("close() while another save is unfinished"))
        self._is_open = False
        self._turns.wait_for_all(None)
        self._writer.close()
        self._stager.close()
        if self._keeper is not None:
            self._keeper.close()
        self._raise_unseen()

    def _stage(self, state: Any) -> StateSnapshot:
        self._turns.take(not self._writer.is_listening)
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

    def _complete(self, one: _Save) -> None:
        try:
            one.snapshot.complete()
        except BaseException as e:  # A thread of its own has nobody else to tell.
            self._abandon(one, e)
            return
        self._pass_on(one)

    def _go_on(self, one: _Save, error: BaseException | None) -> None:
        if error is None:
            self._pass_on(one)
        else:
            self._abandon(one, error)

    def _pass_on(self, one: _Save) -> None:
        snapshot = one.snapshot
        try:
            given = one.stager.handover(_SAVE, one.order.fields(), snapshot)
            self._writer.hand_over(Pending(given, one.order, one.accept, one.finish))
        except BaseException as e:
            self._abandon(one, e)
            if not isinstance(e, Exception):
                raise
            return
        if self._keeper is not None:
            self._offer(self._keeper, given, snapshot)

    def _begun(self, folder: Path) -> list[int]:
        """Returns when those saves of this job began that the keeper has; a new one comes after them, by rank 0."""
        begun = getattr(self._keeper, "begun", None) if self._ranks.rank == 0 else None
        return [] if begun is None else list(begun(folder))

    def _offer(self, keeper: Keeper, given: Handover, snapshot: StateSnapshot) -> None:
        # While the keeper has it, no buffer is used again.
        held = snapshot.buffers()
        with self._offering:
            self._offered = [*filter(None, self._offered), held]
        try:
            keeper.offer(Handover(_KEEP, given.fields, given.rows, given.control, given.buffers), held.clear)
        except Exception as e:  # A keeper never hurts a trainer.
            held.clear()
            self._warn(e)

    def _keeper_lets_go(self) -> bool:
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

    def _abandon(self, one: _Save, error: BaseException) -> None:
        if one.order.world_size > 1:
            folders.abandon(Path(one.order.path), one.order.save, f"{type(error).__name__}: {error}")
        one.finish(error if isinstance(error, Exception) else SystemRefused(f"the save was interrupted: {error!r}"))

    def _raise_unseen(self) -> None:
        unseen = [write for write in self._writes if write.done() and not write.is_settled]
        errors = [error for write in unseen if (error := write.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"A further save has failed: {type(other).__name__}: {other}")
            raise errors[0]

    def finish_at_exit(self, deadline: float) -> None:
        """Waits for saves until ``deadline``, and leaves those that take longer to the process that writes."""
        if not self._turns.wait_for_all(max(deadline - time.monotonic(), 0.0)):
            logger.warning("the trainer ends before its last checkpoint is written; the process that writes goes on")
        try:
            self._raise_unseen()
        except Exception as e:
            logger.error("a save has failed, and nobody has asked its future: %s: %s", type(e).__name__, message_of(e))
        self._writer.detach()


class _Save:
    """One save under way."""

    def __init__(self, order: Order, snapshot: StateSnapshot, stager: SharedStager, turns: _Turns) -> None:
        self.order, self.stager = order, stager
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
        """The save is over; memory and turn go first, so that whoever waits for the future finds them free."""
        self._snapshot = None
        self._turns.give()
        error = told if isinstance(told, Exception) else None
        for future in (self.staged, self.written):
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


@atexit.register
def _finish_at_exit() -> None:
    deadline = time.monotonic() + _EXIT_WAIT_S
    for saver in list(_savers):
        if saver.writer.is_own:
            saver.finish_at_exit(deadline)
