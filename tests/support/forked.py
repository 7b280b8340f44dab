"""Processes forked from one that has imported torch and the package, which would take each of them 3 to 7 s of CPU.

They are children of this process, as if it had started them: the process between them exits, and the system gives its
child to this one, which has asked for orphans until then.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PR_SET_CHILD_SUBREAPER = 36

#: What the process that others are forked from imports, where it is installed; the second is imported by optimizers.
MODULES = (
    *("tensorferry.dcp", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torchft.manager"),
)

#: Run in the process that the others are forked from. What stands behind the loop runs in each of them, at the top
#: level, so that it ends like a script that the interpreter was given.
TEMPLATE = """
import atexit, fcntl, gc, importlib, json, os, random, runpy, socket, sys, threading, time, types, warnings
_modules, _orders = sys.argv[1:]
sys.argv[1:] = []
for _name in _modules.split():
    try:
        importlib.import_module(_name)
    except ModuleNotFoundError:
        pass
from tensorferry import HTTPTransport

# The collector of a child leaves alone what was imported: it would write to, and so copy, every page of that.
# The end of an interpreter collects it, all the same.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

def _next():
    orders = socket.socket(fileno=int(_orders))
    while True:
        head, given, _, _ = socket.recv_fds(orders, 8, 64)
        if not head:
            os._exit(0)
        length = int.from_bytes(head, "big")
        order = b""
        while len(order) < length:
            order += orders.recv(length - len(order))
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                orders.sendall(pid.to_bytes(8, "big"))
                os._exit(0)
            orders.close()
            order = json.loads(order)
            if order["session"]:
                os.setsid()
            while os.getppid() == between:
                time.sleep(0.001)
            numbers = order["descriptors"]
            above = [fcntl.fcntl(one, fcntl.F_DUPFD, 1 + max(*numbers, *given)) for one in given]
            for number, descriptor in zip(numbers, above):
                os.dup2(descriptor, number)
            for descriptor in range(3, 1 + max(above)):
                if descriptor not in numbers:
                    try:
                        os.close(descriptor)
                    except OSError:
                        pass
            return order
        for descriptor in given:
            os.close(descriptor)
        os.waitpid(between, 0)
        orders.sendall(b"+")

def _leave(status):
    # Threads are awaited and exit handlers run, but torch is not torn down, which takes up to a second of CPU.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

_order = _next()
_before = os.environ.get("PYTHONPATH")
os.environ.clear()
os.environ.update(_order["environment"])
os.chdir(_order["folder"])
if not sys.flags.isolated:
    _first = {"-c": "", "-m": os.getcwd()}.get(_order["kind"], os.path.dirname(os.path.realpath(_order["what"])))
    _path = os.environ.get("PYTHONPATH")
    sys.path[: 1 + len(_before.split(os.pathsep) if _before else ())] = [
        _first, *(os.path.abspath(one) for one in (_path.split(os.pathsep) if _path else ()))
    ]
# Those of the template may be of files, which can seek.
sys.stdin = sys.__stdin__ = open(0, closefd=False)
sys.stdout = sys.__stdout__ = open(1, "w", 1 if os.environ.get("PYTHONUNBUFFERED") else -1, closefd=False)
sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
sys.argv = [_order["kind"] if _order["kind"] in ("-c", "-m") else _order["what"], *_order["arguments"]]
_main = sys.modules["__main__"] = types.ModuleType("__main__")
random.seed()
if _order["ignore"]:
    warnings.simplefilter("ignore")

def _run():
    if _order["kind"] == "-m":
        runpy._run_module_as_main(_order["what"])
        return
    name, source = "<string>", _order["what"]
    if _order["kind"] != "-c":
        name = _main.__file__ = _order["what"]
        with open(name, "rb") as file:
            source = file.read()
    exec(compile(source, name, "exec"), _main.__dict__)

if _order["to_the_end"]:
    _run()
else:
    try:
        _run()
    except SystemExit as _ended:
        if not isinstance(_ended.code, (int, type(None))):
            print(_ended.code, file=sys.stderr)
        _leave(_ended.code if isinstance(_ended.code, int) else int(_ended.code is not None))
    except Exception as _error:
        _after = _error.__traceback__.tb_next.tb_next
        sys.excepthook(type(_error), _error.with_traceback(_after), _after)
        _leave(1)
    _leave(0)
