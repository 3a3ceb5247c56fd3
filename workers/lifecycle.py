"""Hooks into a worker's life, in our app or a host's: open what a process needs when it is ready, sweep where
`control` is consumed, hand everything back at the end."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any

from celery import signals

from orchestration.core.errors import Misconfigured, StoreUnavailable
from orchestration.core.ids import StepKind
from orchestration.project import load_project
from orchestration.queue.sender import refuse_broken_chords
from orchestration.settings import load_settings
from orchestration.state.checks import check_store
from orchestration.state.store import Store
from workers.approval_keys import ApprovalsOnMesh, approvals_on_mesh
from workers.draining import leave_after
from workers.runtime import close_runtime, runtime
from workers.sweeps.loop import Sweeps
from workers.watchdog import Watchdog

log = logging.getLogger("turnmill.worker")

_sweeps: Sweeps | None = None
_watchdog: Watchdog | None = None
_approvals: ApprovalsOnMesh | None = None


def connect() -> None:
    """Connect the hooks; more than once does no harm."""
    signals.after_setup_logger.connect(_on_logger, dispatch_uid="turnmill-logger")
    signals.worker_init.connect(_on_init, dispatch_uid="turnmill-init")
    signals.worker_process_init.connect(_on_process_init, dispatch_uid="turnmill-process-init")
    signals.worker_ready.connect(_on_ready, dispatch_uid="turnmill-ready")
    signals.worker_shutting_down.connect(_on_stopping, dispatch_uid="turnmill-stopping")
    signals.worker_process_shutdown.connect(_on_process_shutdown, dispatch_uid="turnmill-process-shutdown")
    signals.worker_shutdown.connect(_on_shutdown, dispatch_uid="turnmill-shutdown")


def instrument() -> None:
    """Trace tasks when the environment names an exporter (the standard OTEL_… variables)."""
    if not any(
        os.environ.get(name) for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ):
        return
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]


def _on_logger(**_: Any) -> None:
    # a line for each message taken and each task done says nothing that journal, frames and Flower do not say, and
    # costs a tenth of a worker's CPU
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _on_init(sender: Any = None, **_: Any) -> None:
    # Celery logs what a hook raises and goes on; only the end of the process keeps a worker that cannot work from saying "ready"
    try:
        refuse_broken_chords(sender.app)
        settings = load_settings()
        load_project(settings.agents)
        with suppress(StoreUnavailable):  # a worker may start before Redis does
            check_store(Store(settings))
    except Misconfigured as error:
        print(f"turnmill: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _on_process_init(**_: Any) -> None:
    instrument()


def _on_ready(sender: Any = None, **_: Any) -> None:
    global _sweeps, _watchdog, _approvals
    instrument()
    ports = runtime().ports
    _watchdog = Watchdog(ports, sender)
    _watchdog.start()
    consumed = {queue.name for queue in sender.app.amqp.queues.consume_from.values()}
    if ports.queue.queue_name(StepKind.DECIDE) in consumed:
        _sweeps = Sweeps(ports)
        _sweeps.start()
        log.info("this worker sweeps")
        _approvals = approvals_on_mesh(ports)


def _on_stopping(**_: Any) -> None:
    if _watchdog is not None:
        _watchdog.stop()
    ports = runtime().ports
    leave_after(ports, ports.settings.drain_s)


def _on_process_shutdown(**_: Any) -> None:
    close_runtime()


def _on_shutdown(**_: Any) -> None:
    global _sweeps, _approvals
    if _approvals is not None:
        _approvals.stop()
        _approvals = None
    if _sweeps is not None:
        _sweeps.stop()
        _sweeps = None
    close_runtime()
