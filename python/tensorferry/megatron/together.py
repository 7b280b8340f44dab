"""Steps that all ranks of a job take together: if one of them fails, all of them raise.

Ranks first *meet*, by keys in the store of the process group: a rank that never comes, because it has raised an error
on its own or is dead, makes the others raise after a time, and leaves no collective half done. Then they exchange small
messages by collectives of the group. Those who wait for one look into the store as well: a collective in which a rank
dies fails on that rank's neighbours only, and they tell the others. A store that does not answer, because the rank that
hosts it is stopped, makes nobody wait longer than for the other ranks.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import TensorferryError
from ..net.store import StoreThread
from ..storage.places import AnyPlace, any_place
from .release import CheckpointingException

T = TypeVar("T")
R = TypeVar("R")

#: How long a rank waits for the others to begin the same save or load.
PATIENCE = timedelta(minutes=5)
#: Ranks with different releases of this package may take different steps.
_RELEASE = version("tensorferry")
#: Seconds after which the first rank has died, if it does not end a meeting in time.
_GRACE = 10
#: Seconds between two looks at what is waited for, at least and at most; in between, this part of the time waited.
_SOON, _LATE, _PART = 0.00005, 0.01, 0.05
#: Seconds between two looks for the word that the group is broken.
_LOOK = 0.25
#: Seconds that a store has to answer a look or take a word, once there is nothing else to wait for.
_ANSWER = 2


class Together:
    """The ranks that save or load a checkpoint together.

    Args:
        group: a process group; ``None`` means the default one. Without ``torch.distributed`` there is one rank
        patience: how long a rank waits for the others to begin
        within: those of a larger group, in the middle of a step: all ranks of this group are known to be here, and do
            not wait for each other if the larger group cannot go on

    Attributes:
        rank: the rank of this process in the group
        world: how many ranks there are
    """

    def __init__(self, group: Any = None, patience: timedelta = PATIENCE, within: Together | None = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._group = group
        self._patience = patience.total_seconds()
        self._has_met = within is not None
        self._within = within
        self._asking: StoreThread = StoreThread() if within is None else within._asking
        self._told: BaseException | None = None
        self.rank = dist.get_rank(group) if joined else 0
        self.world = dist.get_world_size(group) if joined else 1

    @property
    def coordinates(self) -> bool:
        """Whether this rank makes the decisions of all."""
        return self.rank == 0

    def step(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
        """Calls ``local`` on every rank, and ``decide`` with what all of them have returned, on the coordinator.

        Args:
            what: what is done, for messages: "cannot ..."; its first word is the same on all ranks, as is ``local``
            local: what each rank does
            decide: what the coordinator makes of it

        Returns:
            What ``decide`` has returned, on every rank.

        Raises:
            CheckpointingException: one of the calls has failed on one of the ranks; it is raised on all of them. Or
                a rank has not come, is gone, or does something else
            KeyboardInterrupt, SystemExit: one of the calls was interrupted so on this rank; the others raise
                ``CheckpointingException``
        """
        with self.counting_on_each_other():
            return self._step(what, local, decide)

    def _step(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
        """Does what :meth:`step` says: gathers values or errors on the coordinator, and spreads its answer."""
        answered: tuple[R, bytes] | None = None
        value, error = _attempt(local)
        if self.world == 1:
            if error is None:
                reply, error = _attempt(lambda: decide([value]))  # type: ignore[list-item]
                if error is None:
                    return reply  # type: ignore[return-value]
            self._raise(f"cannot {what}: {_error_text(error)}", error)
        packed: bytes | None = None
        if error is None:
            packed, error = _attempt(lambda: pickle.dumps(value))
        does = (what.partition(" ")[0], local.__qualname__)
        sent = (_RELEASE, does, packed, None if error is None else _error_text(error))
        with self._in_contact(what, error):
            told = self._gathered(what, pickle.dumps(sent))
        message: bytes | None = None
        if told is not None:
            failures = self._failures(told)
            if not failures:

                def answer() -> tuple[R, bytes]:
                    made = decide([pickle.loads(packed) for _, _, packed, _ in told])
                    return made, pickle.dumps(made)

                answered, error = _attempt(answer)
                if error is not None:
                    failures = {self.rank: _error_text(error)}
            message = pickle.dumps((failures, b"" if answered is None else answered[1]))
        with self._in_contact(what, error):
            failures, packed = pickle.loads(self._spread(message))
        if failures:
            self._raise(_failed(what, failures, self.world), error)
        return answered[0] if answered is not None else pickle.loads(packed)

    def every(self, what: str, local: Callable[[], T]) -> list[T]:
        """Calls ``local`` on every rank; returns on every rank what all of them have returned.

        Raises:
            CheckpointingException: as for :meth:`step`
        """
        return self.step(what, local, lambda values: values)

    @contextlib.contextmanager
    def counting_on_each_other(self) -> Iterator[None]:
        """While the block runs, the other ranks wait for this one, at most for the time-out of the process group.

        What ends the block on this rank alone, at any place, is told to them once the ranks have met: they wait no
        longer, and raise. A ``CheckpointingException`` is not told: only steps may raise it, which tell all ranks.
        """
        try:
            yield
        except CheckpointingException:
            # Of a step, which has told all ranks.
            raise
        except BaseException as e:
            if self._has_met and self.world > 1 and e is not self._told:
                self._break(f"{type(e).__name__} on rank {self.rank}")
            raise

    def _failures(self, told: list[Any]) -> dict[int, str]:
        """Returns what has failed, by rank; ranks that do not do the same as this one have failed."""
        release, (verb, function), *_ = told[self.rank]
        failures = {}
        for rank, (other, does, _, text) in enumerate(told):
            if other != release:
                text = f"it has tensorferry {other}, and rank {self.rank} has {release}: install one on all ranks"
            elif does != (verb, function):
                apart = (
                    f"and rank {self.rank} to {verb}" if does[0] != verb else f"as is rank {self.rank}, in another way"
                )
                text = f"it is about to {does[0]}, {apart}: call one function on all ranks, with the same strategy"
            if text is not None:
                failures[rank] = text
        return failures

    def _gathered(self, what: str, sent: bytes) -> list[Any] | None:
        """Sends bytes to the coordinator, and returns on it what all ranks have sent, unpickled."""
        if not self._has_met:
            self._meet(what)
            self._has_met = True
        device = self._device()
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world)]
        own = torch.tensor([len(sent)], dtype=torch.int64, device=device)
        self._wait(lambda: dist.all_gather(sizes, own, group=self._group, async_op=True))
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        padded = padded.to(device)
        received = [torch.empty_like(padded) for _ in lengths] if self.coordinates else None
        self._wait(lambda: dist.gather(padded, received, dst=self._first(), group=self._group, async_op=True))
        if received is None:
            return None
        return [pickle.loads(bytes(one[:size].cpu().numpy())) for one, size in zip(received, lengths, strict=True)]

    def _spread(self, message: bytes | None) -> bytes:
        """Sends the coordinator's bytes to all ranks."""
        device = self._device()
        size = torch.tensor([len(message or b"")], dtype=torch.int64, device=device)
        self._wait(lambda: dist.broadcast(size, self._first(), group=self._group, async_op=True))
        held = torch.empty(int(size), dtype=torch.uint8)
        if message is not None:
            held = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        held = held.to(device)
        self._wait(lambda: dist.broadcast(held, self._first(), group=self._group, async_op=True))
        return bytes(held.cpu().numpy())

    def _first(self) -> int:
        """Returns the coordinator's rank in the job."""
        return dist.get_global_rank(self._group, 0) if self._group is not None else 0

    def _device(self) -> torch.device:
        """Returns where the group's collectives take their tensors; host memory, if they do."""
        backends = str(dist.get_backend_config(self._group))
        return torch.device("cpu" if "cpu:" in backends else backends.partition(":")[0])

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begins a collective, and waits for it, or for another rank's word that it will not end."""
        work = begin()
        looks: list[Future[None]] = []

        def has_ended() -> bool:
            if looks and looks[0].done():
                looks.pop().result()
            return bool(work.is_completed())

        def look() -> None:
            if not looks:
                looks.append(self._asking.ask(self._check_broken))

        try:
            self._wait_until(has_ended, look)
        finally:
            # The thread is quiet when nothing is waited for, unless the store does not answer.
            for one in looks:
                with contextlib.suppress(TimeoutError):
                    one.exception(_ANSWER)
        work.wait()

    def _wait_until(self, is_there: Callable[[], bool], look: Callable[[], None], deadline: float = math.inf) -> bool:
        """Waits until ``is_there`` is true; returns false once the time ``deadline`` is past.

        Meanwhile ``look`` is called every few moments. What either raises ends the wait.
        """
        began = looked = time.monotonic()
        # One look at a time: while a store waits by itself, other threads of the process cannot use it.
        while not is_there():
            now = time.monotonic()
            if now > deadline:
                return False
            if now - looked > _LOOK:
                looked = now
                look()
            time.sleep(min(max(_PART * (now - began), _SOON), _LATE))
        return True

    def _raise(self, text: str, error: BaseException | None) -> NoReturn:
        """Raises ``text``, which all ranks know, as Megatron's exception; an interrupt of this rank is raised again."""
        if error is not None and _interrupts(error):
            self._told = error
            raise error
        raise CheckpointingException(text) from error

    @contextlib.contextmanager
    def _in_contact(self, what: str, own: BaseException | None) -> Iterator[None]:
        """While the block runs, ranks exchange messages; if it fails, the other ranks are told that nobody can go on.

        Args:
            what: what is done, for messages
            own: what has failed on this rank before, and is to be told; an interrupt is raised again in any case

        Raises:
            CheckpointingException: it has failed
        """
        try:
            yield
        except CheckpointingException:
            # Some did not come, and all who did raise this.
            if own is not None and _interrupts(own):
                raise own from None
            raise
        except BaseException as e:
            text = str(e)
            if not isinstance(e, _Broken):
                text = f"{type(e).__name__} on rank {self.rank}: {e}"
                self._break(text)
            if own is not None and _interrupts(own):
                raise own from None
            if _interrupts(e):
                raise
            if isinstance(e, _Silent):
                raise CheckpointingException(f"cannot {what}: {e}. Restart the job") from None
            raise CheckpointingException(
                f"cannot {what}: the ranks have lost contact, since one of them has died or was interrupted ({text}). "
                "Restart the job"
            ) from e

    def _meet(self, what: str) -> None:
        """Waits until all ranks of the group are here.

        The coordinator opens a meeting with a number that no other has had, waits for the others to join, and closes
        it. The others join the last meeting that is open. So ranks that have been at different meetings, because one
        of them had failed elsewhere, find each other the next time.

        Raises:
            CheckpointingException: a rank has not come; it is raised on all that have
            _Silent: the store does not answer
            _Broken: a rank has said that the group is broken
        """
        over = threading.Event()
        answer = self._asking.ask(lambda: self._missing(over))
        # The others wait for the coordinator, which waits for others.
        seconds = self._patience + _GRACE if self.coordinates else 2 * self._patience + _GRACE
        try:
            missing = answer.result(seconds)
        except TimeoutError:
            if answer.done():
                raise
            raise _Silent(
                f"the store of the process group has not answered within {seconds:g} s: the process that hosts it, "
                "rank 0 or torchrun, is stopped or cannot be reached"
            ) from None
        finally:
            over.set()
        if missing:
            raise CheckpointingException(
                f"cannot {what}: {missing} within {self._patience:g} s. If it has raised an error on its own, that "
                "says why; megatron-core's save and load check some things on one rank alone, those of "
                "tensorferry.megatron tell all ranks"
            )

    def _missing(self, over: threading.Event) -> str:
        """Holds a meeting or goes to it, unless it is ``over`` for this rank; returns who is missing."""
        self._check_broken()
        return self._open(over) if self.coordinates else self._join(over)

    def _open(self, over: threading.Event) -> str:
        """Holds a meeting; returns who is missing."""
        store, name = _get_default_store(), self._name()
        number = store.add(f"{name}/meetings", 1)
        others = range(1, self.world)
        store.set(f"{name}/{number}/open", b"")
        deadline = time.monotonic() + self._patience
        late = [rank for rank in others if not self._is_set(f"{name}/{number}/{rank}", deadline, over)]
        missing = f"rank {', '.join(map(str, late[:8]))}{', ...' if late[8:] else ''} did not come" if late else ""
        store.set(f"{name}/{number}/closed", missing.encode())
        if not late:
            # All who were at the last meeting have left it.
            for key in ("open", "closed", *others):
                store.delete_key(f"{name}/{number - 1}/{key}")
        return missing

    def _join(self, over: threading.Event) -> str:
        """Goes to a meeting; returns who is missing."""
        store, name = _get_default_store(), self._name()
        deadline = time.monotonic() + self._patience
        number = max(store.add(f"{name}/meetings", 0), 1)
        while any(store.check([f"{name}/{number}/{key}"]) for key in (self.rank, "closed")):
            number += 1
        if not self._is_set(f"{name}/{number}/open", deadline, over):
            return "rank 0 did not come"
        store.set(f"{name}/{number}/{self.rank}", b"")
        # The coordinator may have opened it just now, and waits for others.
        if not self._is_set(f"{name}/{number}/closed", time.monotonic() + self._patience + _GRACE, over):
            return "rank 0 did not go on"
        return bytes(store.get(f"{name}/{number}/closed")).decode()

    def _is_set(self, key: str, deadline: float, over: threading.Event) -> bool:
        """Waits until a key is in the store; returns whether it is.

        Raises:
            _Broken: this rank does not wait any more, or a rank has said that the group is broken
        """
        store = _get_default_store()

        def is_there() -> bool:
            if over.is_set():
                raise _Broken("this rank has left")
            return bool(store.check([key]))

        return self._wait_until(is_there, self._check_broken, deadline)

    def _check_broken(self) -> None:
        """Raises _Broken if a rank has said that this group is broken, or the larger one."""
        store, key = _get_default_store(), f"{self._name()}/broken"
        if store.check([key]):
            raise _Broken(bytes(store.get(key)).decode())
        if self._within is not None:
            self._within._check_broken()

    def _break(self, text: str) -> None:
        """Tells the other ranks that nobody can go on in this group."""
        told = self._asking.ask(lambda: _get_default_store().set(f"{self._name()}/broken", text.encode()))
        with contextlib.suppress(Exception):
            told.result(_ANSWER)

    def _name(self) -> str:
        """Returns the beginning of the group's keys; groups that have no rank in common may have the same name."""
        group = self._group if self._group is not None else dist.group.WORLD
        return f"tensorferry/{group.group_name}/{self._first()}"


