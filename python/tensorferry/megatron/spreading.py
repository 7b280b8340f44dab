"""What each rank of a group reads and what it fetches from the others: the plan, and the exchange that follows it."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._native import Readiness, Server, _fetch_slices
from ..memory.layout import side_by_side
from ..memory.tensors import address, count_as_written, no_rows, scratch
from ..net.options import ServerOptions
from ..storage.boxes import Box
from ..storage.container import Container
from ..storage.slices import AHEAD, SliceTuple
from ..storage.threads import uninterrupted
from . import shards
from .loading import ChunkPart, Loading

#: Bytes that are read before others may fetch them.
_BATCH = 16 << 20
#: Bytes of temporary memory at most on each rank, for shards that do not lie in host memory, or not in one piece, and
#: for a batch that is cast.
_WINDOW = 256 << 20
#: Lanes that a source serves, unless it has more receivers.
_LANES = 4
#: What makes two ranks' shards the same one: key, place, shape of the whole, dtype.
ShardId: TypeAlias = tuple[str, Box, tuple[int, ...], str]


class Need(NamedTuple):
    """A shard that a rank needs, as it announces it to the other ranks.

    Attributes:
        nbytes: its length
        direct: whether it lies in host memory in one piece, and so needs no temporary memory
    """

    nbytes: int
    direct: bool


#: For each rank that reads shards for others, those shards; their numbers are the names of their entries.
Turn: TypeAlias = dict[int, list[ShardId]]


class Plan:
    """Who reads what; every rank of the group computes the same.

    Args:
        needs: the shards that each rank needs
        objects: the keys of the objects that each rank needs

    Attributes:
        shared: the shards that more than one rank needs
        objects: the objects that more than one rank needs, by the rank that reads them
        shared_objects: all of these
        turns: these shards by the rank that reads them, in turns that need at most ``_WINDOW`` of temporary memory on
            any rank, unless one shard needs more; there is at least one
    """

    def __init__(self, needs: list[dict[ShardId, Need]], objects: Sequence[Iterable[str]] = ()) -> None:
        readers: dict[str, list[int]] = defaultdict(list)
        for rank, keys in enumerate(objects):
            for key in keys:
                readers[key].append(rank)
        self.shared_objects = {key for key, ranks in readers.items() if len(ranks) > 1}
        self.objects: dict[int, list[str]] = defaultdict(list)
        for number, key in enumerate(sorted(self.shared_objects)):
            self.objects[readers[key][number % len(readers[key])]].append(key)
        users: dict[ShardId, list[int]] = defaultdict(list)
        for rank, of_rank in enumerate(needs):
            for shard in of_rank:
                users[shard].append(rank)
        self.shared = {shard for shard, ranks in users.items() if len(ranks) > 1}
        self.turns: list[Turn] = [defaultdict(list)]
        load = [sum(need.nbytes for shard, need in of_rank.items() if shard not in self.shared) for of_rank in needs]
        held = [0] * len(needs)
        # The largest first, each to the rank that has least to read.
        for shard in sorted(self.shared, key=lambda one: (-needs[users[one][0]][one].nbytes, one)):
            ranks = users[shard]
            nbytes = needs[ranks[0]][shard].nbytes
            owner = min(ranks, key=lambda one: (load[one], one))
            load[owner] += nbytes
            staged = [one for one in ranks if not needs[one][shard].direct]
            if any(held[one] and held[one] + nbytes > _WINDOW - _BATCH for one in staged):
                self.turns.append(defaultdict(list))
                held = [0] * len(needs)
            for one in staged:
                held[one] += nbytes
            self.turns[-1][owner].append(shard)


class Exchange:
    """What one rank does in the turns of a load.

    Args:
        loading: the load
        server: serves what this rank has read
        options: those of all servers
        urls: the URLs of the group
        rank: the number of this rank in it

    Attributes:
        fetched: bytes that came from other ranks
    """

    def __init__(self, loading: Loading, server: Server, options: ServerOptions, urls: list[str], rank: int) -> None:
        self._loading = loading
        self._server = server
        self._options = options
        self._urls = urls
        self._rank = rank
        self.fetched = 0
        self._readiness: Readiness | None = None
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._leaves: dict[ShardId, list[int]] = defaultdict(list)
        for number, shard, _ in needs_of(loading):
            self._leaves[shard].append(number)
        self._parts: dict[int, list[ChunkPart]] = defaultdict(list)
        for part in loading.parts:
            self._parts[part.number].append(part)

    def run(self, step: int, turn: Turn, plan: Plan, seconds: float) -> BaseException | None:
        """Reads, serves and fetches; in the first turn, also reads what no other rank needs.

        Returns:
            What has failed, instead of raising it: the other ranks have to be told. The server is shut down then.
        """
        fetching: _Fetching | None = None
        try:
            others = {
                owner: {number: shard for number, shard in enumerate(of_owner) if shard in self._leaves}
                for owner, of_owner in turn.items()
                if owner != self._rank
            }
            if step == 0 and (most := max(self._staged(one)[1] for one in plan.turns)):
                # What is read alone may need temporary memory as well: not both at once.
                self._read_alone(plan)
                # One memory for all turns: that of a former one may be held for a moment longer.
                self._room = scratch(most)
            places = self._places(turn)
            count_as_written(places.values())
            own = {shard: places[shard] for shard in turn.get(self._rank, ())}
            received = {shard: places[shard] for wanted in others.values() for shard in wanted.values()}
            orders = [
                (
                    [self._urls[owner]],
                    step,
                    [_slice(number, received[shard]) for number, shard in wanted.items()],
                )
                for owner, wanted in others.items()
                if wanted
            ]
            fetching = _Fetching(orders, list(received.values()), seconds, self._options, self._lanes(len(orders)))
            if own:
                self._serve(step, own)
            if step == 0 and not self._room.nbytes:
                self._read_alone(plan)
            self.fetched += fetching.result()
            for shard, held in places.items():
                self._spread(shard, held)
        except BaseException as e:  # Ctrl-C, too: nothing may be written to memory that is not used any more.
            # Ends the fetches of others, which would wait for what is never read.
            self._server.shutdown(0.0)
            if fetching is not None:
                fetching.end()
            return e
        return None

    def withdraw(self) -> None:
        """Ends the publication of this turn, which all other ranks have received: its memory is free for the next."""
        if self._readiness is not None:
            # A withdrawal would keep the publication for receivers that may come back.
            self._server.abandon(self._readiness)
            self._readiness = None

    def _is_direct(self, shard: ShardId) -> bool:
        return _is_direct(self._loading.leaf(self._leaves[shard][0]))

    def _lanes(self, sources: int) -> int | None:
        """Returns how many lanes a fetch from so many sources has; ``None`` is the engine's choice.

        A source has all other ranks as its receivers, and each of their lanes takes memory at both ends.
        """
        others = len(self._urls) - 1
        return None if others == 1 else sources * math.ceil(_LANES / others)

    def _needed(self, turn: Turn) -> list[ShardId]:
        return [shard for of_owner in turn.values() for shard in of_owner if shard in self._leaves]

    def _staged(self, turn: Turn) -> tuple[dict[ShardId, int], int]:
        """Returns where shards of a turn lie in this rank's temporary memory, and how much of it they need."""
        staged = [shard for shard in self._needed(turn) if not self._is_direct(shard)]
        offsets, total = side_by_side(self._loading.leaf(self._leaves[shard][0]).nbytes for shard in staged)
        return dict(zip(staged, offsets, strict=True)), total

    def _places(self, turn: Turn) -> dict[ShardId, torch.Tensor]:
        """Returns where the bytes of each shard come first: the place of its leaf, or temporary memory."""
        places, (staged, _) = {}, self._staged(turn)
        for shard in self._needed(turn):
            place = self._loading.leaf(self._leaves[shard][0])
            if shard in staged:
                begin = staged[shard]
                place = self._room[begin : begin + place.nbytes].view(place.dtype).view(place.shape)
            places[shard] = place
        return places

    def _spread(self, shard: ShardId, held: torch.Tensor) -> None:
        """Copies a shard to those of its leaves that it was not read into."""
        for number in self._leaves[shard]:
            target = self._loading.leaf(number)
            if target.device != held.device or target.data_ptr() != held.data_ptr():
                target.copy_(held)

    def _read_alone(self, plan: Plan) -> None:
        """Reads the shards and objects that no other rank needs, and the objects that this rank reads for others."""
        shared = {number for number, shard, _ in needs_of(self._loading) if shard in plan.shared}
        parts = [self._loading.item(part) for part in self._loading.parts if part.number not in shared]
        elsewhere = plan.shared_objects.difference(plan.objects[self._rank])
        objects = [item for key, item in self._loading.objects.items() if key not in elsewhere]
        self._loading.read([*objects, *parts])

    def _serve(self, step: int, own: dict[ShardId, torch.Tensor]) -> None:
        """Publishes the memory of ``own``, the shards that this rank reads for others, and then fills it from files."""
        rows = no_rows()
        for number, tensor in enumerate(own.values()):
            rows.append(tensor, str(number), "U8", (tensor.nbytes,), address(tensor), tensor.nbytes, 0)
        readiness = Container(rows, list(own.values()), True).publish(self._server, step, filled=False)
        assert readiness is not None
        try:
            self._fill(readiness, own)
        except BaseException:
            self._server.abandon(readiness)
            raise
        self._readiness = readiness

    def _fill(self, readiness: Readiness, own: dict[ShardId, torch.Tensor]) -> None:
        """Reads shards in the order in which they lie in the publication, and tells ``readiness`` how far it is."""
        items: list[Any] = []
        waiting = end = 0
        for start, shard in sorted(zip(readiness.starts, own, strict=True), key=lambda pair: pair[0]):
            tensor, number = own[shard], self._leaves[shard][0]
            # Where the dtypes differ, the stored bytes pass through temporary memory.
            size = max(tensor.itemsize, self._loading.stored_dtype(number).itemsize)
            is_staged = not self._is_direct(shard)
            if is_staged and sum(part.wanted.numel for part in self._parts[number]) < tensor.numel():
                # Where the checkpoint has less than the shard, the rest is 0, and not what a turn before has left.
                tensor.zero_()
            with self._loading.aimed(number, tensor):
                for part, there in _in_order(self._parts[number], tensor.shape, size):
                    items.append(self._loading.item(part))
                    waiting += part.wanted.numel * size
                    if waiting >= _BATCH:
                        self._loading.read(items)
                        readiness.ready(start + there * tensor.itemsize)
                        items, waiting = [], 0
                if is_staged:
                    # Now, while its reads go to the temporary memory.
                    self._loading.read(items)
                    items, waiting = [], 0
            end = start + tensor.nbytes
        self._loading.read(items)
        readiness.ready(end)


