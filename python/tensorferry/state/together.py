"""Steps that all ranks of a job take together: if one of them fails, all of them raise.

Ranks tell each other what they have by keys in the store of the process group. In each step, every rank sets a key of
its own, and the first one, which makes the decisions, sets a key with the answer to all. A key that is not set in time
is an error that names the rank. A rank that is interrupted between two steps sets its key of the next one. So no
collective is left half done. A store that does not answer, because the rank that hosts it is stopped, makes nobody wait
longer than for the other ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import RankFailed, TensorferryError
from ..net.store import StoreThread

T = TypeVar("T")
R = TypeVar("R")

#: Ranks with different releases of this package may take different steps.
_RELEASE = version("tensorferry")
#: Seconds that the first rank has to say who is missing, and the store to answer, once nothing else is waited for.
_GRACE = 5.0
#: Seconds between two looks for a key, at least and at most; in between, this part of the time waited.
_SOON, _LATE, _PART = 0.00005, 0.01, 0.05
#: Bytes of a value in a store at most: torch's TCPStore takes 8 MiB.
_PIECE = 4 << 20
#: The keys that were left when a group was last together, by store and group, on its first rank. The same group may be
#: together within itself, with other keys.
_left: weakref.WeakKeyDictionary[Any, dict[tuple[str, bool], list[str]]] = weakref.WeakKeyDictionary()


class Together:
    """The ranks that save or load a checkpoint together.

    Args:
        group: a process group; ``None`` means the default one. Without ``torch.distributed`` there is one rank
        patience: how long a rank waits for the others to begin; afterwards, and by default, it waits as long as the
            group's own time-out
        within: those of a larger group, in the middle of a step: all ranks of this group are known to be here

    Attributes:
        rank: the rank of this process in the group
        world: how many ranks there are
        error: the class of the errors that steps raise
        hint: what is said of ranks that do not come
    """

    error: type[Exception] = RankFailed
    hint = "If it has raised an error on its own, that says why"

    def __init__(self, group: Any = None, patience: timedelta | None = None, within: Together | None = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._group = group
        self._patience = patience
        self._asking: StoreThread = StoreThread() if within is None else within._asking
        self._is_within = within is not None
        self._number = 0
        self.rank = dist.get_rank(group) if joined else 0
        self.world = dist.get_world_size(group) if joined else 1
        #: The beginning of the keys of these steps; ``None`` until the ranks have met.
        self._keys: str | None = None
        if within is not None and within._keys is not None:
            self._keys = f"{within._keys}/{within._number}/{self._name()}"

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
            RankFailed: one of the calls has failed on one of the ranks; it is raised on all of them. Or
                a rank does not come in time, or does something else
            KeyboardInterrupt, SystemExit: one of the calls was interrupted so on this rank; the others raise
                ``RankFailed``
        """
        value, error = _attempt(local)
        if self.world == 1:
            if error is None:
                reply, error = _attempt(lambda: decide([value]))  # type: ignore[list-item]
                if error is None:
                    return reply  # type: ignore[return-value]
            self._raise(f"cannot {what}: {self._text(error)}", error)
        packed: bytes | None = None
        if error is None:
            packed, error = _attempt(lambda: pickle.dumps(value))
        does = (what.partition(" ")[0], local.__qualname__)
        sent = (_RELEASE, does, packed, None if error is None else self._text(error))
        made: R | None = None
        with self.counting_on_each_other():
            try:
                if self.coordinates:
                    failure, told = self._ask(what, 1, lambda over: self._gather(sent, over))
                    answer = b""
                    if failure is None:
                        made, error = _attempt(lambda: decide([pickle.loads(packed) for _, _, packed, _ in told]))
                        packed, error = _attempt(lambda: pickle.dumps(made)) if error is None else (None, error)
                        answer, failure = packed or b"", None if error is None else f"{self._text(error)} (rank 0)"
                    message = pickle.dumps((failure, answer))
                    self._ask(what, 0, lambda _: _put(f"{self._keys}/{self._number}/answer", message))
                else:
                    failure, answer = pickle.loads(self._ask(what, 3, lambda over: self._tell(sent, over)))
            except self.error:
                if error is not None and _interrupts(error):
                    raise error from None
                raise
            self._number += 1
            if failure is not None:
                self._raise(f"cannot {what}: {failure}", error)
        return made if self.coordinates else pickle.loads(answer)  # type: ignore[return-value]

    def every(self, what: str, local: Callable[[], T]) -> list[T]:
        """Calls ``local`` on every rank; returns on every rank what all of them have returned.

        Raises:
            RankFailed: as for :meth:`step`
        """
        return self.step(what, local, lambda values: values)

    @contextlib.contextmanager
    def counting_on_each_other(self) -> Iterator[None]:
        """While the block runs, the other ranks wait for this one to take the next step.

        What ends the block on this rank alone, at any place, is told to them in that step, and they raise. An
        ``error`` is not told: only steps may raise it, which tell all ranks.
        """
        try:
            yield
        except self.error:
            raise
        except BaseException as e:
            if self._keys is not None:
                text = f"{self._text(e)} (rank {self.rank})"
                with contextlib.suppress(Exception):
                    self._asking.ask(lambda: self._give_up(text)).result(_GRACE)
            raise

    def _give_up(self, text: str) -> None:
        """Sets this rank's keys of the steps that it does not take to the end."""
        who = "answer" if self.coordinates else self.rank
        message = pickle.dumps((text, b"") if self.coordinates else (_RELEASE, None, None, text))
        for number in (self._number, self._number + 1):
            key = f"{self._keys}/{number}/{who}"
            # The others may have the answer already.
            if not (self.coordinates and _get_default_store().check([key])):
                _put(key, message)

    def _raise(self, text: str, error: BaseException | None) -> NoReturn:
        """Raises ``text``, which all ranks know, as ``error``; this rank's own interrupt or error is raised again."""
        if error is not None and (_interrupts(error) or self.error is RankFailed):
            raise error
        raise self.error(text) from error

    def _ask(self, what: str, times: int, call: Callable[[threading.Event], T]) -> T:
        """Returns what ``call`` returns, in the thread that asks the store; waits so many times as long as for a rank.

        ``call`` takes an event, which is set once nobody waits for it any more.

        Raises:
            RankFailed: the store does not answer, or has failed; or a rank is missing
        """
        over = threading.Event()
        answer = self._asking.ask(lambda: call(over))
        seconds = times * self._seconds() + 2 * _GRACE
        try:
            wait([answer], seconds)
        finally:
            over.set()
        if not answer.done():
            raise self.error(
                f"cannot {what}: the store of the process group has not answered within {seconds:g} s: the process "
                "that hosts it, rank 0 or torchrun, is stopped or cannot be reached. Restart the job"
            )
        error = answer.exception()
        if isinstance(error, _Missing):
            raise self.error(f"cannot {what}: {error}")
        if error is not None:
            raise self.error(
                f"cannot {what}: the store of the process group has failed ({self._text(error)}). Restart the job"
            ) from error
        return answer.result()

    def _seconds(self) -> float:
        """Returns how many seconds a rank waits for another one in this step."""
        begins = self._keys is None or self._number == 0
        return _timeout_of(self._group) if self._patience is None or not begins else self._patience.total_seconds()

    def _gather(self, own: Any, over: threading.Event) -> tuple[str | None, list[Any]]:
        """Returns what has failed, if anything, and what all ranks have said in this step."""
        store, name, seconds = _get_default_store(), self._name(), self._seconds()
        if self._keys is None:
            self._keys = f"{name}/{store.add(f'{name}/calls', 1)}"
        deadline = time.monotonic() + seconds
        told: dict[int, Any] = {0: own}
        keys = {rank: f"{self._keys}/{self._number}/{rank}" for rank in range(1, self.world)}
        for rank, key in keys.items():
            if _is_set(key, deadline, over):
                told[rank] = pickle.loads(_take(key))
        left = _left.setdefault(store, {}).setdefault((name, self._is_within), [])
        if len(told) == self.world:
            # All have what was said before; and that they have been here must be seen until the next time.
            for key in left if self._number == 0 else [*keys.values(), f"{self._keys}/{self._number - 1}/answer"]:
                _delete(key)
            if self._number == 0:
                left.clear()
        if self._number == 0:
            left += keys.values()
        left.append(f"{self._keys}/{self._number}/answer")
        if late := [rank for rank in keys if rank not in told]:
            return self._missing(late, seconds), []
        return self._failed(told), [told[rank] for rank in range(self.world)]

    def _tell(self, own: Any, over: threading.Event) -> bytes:
        """Says what this rank has to say in this step, and returns the coordinator's answer.

        Raises:
            _Missing: there is none
        """
        seconds = self._seconds()
        if self._keys is None:
            self._keys = self._join(time.monotonic() + seconds, over)
        _put(f"{self._keys}/{self._number}/{self.rank}", pickle.dumps(own))
        answer = f"{self._keys}/{self._number}/answer"
        # It may have come just now, and waits for others.
        if not _is_set(answer, time.monotonic() + 2 * seconds + _GRACE, over):
            raise _Missing(self._missing([0], 2 * seconds + _GRACE))
        return _get(answer)

    def _join(self, deadline: float, over: threading.Event) -> str:
        """Waits until the coordinator comes, and returns the beginning of the keys of what it begins.

        Ranks that one of them has left alone, because it had failed elsewhere, so find each other the next time.
        """
        store, name = _get_default_store(), self._name()
        for _ in _looks(deadline, over):
            keys = f"{name}/{store.add(f'{name}/calls', 0)}"
            # Before, this rank has been there, or was not waited for.
            if keys != f"{name}/0" and not any(store.check([f"{keys}/0/{who}"]) for who in (self.rank, "answer")):
                return keys
        raise _Missing(self._missing([0], self._seconds()))

    def _failed(self, told: Mapping[int, Any]) -> str | None:
        """Returns what has failed on which ranks; ranks that do not do the same as this one have failed."""
        release, (verb, function), *_ = told[0]
        by_text: dict[str, list[int]] = {}
        for rank, (other, does, _, text) in sorted(told.items()):
            if does is None:
                # It has left, and says which rank it is.
                return str(text)
            if other != release:
                text = f"it has tensorferry {other}, and rank 0 has {release}: install one on all ranks"
            elif does != (verb, function):
                apart = f"and rank 0 to {verb}" if does[0] != verb else "as is rank 0, in another way"
                text = f"it is about to {does[0]}, {apart}: call one function on all ranks, with the same strategy"
            if text is not None:
                by_text.setdefault(text, []).append(rank)
        named = [
            text if len(ranks) == self.world else f"{text} ({_ranks(ranks)})"
            for text, ranks in list(by_text.items())[:4]
        ]
        return "; ".join(named) or None

    def _text(self, error: BaseException | None) -> str:
        return str(error) if isinstance(error, (TensorferryError, self.error)) else f"{type(error).__name__}: {error}"

    def _missing(self, ranks: list[int], seconds: float) -> str:
        return f"{_ranks(ranks)} did not come within {seconds:g} s. {self.hint}"

    def _name(self) -> str:
        """Returns the beginning of the group's keys; groups that have no rank in common may have the same name."""
        group = self._group if self._group is not None else dist.group.WORLD
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        return f"tensorferry/{group.group_name}/{first}"


