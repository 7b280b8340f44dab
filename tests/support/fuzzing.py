"""Feeds receivers with mutated manifests, indexes, files and torchft bodies.

`python fuzzing.py TARGET RUNS SEED`. Each input must be accepted or raise a TensorferryError, within a bound of time
and of memory. An input that breaks this is printed, and the process exits with 1.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import random
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import indexes
import tensorferry
from exchange import Listener
from tensorferry import HTTPTransport
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, index
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state import snapshot
from tensorferry.storage import reserved
from tensorferry.torchft import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = timedelta(seconds=10)
MIB = 1 << 20
#: The additional memory and the seconds that one input may take.
MEMORY, SECONDS = 64 * MIB, 30
#: Above this much resident memory the process ends at once.
ALL = 3 << 30

HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 64, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
    10**12, 20 * 10**9, 1.5, -0.0, 1e300, "", "\0", "x" * 300, "../../etc/passwd", "/etc/passwd", "..", "a b", "\ud800",
    "http://127.0.0.1:1/\r\nX: y/", "1 http://127.0.0.1:1/", "-1", "²", "9" * 5000, "torch.os", "float32", "quint8",
    [], {}, [[]], {"a": 1}, [0, 0], [-1], [2**63], [[0, 0]], [[0, 2**62]], {"paths": {"a": [10**12]}}, {"pickle": "%"},
]  # fmt: skip


def status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) << 10


def guard() -> None:
    """Ends the process before it takes too much of the machine's memory."""
    while True:
        if status("VmRSS") > ALL:
            os.write(2, b"far too much memory\n")
            os._exit(3)
        time.sleep(0.005)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container in a JSON value with each of its keys."""
    keys = range(len(value)) if isinstance(value, list) else list(value)
    for key in keys:
        yield value, key
        if isinstance(value[key], (list, dict)):
            yield from places(value[key])


def mutated(value: Any, chance: random.Random) -> Any:
    """Returns a copy of a JSON value with one to three random changes."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        found = list(places(value))
        if not found:
            break
        holder, key = chance.choice(found)
        what = chance.randrange(7)
        if what < 3:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))
        elif what == 3:
            del holder[key]
        elif what == 4:
            other, there = chance.choice(found)
            if there in (other if isinstance(other, dict) else range(len(other))):
                holder[key] = copy.deepcopy(other[there])
        elif what == 5 and type(holder[key]) is int:
            holder[key] += chance.choice([-1, 1, 2, 100, 2**20, 2**40])
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[chance.choice(["~", "x" * 50, "__tensorferry__/y"])] = copy.deepcopy(holder[key])
    return value


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Returns the bytes with some of them changed, cut or repeated."""
    bad = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(bad) or 1)
        what = chance.randrange(4)
        if what < 2 and bad:
            bad[at] = chance.randrange(256)
        elif what == 2:
            del bad[at : at + chance.randint(1, 1 << chance.randrange(12))]
        else:
            bad[at:at] = bad[at : at + chance.randint(1, 64)]
    return bytes(bad)


def sample() -> dict[str, Any]:
    base = torch.arange(6000.0)
    return {
        "model": OrderedDict(w=torch.nn.Parameter(torch.ones(3, 4)), b=torch.ones(4, dtype=torch.bfloat16)),
        "views": [base[10:14], base[5000:5003], base[::7], torch.zeros(1 << 20)[7:9]],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.ones(3, 4)}}, "groups": [{"lr": 0.1}]},
        "eight": torch.ones(5, dtype=torch.uint8).view(torch.float8_e5m2),
        "counts": torch.arange(5),
        ("a", 1): (torch.zeros(0, 3), "text"),
        "large": torch.ones(70_000),
    }


class Manifests:
    """Mutated manifests, and headers with entries of odd shapes."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bad: tuple[str, bytes] = ("", b"")
        self._live = sample()
        self._source = HTTPTransport(TIMEOUT, 0)
        self._targets = [HTTPTransport(TIMEOUT, 0), HTTPTransport(TIMEOUT, 0, state_dict=lambda: self._live)]
        self._step = 0
        snapshot.StateSnapshot._control = self._control  # type: ignore[method-assign,assignment]

    def _control(self) -> list[tuple[str, bytes]]:
        pickled = self._packed.pickle_bytes
        control = [(reserved.MANIFEST, snapshot._padded(self._bad[1], b" "))]
        return [*control, (reserved.PICKLE, snapshot._padded(pickled, b"\0"))] if pickled else control

    def __call__(self) -> None:
        # The traceback of the last receive kept its connection open, and a withdrawal would wait two seconds for that.
        self._source.disallow_checkpoint()
        chance = self._chance
        self._step += 1
        kept = snapshot.StateSnapshot.publish

        def publish(packed: Any, *arguments: Any) -> None:
            self._packed = packed
            manifest = json.loads(packed.manifest())
            if chance.random() < 0.2:
                shape = tuple(
                    chance.choice([0, 1, 2**31, 2**62, 2**63 - 1]) for _ in range(chance.choice([1, 2, 3, 70]))
                )
                shape = (0, *shape)
                packed.rows.append(torch.zeros(0), "odd", chance.choice(["F32", "U8", "I64"]), shape, 0, 0, 0)
                manifest["flags"] = ""
            elif chance.random() < 0.1:
                manifest["flags"] = "".join(chance.choice("0123") for _ in manifest["flags"])
            else:
                manifest = mutated(manifest, chance)
            text = json.dumps(manifest).encode()
            self._bad = ("", flipped(text, chance) if chance.random() < 0.1 else text)
            kept(packed, *arguments)

        snapshot.StateSnapshot.publish = publish  # type: ignore[method-assign]
        try:
            self._source.send_checkpoint([1], self._step, self._state(), TIMEOUT)
        finally:
            snapshot.StateSnapshot.publish = kept  # type: ignore[method-assign]
        self._receive(self._source.metadata())

    def _state(self) -> dict[str, Any]:
        return sample()

    def _receive(self, metadata: str) -> None:
        self._chance.choice(self._targets).recv_checkpoint(0, metadata, self._step, TIMEOUT)

    def shown(self) -> str:
        return self._bad[1].decode(errors="replace")


