"""Running peers, as the command line names them: their metadata, the step they serve, and an opened container."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import _validate
from .._native import Remote
from ..errors import (
    ConnectError,
    FetchTimeout,
    InvalidArgument,
    ProtocolError,
    SourceChanged,
    SourceRefused,
    TensorferryError,
    WrongStep,
    message_of,
)
from ..net.metadata import encrypted, is_stock, join_metadata
from ..storage import peers
from .flags import Receiving, Trust

#: A step that nobody serves: the refusal says which one is.
_NO_STEP = -(1 << 63)
_SERVED = re.compile(r"serving (-?\d{1,19}) but got")
#: A source at the beginning of a message that names it again.
_NAMED_TWICE = re.compile(r"^(\S{1,300}): ((?:the connection to )?\1\b)")
#: Seconds that a source may take to say which step it serves, once it has refused another one.
_ASKING_S = 5.0
#: How often a source may go on to another step between two requests.
_ATTEMPTS = 3


def is_metadata(text: str) -> bool:
    """Whether an argument names running peers, and not a file."""
    return text.startswith(("http://", "https://", f"{peers.SCHEME} "))


@dataclass(frozen=True)
class Peers:
    """The peers that the metadata names.

    Attributes:
        urls: of all sources of a state; or of all ranks of a publication, the one with the index first
        step: the step that the metadata names, if it names one
        are_ranks: whether the peers are the ranks of a ``PeerWriter``'s publication
    """

    urls: list[str]
    step: int | None = None
    are_ranks: bool = False

    @classmethod
    def of(cls, metadata: Sequence[str], trust: Trust) -> Peers:
        """Returns the peers that arguments of the command line name.

        Raises:
            InvalidArgument: they are not the metadata of tensorferry's peers
            UnprovenSource: none of them encrypts, and ``trust`` asks for it
        """
        text = " ".join(metadata)
        ranks = peers.parse_publication(text)
        if ranks is not None:
            found = cls(ranks[1], _validate.step_number(ranks[0]), True)
        else:
            if is_stock(text.strip()):
                raise InvalidArgument(
                    "this is the metadata of torchft's own transport, which serves no container: receive from it with "
                    "an HTTPTransport of tensorferry"
                )
            found = cls(join_metadata(metadata).split())
        return cls(encrypted(found.urls), found.step, found.are_ranks) if trust.tls else found


def open_source(
    urls: list[str],
    step: int | None,
    trust: Trust,
    receiving: Receiving,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[Remote, int]:
    """Opens what the sources of a state serve.

    Args:
        urls: the sources
        step: the step to open; ``None`` takes the one that is served
        trust: what they have to prove
        receiving: the deadline, of the whole receive, and the number of lanes
        progress: called with the number of bytes that have arrived and the number of all bytes

    Returns:
        What was opened, and its step.

    Raises:
        TensorferryError: as for ``HTTPTransport.recv_checkpoint``
    """
    if step is not None:
        step = _validate.step_number(step)
    deadline = time.monotonic() + receiving.timeout
    for attempt in range(_ATTEMPTS):
        wanted = step if step is not None else _served_step(urls, trust, deadline)
        try:
            remote = Remote.open(
                urls,
                wanted,
                timeout=max(deadline - time.monotonic(), 0.0),
                lanes=receiving.checked_lanes(),
                same_host=trust.uses_same_host(),
                progress=progress,
                secret=trust.secret(),
            )
        except WrongStep as e:
            if step is not None:
                message = _other_steps(urls, step, trust, deadline)
                raise WrongStep("", e.code, message, e.headers, None) from None
            if attempt == _ATTEMPTS - 1:
                break
            continue
        return remote, wanted
    raise SourceChanged("the source goes on to other steps faster than one can be opened: name one with --step")


def _other_steps(urls: list[str], step: int, trust: Trust, deadline: float) -> str:
    """Returns the message for a step that no source serves, with those that they do."""
    served: dict[int, None] = {}
    for url in urls:
        with contextlib.suppress(TensorferryError):
            served[_served_step([url], trust, min(deadline, time.monotonic() + _ASKING_S))] = None
    if not served:
        return f"step {step} is not served, and no source says which one is"
    there = f"the source serves step {next(iter(served))}"
    if len(served) > 1:
        there = f"the sources serve steps {', '.join(map(str, served))}"
    return f"step {step} is not served: {there}. Name one that is with --step, or leave --step out"


def _without_step(error: TensorferryError) -> str:
    """Returns the message of an error without the step that nobody has asked for, and without a source named twice."""
    message = message_of(error).replace(f"step {_NO_STEP} from ", "").replace(f"step {_NO_STEP}: ", "")
    return _NAMED_TWICE.sub(r"\2", message)


def _served_step(urls: list[str], trust: Trust, deadline: float) -> int:
    """Returns the step that the first source that answers serves."""
    last: TensorferryError | None = None
    for number, url in enumerate(urls):
        left = max(deadline - time.monotonic(), 0.0) / (len(urls) - number)
        try:
            Remote.open(
                [url], _NO_STEP, timeout=left, lanes=1, same_host=trust.uses_same_host(), secret=trust.secret()
            ).close()
        except WrongStep as e:
            if found := _SERVED.search(str(e)):
                if not -(1 << 63) <= (served := int(found[1])) < 1 << 63:
                    raise ProtocolError(f"the source says that it serves step {served}, which is no step") from None
                return served
            last = WrongStep.of(e.code, _without_step(e))
        except (ConnectError, FetchTimeout) as e:
            last = type(e)(_without_step(e))
        except SourceRefused as e:
            raise SourceRefused.of(e.code, _without_step(e)) from None
        except TensorferryError as e:
            raise type(e)(_without_step(e)) from None
        else:
            return _NO_STEP
    assert last is not None
    raise last
