"""Loads each shard that a group of ranks needs from storage once: each reads a part, and gives it to the others."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from .. import _validate
from .._native import Server
from ..net.network import Network, network_of
from ..net.serve import start
from ..storage.divided import MOST, DividedSource, Partners
from .load import LoadStrategy
from .loading import Loading
from .together import Together


class TwoStageDataParallelLoadShardedStrategy(LoadStrategy):
    """Loads every shard that all ranks of a group need from storage once; each reads a part and gives it to the others.

    Of a group of more than 16 ranks, every 16 or fewer do so. What the others do not give in time is read from storage.

    Args:
        data_parallel_group: ranks that need the same shards, such as those of one data parallel group; all ranks of
            the job load with such a strategy
        cpu_transfer: changes nothing, because bytes go through host memory either way; Megatron's class had it
        timeout: as for :func:`load_strategy`; also how long a rank waits for what others read
        network, secret, interface: where the ranks listen during a load and what protects that, as for
            ``HTTPTransport``
        options: as for :func:`load_strategy`

    Attributes:
        report: what the last load read from storage on this rank, and ``relayed``, the bytes from other ranks

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        data_parallel_group: Any,
        cpu_transfer: bool = True,
        *,
        timeout: timedelta = timedelta(minutes=5),
        network: Network | None = None,
        secret: str | bytes | None = None,
        interface: str | None = None,
        **options: Any,
    ) -> None:
        network = network_of(network, secret=secret, interface=interface)
        super().__init__(timeout=timeout, network=network, **options)
        _validate.boolean("cpu_transfer", cpu_transfer)
        self._data_parallel_group = data_parallel_group

    def _read(self, ranks: Together, loading: Loading) -> None:
        """Reads this rank's share of what its group needs, and what it alone needs."""
        group = Together(self._data_parallel_group, self.timeout, within=ranks)
        server: Server | None = None

        def offer() -> tuple[str, set[Any]]:
            nonlocal server
            server, host = start(self.timeout.total_seconds(), self._network, passing=True)
            return server.url(host), {loading.shard(item.dest_index.index) for item in loading.tensors}

        try:
            offers = group.every("spread the checkpoint in its group", offer)
            assert server is not None
            # As many ranks as may divide a read, and as few circles of them as that takes.
            circles = -(-group.world // MOST)
            circle = offers[group.rank % circles :: circles]
            common = set.intersection(*(shards for _, shards in circle))
            partners = Partners(tuple(url for url, _ in circle), group.rank // circles)
            divided = [item for item in loading.tensors if loading.shard(item.dest_index.index) in common]
            alone = [item for item in loading.tensors if loading.shard(item.dest_index.index) not in common]
            end = time.monotonic() + self.timeout.total_seconds()
            with loading.reader.through(
                lambda source: (
                    DividedSource(
                        source,
                        dict.fromkeys(loading.containers(), partners),
                        server,
                        self._network,
                        lambda: end - time.monotonic(),
                    )
                    if group.world > 1
                    else source
                )
            ):
                loading.read(divided)
            loading.read([*loading.objects.values(), *alone])
            self.report = dict(loading.reader.report)
        finally:
            if server is not None:
                server.shutdown(0.0)
