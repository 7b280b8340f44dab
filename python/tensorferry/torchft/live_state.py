"""Whether the live state is whole, or a receive into it has failed midway."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import HalfReceived, InvalidArgument

if TYPE_CHECKING:
    from ..state.in_place import InPlaceTargets

logger = logging.getLogger("tensorferry")


class LiveState:
    """Remembers that a receive into the live state has failed midway, until another one is complete.

    Some tensors are of one step then and some of another. torchft's Manager takes the error for one of its step and
    goes on: if nobody is left to heal from, it trains with these tensors, and sends them to others, and nothing shows
    it. So what it calls next for such a state raises.
    """

    def __init__(self) -> None:
        #: What the receive that is under way writes to, in a list that is its own.
        self._under_way: dict[str, list[InPlaceTargets]] = {}
        self._failed: str | None = None
        self._heals = False

    @contextmanager
    def received(self, step: int) -> Iterator[None]:
        """Runs a receive of ``step`` into the live state, and notes how it ends.

        Raises:
            InvalidArgument: another one is under way
        """
        targets: list[InPlaceTargets] = []
        try:
            # Not a lock: an exception of a signal handler may come between its acquisition and the block.
            if self._under_way.setdefault("targets", targets) is not targets:
                raise InvalidArgument(
                    "another receive into the live state is under way, and two would leave a mixture of both: wait "
                    "until recv_checkpoint() has returned, or receive with a transport without state_dict="
                )
            yield
            self._end(step, targets)
        except BaseException as e:
            if self._under_way.get("targets") is targets:
                self._end(step, targets, e)
            raise
        finally:
            if self._under_way.get("targets") is targets:
                del self._under_way["targets"]

    def written(self, targets: InPlaceTargets) -> InPlaceTargets:
        """Notes, and returns, what the receive will write to."""
        self._under_way["targets"].append(targets)
        return targets

    def _end(self, step: int, targets: list[InPlaceTargets], error: BaseException | None = None) -> None:
        self._heals = True
        # A log handler that fails behind the last write has written nothing.
        if targets and targets[0].is_written:
            self.accept()
        elif targets and targets[0].fit.matched:
            self._failed = f"of step {step} failed ({type(error).__name__}: {error})"
            logger.error(
                "a receive %s after it had begun to write to the live state: some of its tensors may have new values. "
                "Receive again, or load a checkpoint and call accept_live_state()",
                self._failed,
            )

    def accept(self) -> None:
        """Notes that all tensors of the live state belong together."""
        self._failed, self._heals = None, False

    def check_sent(self) -> None:
        """Raises :class:`HalfReceived` if the state that is to be sent is not whole."""
        if self._failed is not None:
            raise HalfReceived(f"this state cannot be sent to others: {self._what()}")

    def end_step(self) -> None:
        """Raises :class:`HalfReceived` if the state is not whole, and no receive has tried to mend it in this step."""
        heals, self._heals = self._heals, False
        if self._failed is not None and not heals:
            raise HalfReceived(f"the step cannot be done with this state: {self._what()}")

    def _what(self) -> str:
        return (
            f"the last receive into it {self._failed}, so that some tensors may have new values and others not. Start "
            "the process again, receive again, or load a checkpoint and call accept_live_state()"
        )
