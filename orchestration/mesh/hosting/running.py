"""Runs the functions of tools: sync ones in the host's threads, async ones on one event loop. Knows no mesh and no records."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from orchestration.core.tool import Tool
from orchestration.core.tool_error import ToolError
from orchestration.mesh.hosting import answers
from orchestration.mesh.hosting.answers import Answer

log = logging.getLogger(__name__)

_tracer = trace.get_tracer("turnmill.tool_host")
_propagator = TraceContextTextMapPropagator()


class Runner:
    """Runs one tool at a time for each caller. The loop's thread is started with the first async tool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self, tool: Tool[..., Any], arguments: dict[str, Any], *, correlation_id: str, traceparent: str, done: Callable[[Answer], None]
    ) -> None:
        """Run `tool` and pass its answer to `done`: in this thread for a sync function, later and in the loop's for an async one."""
        if inspect.iscoroutinefunction(tool.function):
            asyncio.run_coroutine_threadsafe(
                self._run_async(tool, arguments, correlation_id, traceparent), self._running_loop()
            ).add_done_callback(lambda future: done(_answer_of(future, correlation_id)))
            return
        try:
            with _span(tool, traceparent):
                result = tool.function(**arguments)
        except BaseException as error:  # a tool that calls sys.exit must not end the host's thread
            done(_failed(tool, error, correlation_id))
            return
        if inspect.isawaitable(result):
            asyncio.run_coroutine_threadsafe(self._await(tool, result, correlation_id), self._running_loop()).add_done_callback(
                lambda future: done(_answer_of(future, correlation_id))
            )
            return
        done(_result(tool, result, correlation_id))

    def close(self) -> None:
        """Stop the loop; what still runs on it is left unfinished."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_turn_loop, args=(self._loop,), name="tool-loop", daemon=True).start()
            return self._loop

    async def _run_async(self, tool: Tool[..., Any], arguments: dict[str, Any], correlation_id: str, traceparent: str) -> Answer:
        with _span(tool, traceparent):
            return await self._await(tool, tool.function(**arguments), correlation_id)

    async def _await(self, tool: Tool[..., Any], result: Awaitable[Any], correlation_id: str) -> Answer:
        try:
            return _result(tool, await result, correlation_id)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return _failed(tool, error, correlation_id)


def _turn_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _answer_of(future: Future[Answer], correlation_id: str) -> Answer:
    if future.cancelled() or future.exception() is not None:
        return answers.of_error("unknown_outcome", "the host stopped while the tool ran", correlation_id=correlation_id)
    return future.result()


def _result(tool: Tool[..., Any], value: Any, correlation_id: str) -> Answer:
    try:
        return answers.of_result(value)
    except Exception as error:
        return _failed(tool, error, correlation_id)


def _failed(tool: Tool[..., Any], error: BaseException, correlation_id: str) -> Answer:
    if not isinstance(error, ToolError):
        log.error("tool %s failed (%s): %s", tool.spec.prefix, correlation_id, answers.where(error))
    return answers.of_exception(error, correlation_id=correlation_id)


class _span:
    """A span of the caller's trace around one run. Exceptions are not recorded in it: their text may hold arguments."""

    def __init__(self, tool: Tool[..., Any], traceparent: str) -> None:
        parent = _propagator.extract({"traceparent": traceparent}) if traceparent else context.get_current()
        self._span = _tracer.start_as_current_span(
            f"tool {tool.spec.prefix}", context=parent, kind=trace.SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        )

    def __enter__(self) -> None:
        self._span.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._span.__exit__(*raised)
