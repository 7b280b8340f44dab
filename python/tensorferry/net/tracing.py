"""Spans for OpenTelemetry, where it is installed."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

try:
    from opentelemetry import trace
except ImportError:
    _tracer: Any = None
else:
    # The spans go to the provider that the program sets, now or later.
    _tracer = trace.get_tracer("tensorferry")


class Span:
    """A span for the time of a ``with`` block; does nothing where the program has set up no OpenTelemetry."""

    def __init__(self, name: str, **attributes: Any) -> None:
        """The span is called ``tensorferry.<name>``; attributes get the same prefix, and ``None`` is left out."""
        self._name, self._attributes = name, attributes
        self._manager: AbstractContextManager[Any] = contextlib.nullcontext()
        self._span: Any = None

    def __enter__(self) -> Self:
        if _tracer is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._manager = _tracer.start_as_current_span(f"tensorferry.{self._name}")
        self._span = self._manager.__enter__()
        self.set(**self._attributes)
        return self

    def set(self, **attributes: Any) -> None:
        """Sets attributes, which get the prefix ``tensorferry.``."""
        if self._span is not None:
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(f"tensorferry.{name}", value)

    def last(self, name: str, seconds: float) -> None:
        """Records a span inside of this one that took ``seconds`` and ends now."""
        if self._span is not None:
            end = time.time_ns()
            _tracer.start_span(f"tensorferry.{name}", start_time=end - int(seconds * 1e9)).end(end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.__exit__(kind, error, traceback)
