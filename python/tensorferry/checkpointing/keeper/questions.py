"""Connections to a keeper that ask it one thing each."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Any

from ...errors import ConnectError, ProtocolError, TensorferryError
from .. import handover
from ..handover import Handover, Message
from .connecting import KeeperSilent, connect, not_at_work
from .snapshot import Snapshot, snapshot

#: Seconds that it has to show that it is at work. Giving back the memory of a large snapshot may take it a moment.
AT_WORK_S = 5.0
#: Seconds that an answer may take for which it asks its buddies, or computes checksums.
_ANSWER_S = 20.0


class Question:
    """A connection for one question.

    Attributes:
        status: what the keeper said about itself, once :meth:`begin` has returned true

    Raises:
        ConnectError: there is no keeper; of its methods, also: it is gone, or does not answer in time
        SystemRefused: it is another user's, or no socket can be opened
        ProtocolError: of its methods: it answers something else
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock = connect(name)
        self._deadline: float | None = None
        self.status: dict[str, Any] = {}

    def begin(self, patience: float) -> bool:
        """Returns whether the keeper is at work: whether it says something about itself within ``patience`` seconds."""
        self._sock.settimeout(patience)
        try:
            self.send(Message("status"))
            self.status = self.answer("status").fields
        except KeeperSilent:
            return False
        except BaseException:
            self.close()
            raise
        self._sock.settimeout(_ANSWER_S)
        return True

    def end_at(self, deadline: float) -> None:
        """Waits for no further message after ``deadline``, a time of ``time.monotonic``."""
        self._deadline = deadline

    def has_answer(self) -> bool:
        """Whether an answer can be read by now, or none will come: the keeper has ended, or this is a forked child."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def __enter__(self) -> Question:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it what the keeper has lent over it."""
        self._sock.close()

    def send(self, message: Message) -> None:
        """Sends ``message``."""
        with self._typed_errors():
            self._hurry()
            handover.send(self._sock, message)

    def answer(self, *kinds: str) -> Message:
        """Returns the next message, which is of one of ``kinds``."""
        answer = self._receive()
        if not isinstance(answer, Message) or answer.kind not in kinds:
            raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return answer

    def snapshots(self, asked: dict[str, Any]) -> list[Snapshot]:
        """Returns the snapshots in the answer to ``held``, with the fields that were ``asked`` for."""
        snapshots = []
        while (message := self.answer("snapshot", "end")).kind == "snapshot":
            snapshots.append(snapshot(message.fields))
            for name in ("job", "path", "rank"):
                if asked.get(name) not in (None, getattr(snapshots[-1], name)):
                    raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return snapshots

    def memory(self) -> Handover | None:
        """Returns the snapshot in the answer to ``take``; ``None`` if the keeper has evicted it."""
        answer = self._receive()
        if isinstance(answer, Message) and answer.kind == "gone":
            return None
        if not isinstance(answer, Handover) or answer.kind != "taken":
            raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return answer

    def _hurry(self) -> None:
        """Waits for the next step no longer than until the deadline."""
        if self._deadline is not None:
            # Zero would be no timeout, but a socket that does not wait.
            self._sock.settimeout(max(self._deadline - time.monotonic(), 0.001))

    def _receive(self) -> Message | Handover:
        with self._typed_errors():
            self._hurry()
            answer = handover.receive(self._sock)
        if answer is None:
            raise ConnectError(f"the keeper {self._name} has ended, or runs another version of tensorferry")
        return answer

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Raises an error of the socket as one about the keeper: it does not answer, or is gone."""
        try:
            yield
        except TimeoutError as e:
            raise not_at_work(self._name) from e
        except OSError as e:
            if isinstance(e, TensorferryError):
                raise
            raise ConnectError(f"the keeper {self._name} is gone: {e}") from e


class Loan:
    """The hold that a reader has on a snapshot in the keeper; ends with its last reference."""

    def __init__(self, question: Question) -> None:
        self._question = question

    def __del__(self) -> None:
        self._question.close()
