"""Two readers in one process that read a part each, with a source that counts; and what they do without each other."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tensorferry._native import Arena, Remote
from tensorferry.errors import TensorferryError
from tensorferry.net.network import Network
from tensorferry.net.serve import start
from tensorferry.storage import divided
from tensorferry.storage.divided import DividedSource, Partners
from tensorferry.storage.slices import nbytes_of

MIB = 1 << 20


class Bytes:
    """A source with entries in memory."""

    def __init__(self, entries):
        self.entries = entries
        self.read_bytes = Counter()
        self.before = lambda: None

    def read(self, slices, progress=None):
        self.before()
        for container, of_container in slices.items():
            for entry, _, _, at, run, address, repeats in of_container:
                assert not repeats
                ctypes.memmove(address, self.entries[container, entry][at : at + run], run)
                self.read_bytes[container] += run
        nbytes = sum(map(nbytes_of, slices.values()))
        if progress is not None:
            progress(nbytes, nbytes)
        return {"bytes": nbytes, "wanted": nbytes}


class Reader:
    """One rank: memory for all entries, and slices that fill it."""

    def __init__(self, entries):
        self.source = Bytes(entries)
        self.entries = entries
        self.memory = Arena([len(data) for data in entries.values()])
        self.server, host = start(20.0, Network(interface="127.0.0.1"))
        self.url = self.server.url(host)
        self.slices = {}
        self.divided = None
        for number, (container, entry) in enumerate(entries):
            part, nbytes = self.memory.part(number), len(entries[container, entry])
            self.slices.setdefault(container, []).append((entry, "U8", nbytes, 0, nbytes, part.address, []))

    def meets(self, urls, rank, containers=("one", "two")):
        partners = {name: Partners(tuple(urls), rank) for name in containers}
        self.divided = DividedSource(self.source, partners, self.server, Network(same_host=False), lambda: 30.0)

    def read(self, progress=None):
        return self.divided.read(self.slices, progress)

    def is_right(self):
        parts = zip(range(len(self.entries)), self.entries.values(), strict=True)
        return all(bytes(self.memory.part(number)) == data for number, data in parts)


@pytest.fixture
def entries():
    rng = random.Random(1)
    lengths = {("one", "a"): 9 * MIB, ("one", "b"): 2 * MIB + 77, ("two", "c"): 12 * MIB + 1, ("small", "d"): 1000}
    return {name: rng.randbytes(length) for name, length in lengths.items()}


@pytest.fixture
def readers(entries):
    made = [Reader(entries) for _ in range(2)]
    for rank, reader in enumerate(made):
        reader.meets([other.url for other in made], rank)
    yield made
    for reader in made:
        reader.server.shutdown(0.0)


def both(readers, progress=None):
    with ThreadPoolExecutor(len(readers)) as pool:
        running = [pool.submit(reader.read, progress) for reader in readers]
        return [one.result(60) for one in running]


@pytest.mark.waits
def test_each_reads_a_half_of_what_both_need_and_all_of_the_rest(readers, entries):
    total, told = sum(map(len, entries.values())), defaultdict(list)
    reports = both(readers, lambda done, _: told[threading.get_ident()].append(done))
    assert [numbers[-1] for numbers in told.values()] == [total, total]
    assert all(numbers == sorted(numbers) for numbers in told.values())
    assert [reader.is_right() for reader in readers] == [True, True]
    assert [report["wanted"] for report in reports] == [total, total]
    assert all(report["relayed"] + report["bytes"] == total for report in reports)
    read = sum((reader.source.read_bytes for reader in readers), Counter())
    alone = {name: sum(len(data) for (at, _), data in entries.items() if at == name) for name in ("one", "two")}
    assert read == Counter({**alone, "small": 2000})


@pytest.mark.waits
def test_what_the_other_does_not_give_is_read(readers, monkeypatch, caplog):
    monkeypatch.setattr(divided, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(divided, "_QUIET_S", 0.1)
    report = readers[0].read()
    assert readers[0].is_right()
    assert report["relayed"] == 0
    assert report["bytes"] == report["wanted"]
    assert "they stand still" in caplog.text
    # Nobody is waited for a second time, and nobody waits for this one.
    caplog.clear()
    assert readers[0].read()["relayed"] == 0
    assert "store" not in caplog.text
    with pytest.raises(TensorferryError):
        Remote.open([readers[0].url], 2, timeout=5.0)


@pytest.mark.waits
@pytest.mark.parametrize("how", ["gone", "another plan"])
def test_others_that_are_gone_or_need_something_else_are_done_without(readers, monkeypatch, caplog, how):
    monkeypatch.setattr(divided, "_QUIET_S", 0.1)
    if how == "gone":
        readers[1].server.shutdown(0.0)
        report = readers[0].read()
    else:
        # A tensor comes to this one in two pieces, of which the other, which reads them, knows nothing.
        entry, dtype, nbytes, begin, _, address, _ = readers[0].slices["one"][0]
        runs = [(begin, MIB), (begin + MIB, nbytes - MIB)]
        readers[0].slices["one"][:1] = [(entry, dtype, nbytes, at, run, address + at, []) for at, run in runs]
        for rank, reader in enumerate(readers[::-1]):
            reader.meets([other.url for other in readers[::-1]], rank)
        report = both(readers)[0]
        assert readers[1].is_right()
    assert readers[0].is_right()
    assert report["relayed"] == 0
    assert "is read from the store" in caplog.text


@pytest.mark.parametrize("when", ["start", "join"])
def test_nothing_is_fetched_any_more_after_an_interruption(readers, monkeypatch, when):
    begun = []

    class Thread(threading.Thread):
        """Is interrupted once, when it has begun or while somebody waits for its end, as by Ctrl-C."""

        def start(self):
            begun.append(self)
            super().start()
            if when == "start":
                raise KeyboardInterrupt

        def join(self, timeout=None):
            if when == "join" and not hasattr(self, "was_interrupted"):
                self.was_interrupted = True
                raise KeyboardInterrupt
            super().join(timeout)

    def is_interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(divided, "threading", SimpleNamespace(Thread=Thread, Lock=threading.Lock))
    readers[0].source.before = is_interrupted
    # The other one never begins to read, so that the fetch would wait for it.
    with pytest.raises(KeyboardInterrupt):
        readers[0].read()
    assert [thread.is_alive() for thread in begun] == [False]


def test_the_parts_are_the_same_wherever_they_go():
    rng = random.Random(2)
    for parts in (1, 2, 3, 16):
        runs = [(f"e{rng.randrange(3)}", rng.randrange(100), rng.randrange(1, 5000)) for _ in range(20)]
        slices = [
            (entry, "U8", 6000, start, run, 100_000 * number, []) for number, (entry, start, run) in enumerate(runs)
        ]
        shuffled = rng.sample(slices, len(slices))
        moved = [(*one[:5], one[5] + 7, []) for one in shuffled]
        cut, elsewhere = divided._cut(slices, parts), divided._cut(moved, parts)
        assert [[one[:5] for one in part] for part in cut] == [[one[:5] for one in part] for part in elsewhere]
        sizes = [nbytes_of(part) for part in cut]
        assert sum(sizes) == nbytes_of(slices)
        assert max(sizes) - min(sizes) <= 1
        # Each byte once, and where it belongs.
        wanted = Counter((e, s + at, to + at) for e, _, _, s, run, to, _ in slices for at in range(run))
        found = Counter((e, s + at, to + at) for part in cut for e, _, _, s, run, to, _ in part for at in range(run))
        assert found == wanted
