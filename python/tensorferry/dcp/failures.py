"""The errors of this package, out of torch's ``CheckpointException``."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import TensorferryError
from ..state.ranks import WITHOUT_NUMPY, lack_numpy

logger = logging.getLogger("tensorferry")

F = TypeVar("F", bound=Callable[..., Any])

#: The errors of :func:`noted` calls within a ``with own_errors()`` block.
_noted: ContextVar[list[TensorferryError] | None] = ContextVar("tensorferry_noted", default=None)


def fail_without_numpy() -> None:
    """Says what to do before torch fails in the first collective of a save or load, with the tracebacks of all ranks.

    To be called by a method that torch calls in every save or load, ahead of the collective: it calls ``reset`` only
    where it is given a ``checkpoint_id``. This cannot be raised: a save or load with ``no_dist=True`` needs no NumPy,
    and nothing tells that here.
    """
    if lack_numpy():
        logger.error(WITHOUT_NUMPY)


def noted(read: F) -> F:
    """Decorates ``read_metadata`` of a :class:`SliceReader`: torch keeps of its errors only the text.

    It is the first that torch calls in a load, so it also says what the ranks lack to agree. When it has failed, torch
    calls it once more, for an index of this rank alone: that fails at once where there can be none.
    """

    @functools.wraps(read)
    def noting_errors(self: Any, *args: Any, **kwargs: Any) -> Any:
        failed = self._load.failed
        if kwargs.get("rank") is None or (failed is None and self._load.source is not None):
            self.begin_load()
            fail_without_numpy()
        elif failed is not None and not isinstance(failed, self._absent):
            raise failed
        try:
            return read(self, *args, **kwargs)
        except TensorferryError as e:
            self._load.failed = e
            errors = _noted.get()
            if errors is not None:
                errors.append(e)
            raise

    return noting_errors  # type: ignore[return-value]  # the same signature


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Within the block, raises this package's error where torch would raise a ``CheckpointException`` around it.

    torch collects the errors of all ranks in a ``CheckpointException``, which is not an ``Exception``, and of an error
    of a reader's index it keeps only the text, twice. This raises the first of the errors itself, so that ``except
    IncompleteCheckpoint`` and the like work; a note names the ranks that had one. All ranks raise.

    ::

        with own_errors():
            torch.distributed.checkpoint.load(state, storage_reader=FileReader(path))

    Raises:
        TensorferryError: the first error of this package among those of the ranks
        CheckpointException: there is none among them
    """
    token = _noted.set([])
    try:
        yield
    except CheckpointException as e:
        failures = e.failures
        ours = [(rank, error) for rank, (error, _) in sorted(failures.items()) if isinstance(error, TensorferryError)]
        found = ours[0][1] if ours else next(iter(_noted.get() or ()), None)
        if found is None:
            raise
        found.add_note(f"on ranks {', '.join(map(str, sorted(failures)))} of the job")
        # torch's exception would say the same once more.
        raise found from None
    finally:
        _noted.reset(token)