class _Missing(Exception):
    """A rank has not come in time."""


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _timeout_of(group: Any) -> float:
    """Returns the time-out of a process group, in seconds."""
    group = group if group is not None else dist.group.WORLD
    found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return found.total_seconds()


def _looks(deadline: float, over: threading.Event) -> Iterator[None]:
    """Yields, every few moments, until the time ``deadline`` is past.

    Raises:
        _Missing: nobody waits for it any more
    """
    began = time.monotonic()
    yield
    # One look at a time: while a store waits by itself, other threads of the process cannot use it.
    while (now := time.monotonic()) <= deadline:
        if over.is_set():
            raise _Missing("this rank has left")
        time.sleep(min(max(_PART * (now - began), _SOON), _LATE))
        yield


def _is_set(key: str, deadline: float, over: threading.Event) -> bool:
    """Waits until a key is in the store; returns whether it is."""
    return any(_get_default_store().check([key]) for _ in _looks(deadline, over))


def _put(key: str, data: bytes) -> None:
    """Sets a key to a value of any length; the key is there once all of the value is."""
    rest = range(_PIECE, len(data), _PIECE)
    for number, at in enumerate(rest):
        _get_default_store().set(f"{key}/{number}", data[at : at + _PIECE])
    _get_default_store().set(key, b"%d " % len(rest) + data[:_PIECE])


def _get(key: str) -> bytes:
    """Returns the value that :func:`_put` has set."""
    count, _, data = bytes(_get_default_store().get(key)).partition(b" ")
    return data + b"".join(bytes(_get_default_store().get(f"{key}/{number}")) for number in range(int(count)))


def _take(key: str) -> bytes:
    """Like :func:`_get`; of the key, nothing is left but that it is there."""
    data = _get(key)
    for number in range(max(0, len(data) - 1) // _PIECE):
        _get_default_store().delete_key(f"{key}/{number}")
    _get_default_store().set(key, b"0 ")
    return data


def _delete(key: str) -> None:
    """Deletes a key, and the rest of its value."""
    store = _get_default_store()
    if store.check([key]):
        count, _, _ = bytes(store.get(key)).partition(b" ")
        for one in (key, *(f"{key}/{number}" for number in range(int(count)))):
            store.delete_key(one)


def _attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return call(), None
    except BaseException as e:  # Ctrl-C, too: the other ranks have to know.
        return None, e


def _interrupts(error: BaseException) -> bool:
    """Whether an error, such as KeyboardInterrupt, is to end more than the step in which it came."""
    return not isinstance(error, (Exception, CheckpointException))
