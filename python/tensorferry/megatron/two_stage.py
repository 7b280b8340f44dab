"""Loads each shard that a group of ranks needs from storage once, and spreads it within the group.

Of every shard that several ranks of the group need, one is the *owner*. It reads the shard into its own tensor and
publishes that memory; the others fetch it from there, each from all owners at once. The publication is there before the
bytes are: what has been read can be fetched while the rest is still being read.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from .. import _validate
from .._native import Server
from ..dcp.reader import SliceReader
from ..net.options import ServerOptions
from ..net.serve import serve
from . import page_cache
from .load import LoadStrategy
from .loading import Loading
from .spreading import Exchange, Need, Plan, ShardId, needs_of, raise_if
from .together import Together


class TwoStageDataParallelLoadShardedStrategy(LoadStrategy):
    """Loads every shard that a group needs from storage once; the ranks of the group fetch it from each other.

    Args:
        data_parallel_group: ranks that need the same shards, such as those of one data parallel group; all ranks of
            the job load with such a strategy
        cpu_transfer: changes nothing, because bytes go through host memory either way; Megatron's class had it
        spread: whether ranks fetch from each other what several of them need; ``None`` has each rank read alone if
            that takes no byte from storage twice, which is quicker: if all files that the group needs are in the page
            cache of each rank's machine, or if all ranks of the group share one page cache
        timeout: as for :func:`load_strategy`; also how long the fetches of a turn may take
        interface, advertise, port: where the ranks listen during a load, as for ``HTTPTransport``
        options: as for :func:`load_strategy`

    Attributes:
        report: what the last load read from storage on this rank, and ``fetched``, the bytes from other ranks

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        data_parallel_group: Any,
        cpu_transfer: bool = True,
        *,
        spread: bool | None = None,
        timeout: timedelta = timedelta(minutes=5),
        interface: str | None = None,
        advertise: str | None = None,
        port: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **options)
        _validate.boolean("cpu_transfer", cpu_transfer)
        self._server_options = ServerOptions(
            secret=options.get("secret"),
            tls=False,
            same_host=options.get("same_host"),
            interface=interface,
            advertise=advertise,
            max_bandwidth=None,
            port=port,
        )
        # Scrapers could not know a port that is there for a moment, and the variable may name one that a transport has.
        self._server_options.metrics_ports = None
        self._data_parallel_group = data_parallel_group
        self._spread = None if spread is None else _validate.boolean("spread", spread)

    def _way(self) -> str:
        return f"{super()._way()}({self._spread})"

    def _shared_index(self, ranks: Together, checkpoint_dir: str | Path) -> tuple[SliceReader, Metadata]:
        """Opens the checkpoint; one rank of the group reads its index."""
        group = Together(self._data_parallel_group, within=ranks)
        opened: tuple[SliceReader, Metadata] | None = None

        def read() -> Any:
            nonlocal opened
            if not group.coordinates or self.is_live:
                return None
            opened = self._index(checkpoint_dir, ranks.rank)
            return opened[0].known

        known = group.step(f"load {self.name(checkpoint_dir)}", read, lambda indexes: indexes[0])
        return opened or self._index(checkpoint_dir, ranks.rank, known=known)

    def _read(self, ranks: Together, loading: Loading) -> None:
        """Reads this rank's share of what its group needs, and fetches the rest."""
        group = Together(self._data_parallel_group, within=ranks)
        if group.world == 1:
            super()._read(ranks, loading)
            return
        with group.counting_on_each_other():
            self._share(group, ranks, loading)

    def _share(self, group: Together, ranks: Together, loading: Loading) -> None:
        """Reads and fetches together with the others of the group."""
        server: Server | None = None

        def open_server() -> str:
            nonlocal server
            server, url = serve(self.timeout, self._server_options)
            return url

        def tell() -> tuple[str | None, _Cached, dict[ShardId, Need], list[str]]:
            decides = self._spread is None and not self.is_live and loading.is_in_folder
            held = page_cache.holds(loading.files()) if decides else None
            cached = _Cached(held, None if held is None else page_cache.cache_of(loading.folder))
            url = open_server() if held is None and self._spread is not False else None
            return url, cached, {shard: need for _, shard, need in needs_of(loading)}, list(loading.objects)

        try:
            reports = group.every("spread the checkpoint in its group", tell)
            urls: list[Any] = [url for url, *_ in reports]
            if self._spread is False or _is_read_once([cached for _, cached, *_ in reports]):
                super()._read(ranks, loading)
                self.report["fetched"] = 0
                return
            if not all(urls):
                # Some might have read alone, but not all.
                urls = group.every("spread the checkpoint in its group", lambda: urls[group.rank] or open_server())
            assert server is not None
            plan = Plan([needs for *_, needs, _ in reports], [objects for *_, objects in reports])
            exchange = Exchange(loading, server, self._server_options, urls, group.rank)
            for step, turn in enumerate(plan.turns):
                failed = exchange.run(step, turn, plan, self.timeout.total_seconds())

                def done() -> dict[str, Any]:
                    raise_if(failed)  # noqa: B023
                    # Objects go along with what all tell each other anyway.
                    return {key: loading.values[key] for key in plan.objects.get(group.rank, ()) if step == 0}  # noqa: B023

                # What this rank serves stays until all others have it; and all know if one of them has failed.
                for values in group.every("spread the checkpoint in its group", done):
                    loading.values.update({key: value for key, value in values.items() if key in loading.objects})
                if step + 1 < len(plan.turns):
                    group.every("spread the checkpoint in its group", exchange.withdraw)
            self.report = dict(loading.reader.report) | {"fetched": exchange.fetched}
        finally:
            if server is not None:
                server.shutdown(0.0)


class _Cached(NamedTuple):
    """What a rank says of the page cache.

    Attributes:
        held: as :func:`page_cache.holds` returns it
        place: as :func:`page_cache.cache_of` does
    """

    held: bool | None
    place: tuple[str, int, int] | None


def _is_read_once(caches: list[_Cached]) -> bool:
    """Whether no byte comes from storage twice if each rank of the group reads alone."""
    if all(cached.held for cached in caches):
        return True
    # All ranks on one machine: what one of them has read, the others find in the page cache.
    return all(cached.held is not None for cached in caches) and len({cached.place for cached in caches}) == 1