class States(Manifests):
    """The same, of states that a ``PeerReader`` loads, as keepers serve them."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (1,))
        self._spread = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])

    def _state(self) -> dict[str, Any]:
        return {**states(), "spread": self._spread}

    def _receive(self, metadata: str) -> None:
        load(PeerReader(f"tensorferry-dcp/1 {self._step} {metadata}", timeout=TIMEOUT))


def states() -> dict[str, Any]:
    """What :func:`load` loads."""
    nested = {"y": [torch.zeros(3), torch.ones(2)]}
    return {"x": torch.ones(4, 300), "nested": nested, "o": {1, 2}, "n": 3, "sparse": torch.eye(3).to_sparse()}


class Indexes:
    """Mutated indexes of checkpoints, of a folder and of a running job."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._text = b""
        self._state = states()
        self._folder = tempfile.TemporaryDirectory()
        self._peer = PeerWriter(TIMEOUT, interface="127.0.0.1")
        self._encode = index.encode

    def _write(self, *arguments: Any) -> bytes:
        good = self._encode(*arguments)
        if self._chance.random() < 0.1:
            self._text = flipped(good, self._chance)
        else:
            columns = indexes.taken_apart(good)
            for _ in range(self._chance.randint(1, 3)):
                rows = columns[self._chance.choice([*columns])]
                at, what = self._chance.randrange(len(rows) + 1), self._chance.randrange(4)
                if what == 0:
                    del rows[at : at + 1]
                else:
                    new = rows[at - 1] if what == 1 and rows else self._chance.choice([0, 1, 255, 2**31, 2**62, -1])
                    rows[at : at + self._chance.randrange(2)] = [new]
            texts = {name: [str(row) for row in columns[name]] for name in indexes.TEXTS}
            self._text = indexes.put_together(columns | texts)
        return self._text

    def __call__(self) -> None:
        index.encode = self._write
        try:
            if self._chance.random() < 0.7:
                dcp.save(self._state, storage_writer=FileWriter(self._folder.name), no_dist=True)
                reader: Any = FileReader(self._folder.name)
            else:
                dcp.save(self._state, storage_writer=self._peer, no_dist=True)
                reader = PeerReader(self._peer.metadata(), timeout=TIMEOUT)
        finally:
            index.encode = self._encode
        load(reader)

    def shown(self) -> str:
        return self._text.decode(errors="replace")


