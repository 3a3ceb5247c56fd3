"""Traces: the OpenTelemetry API only, so that nothing happens until a process configures an exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import context, propagate, trace
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


def current_traceparent() -> str:
    """The W3C traceparent of the current span; empty without one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


tracer = trace.get_tracer("turnmill")
