"""A checkpoint of any number of ranks is loaded by any other number: from files, and from a running job."""

import pytest
from job import Job

import states
from nights import mostly_at_night

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("source", "target"), mostly_at_night([(4, 2), (2, 4), (1, 3), (3, 1), (4, 4)]))
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_dtype_and_placement_arrives_bit_by_bit(source, target, tmp_path):
    with Job(source) as saving, Job(target) as loading:
        for turn in range(2):
            ours, theirs = tmp_path / f"ours{turn}", tmp_path / f"theirs{turn}"
            strings = set(saving.run(states.save, turn, ours, theirs))
            assert len(strings) == 1, "all ranks have the same string"
            problems = loading.run(states.load, turn + 1, ours, theirs, strings.pop())
            assert problems == [[]] * target
            saving.run(states.end)
