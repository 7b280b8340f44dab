"""Slices of tensors as runs of bytes: reading them gives what torch's slicing gives, for all strides."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry._native import _read_file
from tensorferry.dcp import FileWriter
from tensorferry.storage import slices

SHAPES = [(5, 4, 6, 130), (3, 2, 2, 2, 70), (700,), (40, 33), (1, 9, 1, 300), (2, 3, 257, 1)]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    dcp.save(tensors, storage_writer=FileWriter(folder), no_dist=True)
    (rank,) = folder.glob("rank*")
    return folder, rank, tensors


@hypothesis.given(st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_box_arrives_in_a_target_of_any_strides(saved, data):
    _, rank, tensors = saved
    name = data.draw(st.sampled_from(sorted(tensors)))
    source = tensors[name]
    box = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in source.shape]
    box = [(start, min(length, n - start)) for (start, length), n in zip(box, source.shape, strict=True)]
    lengths = [length for _, length in box]
    # A part of a larger tensor whose dimensions have another order in memory.
    order = data.draw(st.permutations(range(len(lengths))))
    room = torch.full([lengths[dim] + data.draw(st.integers(0, 2)) for dim in order], -1.0)
    part = room[tuple(slice(0, lengths[dim]) for dim in order)]
    target = part.permute([order.index(dim) for dim in range(len(order))])
    strides = [stride * 4 for stride in source.stride()]
    run, repeats = slices.runs(lengths, strides, [stride * 4 for stride in target.stride()], 4)
    assert run * math.prod(count for count, _, _ in repeats) == 4 * math.prod(lengths)
    start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    report = _read_file(rank, [(name, "F32", source.nbytes, start, run, target.data_ptr(), repeats)])
    assert report["wanted"] == 4 * math.prod(lengths)
    expected = source[tuple(slice(first, first + length) for first, length in box)]
    assert torch.equal(target, expected)
    part.fill_(-1)
    assert (room == -1).all(), "something was written beside the target"
