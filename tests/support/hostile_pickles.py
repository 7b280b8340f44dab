"""Pickles that no honest sender writes, put together instruction by instruction, and a fuzzer of them.

As a program: ``python tests/support/hostile_pickles.py SECONDS [SEED]`` reads random ones in a process that refuses to
import, open, run or connect to anything meanwhile and has little memory to allocate, and prints how many there were.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
import resource
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from tensorferry import TensorferryError
from tensorferry.pickles.allowlist import Allowed
from tensorferry.pickles.globals import table
from tensorferry.state import pickling

STORAGE = torch.arange(64, dtype=torch.uint8).untyped_storage()


class Raw(bytes):
    """Instructions that leave one object on the stack."""


def global_(module: str, name: str) -> Raw:
    return Raw(say(module) + say(name) + b"\x93")


def say(value: Any) -> Raw:
    """Returns the instructions that build a value made of containers and of ``Raw``."""
    match value:
        case Raw():
            return value
        case bool() | None | float() | int() | str() | bytes():
            pickled = pickle.dumps(value, 4)[2:-1]
            return Raw(pickled[9:] if pickled.startswith(b"\x95") else pickled)
        case tuple():
            return Raw(b"(" + b"".join(map(say, value)) + b"t")
        case list():
            return Raw(b"](" + b"".join(map(say, value)) + b"e")
        case dict():
            return Raw(b"}(" + b"".join(say(k) + say(v) for k, v in value.items()) + b"u")
    raise TypeError(type(value))


def call(function: Any, *args: Any) -> Raw:
    return Raw(say(function) + say(args) + b"R")


def new(cls: Any, *args: Any) -> Raw:
    return Raw(say(cls) + say(args) + b"\x81")


def build(value: Any, state: Any) -> Raw:
    return Raw(say(value) + say(state) + b"b")


def again(value: Any, times: int, then: bytes) -> Raw:
    """Returns the instructions of ``value``, followed by ``then`` a number of times."""
    return Raw(say(value) + then * times)


def persistent(*pid: Any) -> Raw:
    return Raw(say(pid) + b"Q")


def whole(value: Any) -> bytes:
    """Returns the pickle of a list with this one object."""
    return b"\x80\x04" + say([value]) + b"."


def torch_archive(pickled: bytes | None = None, state: Any = (1,), compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns a file of ``torch.save`` as another tool would pack it, with another pickle if one is given."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(state, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w", compression) as new_:
        for name in old.namelist():
            new_.writestr(name, pickled if pickled is not None and name.endswith("data.pkl") else old.read(name))
    return packed.getvalue()


def read(data: bytes, allowed: Allowed | None = None) -> list[Any]:
    leaves = [torch.arange(6.0), torch.tensor([0, 2, 1])]
    return pickling.load(data, allowed or Allowed(), leaves, lambda _: STORAGE, {})


# The fuzzer. ---------------------------------------------------------------------------------------------------------

_FORBIDDEN = (
    "import", "open", "os.", "subprocess.", "socket.", "exec", "compile", "ctypes.", "shutil.", "pty.", "signal.",
    "glob.", "tempfile.", "urllib.", "webbrowser.", "marshal.", "code.__new__", "function.__new__", "builtins.input",
)  # fmt: skip
_BYTES_OVER = 1 << 30

_TRACE: list[str] = []
_watching = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event.startswith(_FORBIDDEN):
        # The event is recorded as well, because the code that led to it may catch this exception.
        _TRACE.append(f"{event}{args!r:.200}")
        raise RuntimeError(f"the pickle led to {event}")


HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 624, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 70), 10**4000,
    0.0, 1.5, float("inf"), float("nan"), "", "a", "cpu", "meta", "cuda:0", "torch.strided", "torch.sparse_coo",
    "latin1", "zlib_codec", "O", "f4", "V16", "U999999999", "M8", "<", "__class__", "__dict__",
    "_local_tensor", "size", "data", "1e999999999", "9" * 5000, "../../etc", b"", b"b", b"\x00" * 8, b"\xff" * 100,
]  # fmt: skip


class Maker:
    """Makes random pickles that use every global of the table."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [name for name in dict.fromkeys(table.names()) if _is_there(*name)]

    def value(self, depth: int = 4) -> Any:
        chance = self.chance
        kind = chance.random() if depth else chance.random() * 0.4
        if kind < 0.3:
            return chance.choice(HOSTILE)
        if kind < 0.4:
            return self.reference()
        if kind < 0.5:
            return tuple(self.value(depth - 1) for _ in range(chance.randrange(7)))
        if kind < 0.56:
            return [self.value(depth - 1) for _ in range(chance.randrange(4))]
        if kind < 0.62:
            keys = chance.sample(["state", "key", "dim", "reduce_op", "values", "_spec", "a", "_make"], 3)
            return {key: self.value(depth - 1) for key in keys}
        if kind < 0.66:
            return Raw(global_(*chance.choice(self.names)))
        return self.made(depth)

    def reference(self) -> Raw:
        match self.chance.randrange(4):
            case 0:
                return persistent("leaf", self.chance.randrange(3))
            case 1:
                return persistent("untyped", 0)
        dtype = self.chance.choice(["float32", "uint8", "qint8", "quint4x2", "complex64", "int64"])
        return persistent("typed", 0, dtype)

    def made(self, depth: int) -> Raw:
        chance = self.chance
        name = chance.choice(self.names)
        args = self.arguments(name, depth - 1)
        match chance.randrange(8):
            case 0 | 1 | 2 | 3:
                made = call(global_(*name), *args)
            case 4:
                made = new(global_(*name), *args)
            case 5:
                made = new(global_(*name))
            case 6:
                cls = Raw(b"cbuiltins\nlist\n") if chance.random() < 0.1 else global_(*name)
                made = Raw(say(cls) + say(tuple(args)) + say({"a": 1}) + b"\x92")
            case _:
                made = global_(*name)
        match chance.randrange(11):
            case 0 | 1 | 2:
                made = build(made, self.value(depth - 1))
            case 3:
                made = build(made, (None, {"size": self.value(1), "__class__": self.value(1)}))
            case 4:
                made = Raw(made + say(self.value(1)) + chance.choice([b"a", say(self.value(1)) + b"s"]))
            case 5:
                made = Raw(made + b"(" + say(self.value(1)) + b"\x90")
            case 6:
                made = Raw(made + b"\x94h" + bytes([chance.randrange(4)]) + b"\x86")
        return made

    def arguments(self, name: tuple[str, str], depth: int) -> list[Any]:
        """Returns arguments that mostly have the expected types, so that later checks are reached as well."""
        chance = self.chance
        number = lambda: chance.choice([0, 1, 2, 3, 4, 8, 16, 64, 65, 1 << 40, 1 << 61, -1])  # noqa: E731
        shape = lambda: tuple(number() for _ in range(chance.randrange(4)))  # noqa: E731
        storage = self.reference()
        tensor = call(
            global_("torch._utils", "_rebuild_tensor_v2"), persistent("typed", 0, chance.choice(["float32", "int64"])),
            0,
            chance.choice([(2,), (2, 2), (1, 2), (0,)]), (1,), False, call(global_("collections", "OrderedDict")),
        )  # fmt: skip
        hooks = call(global_("collections", "OrderedDict"))
        layout = call(
            global_("torch.serialization", "_get_layout"), chance.choice(["torch.strided", "torch.sparse_coo"])
        )
        dtype = global_("torch", chance.choice(["float32", "int64", "complex64", "quint8", "uint8"]))
        known = {
            "_rebuild_tensor": [storage, number(), shape(), shape()],
            "_rebuild_tensor_v2": [storage, number(), shape(), shape(), chance.random() < 0.3, hooks],
            "_rebuild_tensor_v3": [storage, number(), shape(), shape(), False, hooks, dtype],
            "_rebuild_parameter": [tensor, False, hooks],
            "_rebuild_parameter_with_state": [tensor, False, hooks, {chance.choice(["size", "note"]): self.value(1)}],
            "_rebuild_sparse_tensor": [layout, (tensor, tensor, shape(), True)],
            "_rebuild_meta_tensor_no_storage": [dtype, shape(), shape(), False],
            "_rebuild_wrapper_subclass": [
                global_(*chance.choice(self.names)), dtype, shape(), shape(), number(), layout, "cpu", False,
            ],
            "_rebuild_from_type_v2": [
                global_("torch._utils", chance.choice(["_rebuild_tensor_v2", "_rebuild_wrapper_subclass"])),
                global_(*chance.choice(self.names)), (storage, 0, (2,), (1,), False, hooks), {"a": self.value(1)},
            ],
            "_reconstruct": [global_("numpy", "ndarray"), (0,), b"b"],
            "dtype": [chance.choice(["O", "f4", "V8", "U4", "M8", "S0", "V0"]), False, True],
            "scalar": [
                build(call(global_("numpy", "dtype"), "f4", False, True), (3, "<", None, None, None, -1, -1, 0)),
                b"\0" * chance.choice([0, 4, 8]),
            ],
            "Generator": [call(global_("torch", "device"), chance.choice(["cpu", "meta"]))],
            "defaultdict": [global_(*chance.choice(self.names))],
        }  # fmt: skip
        if name[1] in known and chance.random() < 0.7:
            args = known[name[1]]
            if args and chance.random() < 0.4:
                args[chance.randrange(len(args))] = self.value(1)
            return args
        return [self.value(max(depth, 0)) for _ in range(chance.randrange(5))]


