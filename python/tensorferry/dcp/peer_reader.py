"""Loads a checkpoint from the memory of another job: each rank fetches slices from the ranks that hold them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from .. import _validate
from ..errors import InvalidArgument, TensorferryError
from ..net.metadata import require_encrypted
from ..net.network import Network, network_of
from ..net.serve import relaying
from ..pickles.allowlist import Allowed
from ..pickles.deadline import Deadline
from ..storage.peers import SCHEME, PeerSource, parse_publication
from ..storage.source import Progress
from . import index
from .common_slices import PlanNote, slice_digests, with_partners
from .failures import noted
from .reader import SliceReader
from .states import States

logger = logging.getLogger("tensorferry")


class PeerReader(SliceReader):
    """Loads what another job serves, with ``torch.distributed.checkpoint.load``.

    That is what a ``PeerWriter`` has published, or the states of a job's ranks that keepers hold or transports send:
    their keys are those that torch's planners give the same states, and of what several ranks have, other than the
    parts of DTensors and ShardedTensors, the first rank's is taken.

    Each rank fetches the slices that its plan needs from the ranks that hold them, several at a time, directly into its
    tensors where possible. The two jobs may differ in world size and placements. Ranks of one load that need the same
    slices of a rank, as replicas do, bring them to each other where that takes long, from servers that they have until
    the load has returned.

    Args:
        metadata: what ``metadata()`` of the writer or ``tensorferry.checkpointing.peer_metadata`` returned; the
            ``checkpoint_id`` of a load overrides it
        timeout: the deadline of a load, counted from its beginning
        lanes: connections of this rank; ``None`` chooses by the number of cores
        network, secret: as for ``HTTPTransport``; docs/guides/dcp.md says what ``relay`` does here
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; anyone who can answer in place of a source can then run code
            here
        progress: called with the number of bytes that this rank has fetched and the number of all bytes that its plan
            needs, a few times a second during a load and once at its end; an exception from it ends the load

    Attributes:
        report: what the last load fetched, without the index: ``bytes``, of these ``relayed``, those that other ranks
            have sent, and ``wanted``, the bytes that the plan asked for, and ``retries``

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        metadata: str | None = None,
        *,
        timeout: timedelta = timedelta(minutes=5),
        lanes: int | None = None,
        network: Network | None = None,
        secret: str | bytes | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(Allowed(safe_globals, trust_pickle), ("bytes", "relayed", "wanted", "retries"), progress)
        self._string = None if metadata is None else _validate.string("metadata", metadata)
        self._seconds = _validate.patience("timeout", timeout)
        self._lanes = None if lanes is None else _validate.integer("lanes", lanes, 1)
        self._network = network_of(network, secret=secret)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from the metadata ``checkpoint_id`` if it is given; later loads take that, too.

        Raises:
            InvalidArgument: this thread is in the middle of a read
        """
        self._loading.check()
        self._string = str(checkpoint_id) if checkpoint_id else self._string

    @noted
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Fetches the index, or makes one of the states that the ranks serve.

        Raises:
            InvalidArgument: there is no metadata, or it is not such a string; or this thread is in the middle of a read
            ProtocolError: states of ranks contradict each other, or the metadata lacks some of the ranks
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        del args, kwargs
        step, urls = self._step_and_urls()
        load = self._load
        load.digest = hashlib.blake2b(f"{step} {urls}".encode(), digest_size=16).hexdigest()
        load.allowed = allowed = self._allowed.until(Deadline(self._seconds))
        if self._network.tls:
            require_encrypted(urls)
        source = PeerSource(step, urls, self._network, timeout=self._seconds, lanes=self._lanes)
        if source.serves_states:
            states = States(source, allowed)
            load.source, load.values = source, states.values
            metadata = states.metadata()
        else:
            metadata = index.decode(load.begin(source), "the publication", allowed, source.containers())
        return index.described(metadata, save_id=load.digest)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds to the plan what this rank needs, for the coordinator."""
        metadata = self._load.metadata
        needs = slice_digests(plan, metadata.storage_data) if self._network.relay and metadata is not None else {}
        return dataclasses.replace(plan, storage_data=PlanNote(self._load.digest, needs))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Adds to each rank's plan what other ranks need as well."""
        return with_partners(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of ``plan`` into their targets, beside other ranks that need the same.

        Raises:
            Exception: as for :meth:`SliceReader.read_data`
        """
        note = plan.storage_data
        with self._sharing(note.partners if isinstance(note, PlanNote) else ()):
            return super().read_data(plan, planner)

    @contextlib.contextmanager
    def _sharing(self, containers: Iterable[str]) -> Iterator[None]:
        """Within the block, the load brings other ranks what they need of ``containers`` as well."""
        source = self._load.source
        if not containers or not isinstance(source, PeerSource):
            yield
            return

        def refused(e: TensorferryError) -> None:
            logger.warning("this rank brings others nothing of what they need as well: %s", e)

        # What comes encrypted is passed on encrypted.
        with relaying(self._network, refused, tls=source.is_encrypted) as server:
            source.share(frozenset(containers), server)
            try:
                yield
            finally:
                source.share((), None)

    def _step_and_urls(self) -> tuple[int, list[str]]:
        """Returns the step and the URLs in the metadata.

        Raises:
            InvalidArgument: the metadata is not what ``metadata()`` of a :class:`PeerWriter` returns
        """
        string = self._string
        found = parse_publication(string or "")
        if found is None:
            raise InvalidArgument(
                "PeerReader takes the string that metadata() of a PeerWriter returns after a save, or "
                "tensorferry.checkpointing.peer_metadata for what keepers hold, not " + _validate.brief(string)
            )
        return _validate.step_number(found[0]), found[1]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is the metadata of a ``PeerWriter``."""
        return str(checkpoint_id).startswith(SCHEME + " ")