class OfRanks:
    """What the strategies share: their place, and that all ranks call them and tell each other what fails.

    Attributes:
        process_group: the ranks; ``None`` means all
        timeout: how long a rank waits for the others to begin
    """

    process_group: Any
    timeout: timedelta
    _met: Together | None = None
    _store_options: Mapping[str, Any] | None = None

    def place(self, checkpoint_dir: str | Path) -> AnyPlace:
        """Returns the folder of a checkpoint, or its place in a store.

        Raises:
            InvalidArgument: the path or the URL cannot be used
            SystemRefused: it is relative, and the current folder is gone
        """
        return any_place(checkpoint_dir, "checkpoint_dir", store_options=self._store_options)

    def _ranks(self) -> Together:
        return Together(self.process_group, self.timeout) if self._met is None else self._met

    @contextlib.contextmanager
    def among(self, ranks: Together) -> Iterator[None]:
        """While the block runs, the strategy takes its steps with ``ranks``, which need not meet again."""
        self._met = ranks
        try:
            yield
        finally:
            self._met = None


class _Broken(Exception):
    """A rank has said that the group is broken."""


class _Silent(Exception):
    """The store does not answer."""


def _attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return call(), None
    except BaseException as e:  # Ctrl-C, too: the other ranks have to know.
        return None, e


def _interrupts(error: BaseException) -> bool:
    """Whether an error, such as KeyboardInterrupt, is to end more than the step in which it came."""
    return not isinstance(error, (Exception, CheckpointException))


def _error_text(error: BaseException | None) -> str:
    assert error is not None
    if isinstance(error, (TensorferryError, CheckpointingException)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _failed(what: str, failures: dict[int, str], world: int) -> str:
    """Returns the message for all ranks. Ranks that have failed for the same reason are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    named = []
    for text, ranks in list(by_text.items())[:4]:
        if len(ranks) == world:
            named.append(text)
        else:
            named.append(f"{text} (rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})")
    return f"cannot {what}: {'; '.join(named)}"