"""

#: Read when an interpreter or torch starts: with other values than this process has, a new interpreter is started.
_EARLY = ("GLIBC_", "LD_", "MALLOC_", "PYTHON", "TORCH_")
_ANY = {"PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}


class Template:
    """The process that others are forked from; it ends with this one."""

    def __init__(self, python: tuple[str, ...], modules: tuple[str, ...], path: str | None) -> None:
        self._orders, theirs = socket.socketpair()
        self._lock = threading.Lock()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        # An import that asks how many GPUs there are must leave them to the children.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if path is not None:
            environment["PYTHONPATH"] = path
        with theirs:
            self._process = _START(
                [*python, "-c", TEMPLATE, " ".join(modules), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parent,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def end(self) -> None:
        self._orders.close()
        self._process.wait()

    def fork(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Forks a process that has ``descriptors`` and follows ``order``; returns its number."""
        text = json.dumps(order).encode()
        libc = ctypes.CDLL(None)
        with self._lock:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._orders, [len(text).to_bytes(8, "big")], descriptors)
                self._orders.sendall(text)
                answer = b""
                while len(answer) < 9:
                    part = self._orders.recv(9 - len(answer))
                    assert part, "the process that others are forked from is gone"
                    answer += part
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int.from_bytes(answer[:8], "big")


_START = subprocess.Popen
_TEMPLATES: dict[tuple[int, Any], Template] = {}
_LOCK = threading.Lock()


def _template(*how: Any) -> Template:
    key = os.getpid(), how
    with _LOCK:
        if key not in _TEMPLATES:
            _TEMPLATES[key] = started = Template(*how)
            atexit.register(lambda: started.end() if key[0] == os.getpid() else None)
        return _TEMPLATES[key]


class Popen(subprocess.Popen):
    """``subprocess.Popen``, which forks an interpreter that it is asked to start.

    One that could tell the difference by its options or its environment is started anew, and so is every other program.
    What is forked has one thread for torch, and is not torn down at its end.
    """

    #: Imported before the fork, besides what is found through the path that the child has.
    modules = MODULES
    #: A path that has all that ``modules`` need.
    path: str | None = None
    to_the_end = False
    #: What is forked whatever its environment.
    always = False

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(_START._execute_child).bind(self, *arguments).arguments  # type: ignore[attr-defined]
        environment = dict(os.environ if given["env"] is None else given["env"])
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        how = None if _asks_for_a_start(given) else _parsed([os.fsdecode(one) for one in given["args"]])
        if how is None or not (self.always or _is_late(environment)):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", given["args"][0], given["args"], given["cwd"], given["env"])
        python, order = how
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        passed = sorted(given["pass_fds"])
        order |= {
            "folder": os.path.abspath(os.fsdecode(given["cwd"] or os.getcwd())),
            "environment": environment,
            "session": bool(given["start_new_session"]),
            "descriptors": [0, 1, 2, *passed],
            "to_the_end": self.to_the_end,
        }
        template = _template(python, self.modules, self.path)
        self.pid = template.fork(order, [*(n if end == -1 else end for n, end in enumerate(ends)), *passed])
        self._child_created = True
        self._close_pipe_fds(*(given[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def _asks_for_a_start(given: dict[str, Any]) -> bool:
    options = ("executable", "preexec_fn", "shell", "startupinfo", "gid", "gids", "uid")
    other = any(given.get(name) for name in options) or isinstance(given["args"], (str, bytes, os.PathLike))
    return other or given["umask"] != -1 or given.get("process_group", -1) not in (None, -1)


def _is_late(environment: dict[str, str]) -> bool:
    names = {name for name in environment.keys() | os.environ.keys() if name.startswith(_EARLY)} - _ANY
    return all(environment.get(name) == os.environ.get(name) for name in names)


def _parsed(command: list[str]) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Returns which interpreter a command asks for, and what it is to run; ``None`` of any other command."""
    python, rest, ignore = command[:1], command[1:], False
    if Path(python[0]).name not in ("python", Path(sys.executable).name):
        return None
    while rest:
        if rest[:2] == ["-W", "ignore"]:
            rest, ignore = rest[2:], True
        elif rest[0] == "-I":
            rest, python = rest[1:], [*python, "-I"]
        else:
            break
    if rest and rest[0] in ("-c", "-m"):
        kind, *rest = rest
    elif rest and not rest[0].startswith("-"):
        kind = ""
    else:
        return None
    if not rest:
        return None
    return tuple(python), {"kind": kind, "what": rest[0], "arguments": rest[1:], "ignore": ignore}


def run(
    command: Sequence[object], timeout: float, capture_output: bool = False, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``, which forks an interpreter that it is asked to start."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(list(map(str, command)), **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Always(Popen):
    always = True


class _ToTheEnd(_Always):
    to_the_end = True


def fork(
    script: str,
    environment: dict[str, Any],
    *arguments: object,
    listens: bool = False,
    python: tuple[str | Path, ...] = (sys.executable,),
    to_the_end: bool = False,
) -> Popen:
    """Returns a process that runs ``script``, with pipes for what it prints and, where it listens, for its input.

    The first call for an interpreter starts the one it is forked from. With ``to_the_end`` its interpreter is torn down
    behind the script, as any other is.
    """
    return (_ToTheEnd if to_the_end else _Always)(
        [*map(str, python), "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env=environment,
    )