def load(reader: Any) -> None:
    """Does the work of `dcp.load`, which would hide the exception."""
    live = {**states(), "spread": torch.zeros(6, 4)}
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    try:
        planner.set_up_planner(live, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.create_local_plan()
        plan = planner.finish_plan(planner.create_global_plan([plan])[0])
    except Exception:  # torch's own, where the state is another than the index says.
        return
    reader.read_data(reader.prepare_local_plan(plan), planner).wait()


class Files:
    """Damaged files of a checkpoint."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        dcp.save(states(), storage_writer=FileWriter(folder), no_dist=True)
        self._good = {path: path.read_bytes() for path in folder.iterdir()}
        self._what = ""

    def __call__(self) -> None:
        chance = self._chance
        for path, data in self._good.items():
            path.unlink(missing_ok=True)
            path.write_bytes(data)
        path = chance.choice(list(self._good))
        self._what = path.name
        if chance.random() < 0.2:
            path.write_bytes(self._good[path][: chance.randrange(len(self._good[path]))])
        else:
            path.write_bytes(flipped(self._good[path], chance))
        load(FileReader(self._folder.name))

    def shown(self) -> str:
        return self._what


class Stock:
    """Mutated bodies in torchft's own format; their pickles stay as they are."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._body = b""
        recorder = compat._RecordCollector()
        torch.serialization._save(sample(), recorder, pickle, 2, False)
        self._records = recorder.records
        self._raw = b""
        for _, data, size in recorder.records:
            if isinstance(data, torch.UntypedStorage):
                self._raw += ctypes.string_at(data.data_ptr(), size) if size else b""
            else:
                self._raw += data.encode() if isinstance(data, str) else bytes(data)
        self._listener = Listener(self._serve)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + self._body)

    def __call__(self) -> None:
        chance = self._chance
        entry = torch.distributed._serialization._Entry
        storage = torch.UntypedStorage
        entries: Any = [entry(key, isinstance(data, storage), size) for key, data, size in self._records]
        for _ in range(chance.randint(1, 2)):
            one = chance.choice(entries)
            field = chance.choice(["key", "is_storage", "length"])
            setattr(one, field, chance.choice([value for value in HOSTILE if type(value) is not dict]))
        if chance.random() < 0.2:
            entries = chance.choice([entries[1:], entries[::-1], entries * 2, 7, None, {}, [1, 2]])
        body = pickle.dumps(entries, 2) + self._raw
        if chance.random() < 0.1:
            body = body[: chance.randrange(len(body))]
        self._body = body
        port = self._listener.port
        compat.receive(f"http://127.0.0.1:{port}/checkpoint/", 1, TIMEOUT, Allowed())

    def shown(self) -> str:
        return repr(self._body[:300])


TARGETS: dict[str, Callable[[random.Random], Any]] = {
    "manifest": Manifests,
    "states": States,
    "index": Indexes,
    "files": Files,
    "stock": Stock,
}


def main(target: str, runs: int, seed: int) -> int:
    warnings.simplefilter("ignore")
    threading.Thread(target=guard, daemon=True).start()
    chance = random.Random(seed)
    fuzzed = TARGETS[target](chance)
    ended: dict[str, int] = {}
    bad = 0
    for number in range(runs):
        gc.collect() if number % 50 == 0 else None
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            fuzzed()
            how = "well"
        except tensorferry.TensorferryError as error:
            how = type(error).__name__
        except Exception:
            how = "BARE"
            print(f"run {number}:\n{traceback.format_exc()}\n{fuzzed.shown()[:3000]}", flush=True)
        grown = status("VmHWM") - before
        if grown > MEMORY:
            print(f"run {number}: {grown // MIB} MiB\n{fuzzed.shown()[:3000]}", flush=True)
        bad += how == "BARE" or grown > MEMORY
        ended[how] = ended.get(how, 0) + 1
    faulthandler.cancel_dump_traceback_later()
    print(ended, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(code)
