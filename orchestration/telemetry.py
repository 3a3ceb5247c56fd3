"""Traces: the OpenTelemetry API only, so that nothing happens until a process configures an exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import context, propagate
from opentelemetry.trace import INVALID_SPAN_CONTEXT, get_current_span


@contextmanager
def continuing(traceparent: str) -> Iterator[None]:
    """Make the trace of `traceparent` current where none is; does nothing without one."""
    if not traceparent or get_current_span().get_span_context() != INVALID_SPAN_CONTEXT:
        yield
        return
    token = context.attach(propagate.extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        context.detach(token)
