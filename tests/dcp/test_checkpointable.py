"""Tensors that describe their own shards to torch, by methods or by attributes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import states
from states import TIMEOUT
from states import whole as made
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter

pytestmark = pytest.mark.nightly


SHAPE = (23, 300)


class Banded(torch.Tensor):
    """Two bands of rows of a larger tensor, described by the methods that torch looks for."""

    @staticmethod
    def of(rows, first, height):
        found = rows.as_subclass(Banded)
        found.first, found.height = first, height
        return found

    def _bands(self):
        count = len(self)
        for start, end in ((0, count // 2), (count // 2, count)):
            yield start, ChunkStorageMetadata(torch.Size((self.first + start, 0)), torch.Size((end - start, SHAPE[1])))

    def __create_chunk_list__(self):
        return [chunk for _, chunk in self._bands()]

    def __create_write_items__(self, fqn, itself):
        del itself
        properties = TensorProperties(dtype=self.dtype)
        size = torch.Size((self.height, SHAPE[1]))
        return [
            WriteItem(
                MetadataIndex(fqn, c.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(c, properties, size)
            )
            for _, c in self._bands()
        ]

    def __get_tensor_shard__(self, index):
        for start, chunk in self._bands():
            if chunk.offsets == index.offset:
                return self.as_subclass(torch.Tensor)[start : start + chunk.sizes[0]]
        raise AssertionError(f"no band at {index}")

    def size(self, *dim):
        return torch.Size((self.height, SHAPE[1])) if not dim else super().size(*dim)


def _share():
    rank, world = dist.get_rank(), dist.get_world_size()
    return SHAPE[0] * rank // world, SHAPE[0] * (rank + 1) // world


def banded(value):
    first, end = _share()
    return Banded.of(value[first:end].clone(), first, len(value))


def padded(value):
    """Returns a buffer with this rank's rows in another order and with padding between them."""
    first, end = _share()
    middle = (first + end) // 2
    parts = [(middle, end, 1), (first, middle, end - middle + 3)]
    buffer = torch.full((end - first + 4, SHAPE[1]), -1.0)
    for start, stop, at in parts:
        buffer[at : at + stop - start] = value[start:stop]
    buffer.global_shape = SHAPE
    buffer.global_offsets = tuple((start, 0) for start, _, _ in parts)
    buffer.local_offsets = tuple((at, 0) for _, _, at in parts)
    buffer.local_sizes = tuple((stop - start, SHAPE[1]) for start, stop, _ in parts)
    return buffer


def wrapped(value):
    """Returns a tensor of which each rank has two shards of columns, as TorchRec shards its tables."""
    rank, world = dist.get_rank(), dist.get_world_size()
    edges = [SHAPE[1] * i // (2 * world) for i in range(2 * rank, 2 * rank + 3)]
    shards = [value[:, a:b].clone() for a, b in itertools.pairwise(edges)]
    local = LocalShardsWrapper(shards, [(0, edges[0]), (0, edges[1])])
    mesh = init_device_mesh("cpu", (world,))
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=value.shape, stride=value.stride())


def shards(value):
    """Returns the tensors that hold the memory of ``value``."""
    if isinstance(value, DTensor):
        return value.to_local().local_shards()
    return [value.as_subclass(torch.Tensor)]


def kinds():
    """Returns functions that shard a tensor, by name. torch 2.8 does not know the attributes."""
    known = {"methods": banded, "wrapper": wrapped}
    return known | ({"attributes": padded} if hasattr(dcp, "CheckpointableTensor") else {})


def _save(kept, folder):
    state = {kind: spread(made(kind, torch.float32, SHAPE)) for kind, spread in kinds().items()}
    dcp.save(state, storage_writer=FileWriter(folder))
    kept["state"], kept["writer"] = state, PeerWriter(TIMEOUT, interface="127.0.0.1")
    dcp.save(state, storage_writer=kept["writer"])
    return kept["writer"].metadata()


def _end(kept):
    kept["writer"].shutdown()


def _load(kept, folder, metadata):
    del kept
    problems = []
    for way, reader in (("files", FileReader(folder)), ("peers", PeerReader(metadata, timeout=TIMEOUT))):
        for turned in (False, True):
            spreads = list(kinds().values())
            # The second time, each is loaded into a tensor that is sharded by another function.
            spreads = spreads[1:] + spreads[:1] if turned else spreads
            expected = {
                kind: spread(made(kind, torch.float32, SHAPE)) for kind, spread in zip(kinds(), spreads, strict=True)
            }
            found = {kind: spread(torch.zeros(SHAPE)) for kind, spread in zip(kinds(), spreads, strict=True)}
            places = {kind: [shard.data_ptr() for shard in shards(value)] for kind, value in found.items()}
            dcp.load(found, storage_reader=reader)
            for kind, value in found.items():
                if not all(map(states.same_bits, shards(value), shards(expected[kind]))):
                    problems.append(f"{kind} from {way}, turned={turned}")
                if [shard.data_ptr() for shard in shards(value)] != places[kind]:
                    problems.append(f"{kind} from {way} is other memory now")
    return problems


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_they_are_saved_and_loaded_part_by_part(tmp_path):
    with Job(2) as source:
        (metadata, _) = source.run(_save, tmp_path / "ck")
        for world in (1, 3):
            with Job(world) as target:
                assert target.run(_load, tmp_path / "ck", metadata) == [[]] * world
        source.run(_end)
