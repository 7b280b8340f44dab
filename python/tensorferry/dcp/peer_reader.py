"""Loads a checkpoint from the memory of another job: each rank fetches slices from the ranks that hold them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .. import _validate
from .._native import Remote, _fetch_slices
from ..errors import InvalidArgument, ProtocolError, TensorferryError
from ..memory.tensors import room
from ..net.options import wants_same_host
from ..net.secret import shared_secret
from ..state.allowlist import Allowed
from ..storage import reserved
from ..storage.slices import SliceTuple
from . import index
from .peer_writer import SCHEME
from .reader import SliceReader

logger = logging.getLogger("tensorferry")

#: Bytes requested along with a header. A reader of slices does not need most of what follows the header.
_AHEAD = 64 << 10


class PeerReader(SliceReader):
    """Loads what a ``PeerWriter`` of another job has published, with ``torch.distributed.checkpoint.load``.

    Each rank fetches the slices that its plan needs from the ranks that hold them, several at a time, directly into its
    tensors where possible. The two jobs may differ in world size and placements.

    Args:
        metadata: what ``metadata()`` of the writer returned; the ``checkpoint_id`` of a load overrides it
        timeout: the deadline of a load, counted from its beginning
        lanes: connections of this rank; ``None`` chooses by the number of cores
        secret: as for ``HTTPTransport``
        same_host: as for ``HTTPTransport``
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; anyone who can answer in place of a source can then run code
            here

    Attributes:
        report: what the last load fetched, without the index: ``bytes``, of these ``wanted``, the bytes that the plan
            asked for, and ``retries``

    Raises:
        InvalidArgument: an argument cannot be used; it is named
    """

    def __init__(
        self,
        metadata: str | None = None,
        *,
        timeout: timedelta = timedelta(minutes=5),
        lanes: int | None = None,
        secret: str | bytes | None = None,
        same_host: bool | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
    ) -> None:
        super().__init__(Allowed(safe_globals, trust_pickle))
        self._string = None if metadata is None else _validate.string("metadata", metadata)
        self._seconds = _validate.seconds("timeout", timeout)
        self._lanes = None if lanes is None else _validate.integer("lanes", lanes, 1)
        self._secret = shared_secret(secret)
        self._same_host = wants_same_host(same_host)
        self._failed: Exception | None = None
        self._until = 0.0
        self.report: dict[str, int] = {"bytes": 0, "wanted": 0, "retries": 0}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from the metadata ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._string = str(checkpoint_id)
        self._metadata = self._failed = None
        self.report = {"bytes": 0, "wanted": 0, "retries": 0}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Fetches the index.

        Raises:
            InvalidArgument: there is no metadata, or it is not that of a ``PeerWriter``
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        del args
        if kwargs.get("rank") is not None and self._failed is not None:
            # torch calls this a second time for an index of this rank alone. There is none, and a second wait would be
            # in vain.
            raise self._failed
        self._until = time.monotonic() + self._seconds
        try:
            step, urls = self._sources()
            source = f"{step} {urls[0]}"
            remote = Remote.open(
                urls[:1],
                step,
                timeout=self._left(),
                lanes=1,
                same_host=self._same_host,
                secret=self._secret,
            )
            with contextlib.closing(remote):
                sizes = dict(zip(remote.names, remote.sizes, strict=True))
            if reserved.INDEX not in sizes:
                raise ProtocolError(f"{urls[0]} serves no index of a distributed checkpoint")
            nbytes = sizes[reserved.INDEX]
            memory, start = room(nbytes)
            self._fetch({source: [(reserved.INDEX, "U8", nbytes, 0, nbytes, start, [])]})
            self.report = dict.fromkeys(self.report, 0)
            metadata = index.decode(bytes(memory), "the publication", self._allowed)
        except TensorferryError as e:
            self._failed = e
            raise
        metadata.storage_meta = StorageMeta()
        return metadata

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _sources(self) -> tuple[int, list[str]]:
        words = (self._string or "").split()
        if len(words) < 3 or words[0] != SCHEME or not (words[1].isascii() and words[1].isdecimal()):
            raise InvalidArgument(
                "PeerReader takes what metadata() of a PeerWriter gives after a save, not "
                + _validate.brief(self._string)
            )
        return _validate.step_number(int(words[1][:20])), words[2:]

    def _fetch(self, parts: dict[str, list[SliceTuple]]) -> None:
        named = set(self._sources()[1])
        orders = []
        for source, of_source in parts.items():
            step, _, url = source.partition(" ")
            if url not in named or not (step.isascii() and step.isdecimal() and len(step) < 19):
                raise ProtocolError("the index names a source that the metadata does not")
            orders.append(([url], int(step), of_source))
        report = _fetch_slices(
            orders,
            timeout=self._left(),
            lanes=self._lanes,
            same_host=self._same_host,
            ahead=_AHEAD,
            secret=self._secret,
        )
        for key in self.report:
            self.report[key] += getattr(report, key)
        for source, trouble in report.troubles.items():
            logger.warning("parts from %s went to other connections: %s", source, trouble)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is the metadata of a ``PeerWriter``."""
        return str(checkpoint_id).startswith(SCHEME + " ")
