"""A checkpoint of any number of ranks is loaded by any other number: from files, and from a running job."""

import pytest
from job import Job

import states


@pytest.mark.parametrize(("source", "target"), [(4, 2), (2, 4), (1, 3), (3, 1), (4, 4)])
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


def test_temporary_memory_has_a_bound(tmp_path, monkeypatch):
    state = {f"w{number}": torch.full((200_000,), float(number)) for number in range(7)}
    state["large"] = torch.full((900_000,), 9.0)
    dcp.save(state, storage_writer=FileWriter(tmp_path))
    alive, most = {}, []

    def counting(nbytes):
        memory = scratch(nbytes)
        number = len(most)
        alive[number] = nbytes
        weakref.finalize(memory, alive.pop, number)
        most.append(sum(alive.values()))
        return memory

    # Two and a half of the tensors.
    monkeypatch.setattr(load_plan, "_SCRATCH", 2_000_000)
    monkeypatch.setattr(load_plan, "scratch", counting)
    found = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in state.items()}
    dcp.load(found, storage_reader=FileReader(tmp_path))
    assert all(torch.equal(found[name], tensor.half()) for name, tensor in state.items())
    # The large one alone.
    assert sorted(most)[-2:] == [1_600_000, 3_600_000]
