"""Which tests start processes: their code says so before they run, an audit hook while they do.

A test gets the mark ``process`` if it, its class, one of its fixtures, or a helper of the suite that they name, names a
way to start a process. What the package starts is not seen there: where tests are chosen by the mark, one that
starts a process without it fails, and its author writes ``@pytest.mark.process``.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: Those of torch.multiprocessing are the same objects.
WAYS = (
    *(subprocess.Popen, subprocess.run, subprocess.call, subprocess.check_call, subprocess.check_output),
    *(os.fork, os.posix_spawn, os.system, multiprocessing.get_context, multiprocessing.Process),
)
_WAYS = set(map(id, WAYS))
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class Reader:
    """Reads whether code can start a process; each function below ``folders`` is read once."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)
        self._answers: dict[Any, bool] = {}

    def starts(self, value: Any) -> bool:
        if isinstance(value, partial):
            value = value.func
        value = inspect.unwrap(value) if callable(value) else value
        if id(value) in _WAYS:
            return True
        if not isinstance(value, (FunctionType, type)) or not self._is_ours(value):
            return False
        if value not in self._answers:
            self._answers[value] = False  # until it is known, for functions that call each other
            self._answers[value] = any(map(self.starts, _parts(value)))
        return self._answers[value]

    def _is_ours(self, value: Any) -> bool:
        module = sys.modules.get(value.__module__ or "")
        return (getattr(module, "__file__", None) or "").startswith(self._folders)


def _parts(value: Any) -> Iterator[Any]:
    """Yields what a function names, and what a class is made of."""
    if isinstance(value, type):
        yield from value.__bases__
        for member in vars(value).values():
            yield member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        return
    names = set(_names(value.__code__))
    for cell in value.__closure__ or ():
        if cell.cell_contents is not value:
            yield cell.cell_contents
    for named in map(value.__globals__.get, names):
        yield named
        if isinstance(named, ModuleType):
            yield from map(vars(named).get, names)


class ProcessMarks:
    """A plugin of pytest: sets the marks, and holds tests to them. Tests and helpers lie below ``folders``."""

    def __init__(self, *folders: Path) -> None:
        self._reader = Reader(folders)
        self._started: list[str] = []
        self._starting: set[Any] = set()
        sys.addaudithook(self._note)
        # Neither a spawned process nor one of a fork server is seen by the hook.
        start = BaseProcess.start

        def noted(process: BaseProcess) -> None:
            self._started.append(f"multiprocessing {process.name}")
            start(process)

        BaseProcess.start = noted  # type: ignore[method-assign]

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            self._started.append(f"{event}{arguments[:2]!r:.200}")

    def pytest_itemcollected(self, item: Any) -> None:
        functions = [definition.func for definition in _fixtures(item)]
        if any(map(self._reader.starts, [getattr(item, "function", None), getattr(item, "cls", None), *functions])):
            item.add_marker("process")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = len(self._started)
        result = yield
        if len(self._started) > before:
            self._starting.add(fixturedef)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._started.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if "process" not in item.config.option.markexpr:
            return result
        shared = [definition.argname for definition in _fixtures(item) if definition in self._starting]
        if (self._started or shared) and not item.get_closest_marker("process"):
            what = self._started or f"its fixtures {shared}"
            pytest.fail(f"starts a process and has no mark: add @pytest.mark.process ({what})", pytrace=False)
        return result


def _fixtures(item: Any) -> list[Any]:
    """Returns the definitions of all fixtures that a test uses."""
    definitions = item._fixtureinfo.name2fixturedefs.values() if hasattr(item, "_fixtureinfo") else ()
    return [one for several in definitions for one in several]
