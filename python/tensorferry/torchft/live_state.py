"""Which tensors of the live state a receive that failed midway may have left half written."""

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
    """Remembers the tensors of a receive that has failed midway, until a complete one has overwritten them.

    Some tensors are of one step then and some of another. torchft's Manager takes the error for one of its step and
    goes on: if nobody is left to heal from, it trains with these tensors, and sends them to others, and nothing shows
    it. So what it calls next for such a state raises.
    """

    def __init__(self) -> None:
        #: What the receive that is under way writes to, in a list that is its own.
        self._under_way: dict[str, list[InPlaceTargets]] = {}
        #: The path of each tensor that may be half written, and how the receive that wrote to it has failed.
        self._half_written: dict[str, str] = {}
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
            self._heals = False
            if self._half_written:
                written = {path for _, _, path in targets[0].match.pairs}
                self._half_written = {path: how for path, how in self._half_written.items() if path not in written}
        elif targets and targets[0].fit.matched:
            failed = f"of step {step} failed ({type(error).__name__}: {error})"
            self._half_written = self._half_written | {path: failed for _, _, path in targets[0].match.pairs}
            logger.error(
                "a receive %s after it had begun to write to the live state: some of its tensors may have new values. "
                "Receive again, or load a checkpoint and call accept_live_state()",
                failed,
            )

    def accept(self) -> None:
        """Notes that all tensors of the live state belong together."""
        self._half_written, self._heals = {}, False

    def check_sent(self) -> None:
        """Raises :class:`HalfReceived` if the state that is to be sent is not whole."""
        self._check("this state cannot be sent to others")

    def end_step(self) -> None:
        """Raises :class:`HalfReceived` if the state is not whole, and no receive has failed in this step."""
        heals, self._heals = self._heals, False
        if not heals:
            self._check("the step cannot be done with this state")

    def _check(self, refused: str) -> None:
        if half_written := self._half_written:
            path, failed = next(iter(half_written.items()))
            others = f" and {len(half_written) - 1} more" if len(half_written) > 1 else ""
            raise HalfReceived(
                f"{refused}: a receive into it {failed}, so that {path or 'the tensor'}{others} may have new values in "
                "part, and no complete receive has overwritten that since. Start the process again, receive again, or "
                "load a checkpoint and call accept_live_state()"
            )
