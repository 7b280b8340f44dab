"""Spans for OpenTelemetry, where the process uses it.

Nothing is imported for that: where nobody has imported ``opentelemetry.trace``, nobody has set up an exporter, and a
span costs one look into ``sys.modules``. torchft imports it without setting one up, and a span then costs one question.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger("tensorferry")


class Span:
    """A span for the time of a ``with`` block. What goes wrong in tracing is logged at DEBUG and never raised."""

    def __init__(self, name: str, **attributes: Any) -> None:
        """The span is called ``tensorferry.<name>``; attributes get the same prefix, and ``None`` is left out."""
        self._name, self._attributes = name, attributes
        self._manager: AbstractContextManager[Any] | None = None
        self._span: Any = None

    def __enter__(self) -> Self:
        if (trace := sys.modules.get("opentelemetry.trace")) is not None and _is_recorded(trace):
            try:
                self._manager = trace.get_tracer("tensorferry").start_as_current_span(f"tensorferry.{self._name}")
                self._span = self._manager.__enter__()
            except Exception:
                self._manager = self._span = None
                logger.debug("no span is recorded", exc_info=True)
            self.set(**self._attributes)
        return self

    def set(self, **attributes: Any) -> None:
        """Sets attributes, which get the prefix ``tensorferry.``."""
        if self._span is None:
            return
        try:
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(f"tensorferry.{name}", value)
        except Exception:
            logger.debug("an attribute of a span is not recorded", exc_info=True)

    def last(self, name: str, seconds: float) -> None:
        """Records a span inside of this one that took ``seconds`` and ends now."""
        if self._span is None:
            return
        try:
            end = time.time_ns()
            tracer = sys.modules["opentelemetry.trace"].get_tracer("tensorferry")
            tracer.start_span(f"tensorferry.{name}", start_time=end - int(seconds * 1e9)).end(end)
        except Exception:
            logger.debug("no span is recorded", exc_info=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        manager, self._manager, self._span = self._manager, None, None
        if manager is None:
            return
        try:
            manager.__exit__(kind, error, traceback)
        except BaseException as e:
            # The generator behind the manager raises the block's own error again.
            if e is not error:
                logger.debug("the end of a span is not recorded", exc_info=True)
                if not isinstance(e, Exception):
                    raise


def _is_recorded(trace: Any) -> bool:
    """Whether spans go anywhere: not before a program or the environment has chosen a provider of tracers."""
    try:
        # OpenTelemetry would look into the environment each time (measured: 30 us of the 550 of a small send).
        if getattr(trace, "_TRACER_PROVIDER", trace) is None and not _is_chosen_by_environment():
            return False
        return not isinstance(trace.get_tracer_provider(), getattr(trace, "ProxyTracerProvider", ()))
    except Exception:
        logger.debug("no span is recorded", exc_info=True)
        return False


@functools.cache
def _is_chosen_by_environment() -> bool:
    """Whether this process was started with a provider of tracers in its environment."""
    return "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