def _is_there(module: str, name: str) -> bool:
    try:
        table.find(module, name)
    except LookupError:
        return False
    return True


def fuzz(seconds: float, seed: int) -> tuple[int, int, set[tuple[str, str]]]:
    """Reads random pickles; how many there were, how many of them made an object, and what globals made one."""
    global _watching
    maker = Maker(seed)
    # torch, numpy and Python import some modules on first use: they may do that now.
    Allowed().allows("a", "b")
    for data in (whole(maker.value()) for _ in range(1000)):
        _quietly(data)
    sys.addaudithook(_audit)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES_OVER, used + _BYTES_OVER))
    count = made = 0
    # First each global once, without arguments; then random pickles.
    first = [op(global_(*name)) for name in maker.names for op in (call, new, lambda g: build(g, {"a": 1}))]
    end = time.monotonic() + seconds
    source = itertools.chain(first, iter(lambda: maker.value(), object()))
    for value in source:
        data = whole(value)
        began = time.monotonic()
        _watching = True
        try:
            good = _quietly(data)
        finally:
            _watching = False
        if _TRACE:
            raise AssertionError(f"{_TRACE[0]} of {data.hex()}")
        if (took := time.monotonic() - began) > 5:
            raise AssertionError(f"{took:.1f} s for {data.hex()}")
        count += 1
        made += good
        if time.monotonic() > end and count > len(first):
            break
    return count, made, set(maker.names)


def _quietly(data: bytes) -> bool:
    try:
        read(data)
    except TensorferryError as error:
        if len(str(error)) > 5000:
            raise AssertionError(f"a message of {len(str(error))} characters of {data.hex()}") from error
        cause = error.__cause__
        if isinstance(cause, MemoryError | RecursionError | SystemError):
            raise AssertionError(f"{cause!r:.300} of {data.hex()}") from error
        return False
    return True


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ran, made, names = fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{ran} pickles of {len(names)} globals, {made} made an object")
