"""The progress of a receive: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from . import console

#: Seconds between two lines where there is no terminal.
_EVERY_S = 5.0
#: The name of the engine's lanes, as far as the system keeps it.
_LANE = "tensorferry-lan"


class Progress:
    """Shows how far a receive is; a context manager.

    Args:
        title: what is received
        quiet: show nothing
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = console.clean(title)
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._began = self._last = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Progress:
        if not self._quiet and console.is_terminal():
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, lanes=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` bytes are here."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, lanes=_lanes(), refresh=True)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = done
        if now - self._last < _EVERY_S:
            return
        self._last = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        console.note(
            f"{self._title}: {100 * done / max(total, 1):.0f} %, {console.amount(done)} of {console.amount(total)}, "
            f"{console.amount(rate)}/s over {_lanes()} lanes{left}"
        )


def _bar() -> Any:
    """Returns a progress bar of ``rich`` on standard error, which disappears at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[lanes]} lanes", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, highlight=False),
        auto_refresh=False,
        transient=True,
    )


def _lanes() -> int:
    """Returns how many lanes work at this moment."""
    count = 0
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                count += (task / "comm").read_text().startswith(_LANE)
    return count