class _Fetching:
    """Fetches slices in a thread of its own.

    Args:
        orders: the slices, by source
        held: the tensors that they are written to, which live as long as the thread
        seconds: how long that may take
        options: those of the servers
        lanes: connections, of all sources together
    """

    def __init__(
        self, orders: list[Any], held: list[torch.Tensor], seconds: float, options: ServerOptions, lanes: int | None
    ) -> None:
        self._held = held
        self._bytes = 0
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None
        if orders:
            arguments = (orders, seconds, options, lanes)
            self._thread = threading.Thread(target=self._run, args=arguments, name="tensorferry-spread", daemon=True)
            self._thread.start()

    def _run(self, orders: list[Any], seconds: float, options: ServerOptions, lanes: int | None) -> None:
        """Fetches, in the thread; keeps the error, if there is one, for :meth:`result`."""
        try:
            report = _fetch_slices(
                orders, timeout=seconds, lanes=lanes, same_host=options.same_host, ahead=AHEAD, secret=options.secret
            )
            self._bytes = report.bytes
        except Exception as e:
            self._failed = e

    def result(self) -> int:
        """Waits, and returns how many bytes were fetched.

        Raises:
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        self.end()
        if self._failed is not None:
            raise self._failed
        return self._bytes

    def end(self) -> None:
        """Waits until the thread has ended, and no longer writes to the memory."""
        if self._thread is not None:
            uninterrupted(self._thread.join)


def raise_if(failed: BaseException | None) -> None:
    """Raises an error that a rank has kept until the others knew of it, if there is one."""
    if failed is not None:
        raise failed


def _is_direct(target: torch.Tensor) -> bool:
    return bool(target.device.type == "cpu" and target.is_contiguous())


def needs_of(loading: Loading) -> Iterator[tuple[int, ShardId, Need]]:
    """Yields the number of each leaf that holds elements, what identifies its shard, and how much it is."""
    for number, leaf in loading.tensors.items():
        target = loading.leaf(number)
        if target.numel():
            shard = (leaf.key, shards.box_of(leaf), tuple(map(int, leaf.global_shape)), str(target.dtype))
            yield number, shard, Need(target.nbytes, _is_direct(target))


def _slice(number: int, tensor: torch.Tensor) -> SliceTuple:
    """Returns the slice that fetches a whole entry into ``tensor``."""
    return (str(number), "U8", tensor.nbytes, 0, tensor.nbytes, address(tensor), [])


def _in_order(parts: list[ChunkPart], shape: Sequence[int], size: int) -> Iterator[tuple[ChunkPart, int]]:
    """Yields parts of about ``_BATCH`` bytes at most, in order, each with how many elements are complete behind it.

    Those are the elements at the beginning of the shard without a gap: parts that are not whole rows of the shard are
    complete when all of them are read.

    Args:
        parts: those of a shard
        shape: that of the shard
        size: bytes of an element
    """
    dim = next((d for d, length in enumerate(shape) if length > 1), 0)
    width = _without(shape, dim)
    if not shape or any(_without(part.wanted.sizes, dim) != width for part in parts):
        pieces = [piece for part in parts for piece in _pieces(part, size)]
        for left, piece in enumerate(pieces, 1 - len(pieces)):
            yield piece, 0 if left else math.prod(shape)
        return
    for part in sorted(parts, key=lambda one: one.wanted.offsets[dim]):
        for piece in _pieces(part, size, dim):
            yield piece, (piece.wanted.offsets[dim] + piece.wanted.sizes[dim]) * math.prod(width)


def _without(sizes: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns the sizes in all other dimensions."""
    return (*sizes[:dim], *sizes[dim + 1 :])


def _pieces(part: ChunkPart, size: int, dim: int | None = None) -> Iterator[ChunkPart]:
    """Divides a part in one dimension, the first that has more than one element, into pieces of about ``_BATCH``."""
    if dim is None:
        dim = next((d for d, length in enumerate(part.wanted.sizes) if length > 1), 0)
    if not part.wanted.sizes:
        yield part
        return
    row = size * math.prod(_without(part.wanted.sizes, dim))
    most = max(1, _BATCH // row)
    for offset in range(0, part.wanted.sizes[dim], most):
        stored, offsets, sizes = list(part.stored), list(part.wanted.offsets), list(part.wanted.sizes)
        stored[dim] += offset
        offsets[dim] += offset
        sizes[dim] = min(most, sizes[dim] - offset)
        yield part._replace(stored=tuple(stored), wanted=Box(tuple(offsets), tuple(sizes)))
