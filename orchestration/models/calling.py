"""Asks any model a user brings: sync or async, with or without a sink, whatever shape its reply has, however it fails.

A step needs nothing else of a model. It does not try again and does not wait; `ModelError.retryable` and `retry_after_s` say
what the step may do.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import lru_cache
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any, cast

from orchestration.core.errors import ModelError
from orchestration.core.model import Delta, Message, Model, ModelFault, ModelReply, Sink, ToolDefinition
from orchestration.models.loop_thread import loop_thread
from orchestration.models.metering import noted
from orchestration.models.reply_shapes import as_reply


def call_model(
    model: Model, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
) -> ModelReply:
    """Ask `model` once and wait for its whole reply. In async code use `call_model_async`.

    `sink` is called in the thread that called this, for an async model too. A model that takes none has its reply shown in
    one piece. What `sink` raises comes out of here, whatever the model makes of it; an async model is then cancelled.

    Raises:
        ModelError: as the model raised it. Any other exception of a model becomes one that is not worth trying again
            (`unavailable`); it names the class and the line, never the text, which may hold prompts. A reply of a shape
            that nobody can read is `protocol`. Asked for an async model from the event loop that async models share, it
            would wait for ever, so it does not wait (`bad_request`).
    """
    who = name_of(model)
    takes_sink = sink is not None and _takes_sink(model)
    relay = _Relay(sink) if sink is not None and takes_sink else None
    given: dict[str, Any] = {"tools": tools} if relay is None else {"tools": tools, "sink": relay}
    try:
        found = model.complete(messages, **given)
        if inspect.isawaitable(found):
            if loop_thread.is_here:
                raise _stuck(who, found)
            found = _wait(loop_thread.submit(found), relay)
        if relay is not None:
            relay.drain()
    except BaseException as error:
        if relay is not None and relay.raised is not None:
            raise relay.raised from None
        if isinstance(error, ModelError) or not isinstance(error, Exception):
            raise
        raise _foreign(who, error) from None
    if relay is not None and relay.raised is not None:
        raise relay.raised
    reply = noted(as_reply(who, found))
    if sink is not None and not takes_sink and (reply.content or reply.thinking):
        sink(Delta(text=reply.content, thinking=reply.thinking))
    return reply


async def call_model_async(
    model: Model, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
) -> ModelReply:
    """`call_model` for async code, such as an async compactor: it waits in a thread, whatever loop runs. `sink` is called there."""
    context, future = copy_context(), Future[ModelReply]()
    future.set_running_or_notify_cancel()  # whoever waits may be cancelled; the call goes on to its end

    def run() -> None:
        try:
            future.set_result(context.run(call_model, model, messages, tools=tools, sink=sink))
        except BaseException as error:
            future.set_exception(error)

    # a thread of its own: those of a pool would hold up the end of the process as long as the model takes
    threading.Thread(target=run, name="turnmill-model-call", daemon=True).start()
    return await asyncio.wrap_future(future)


def name_of(model: Any) -> str:
    """How errors and logs name a model."""
    name = getattr(model, "model", None)
    return f"model {name!r}" if isinstance(name, str) and name else f"model {type(model).__name__}"


class _Relay:
    """The sink that a model gets: calls the caller's own in the caller's thread, and remembers what that raised.

    Pieces from another thread (the event loop, above all, which must not stand still while a sink writes) wait in a queue.
    What the sink raised is kept, so that a model can neither swallow nor rename it.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._caller = threading.get_ident()
        self.queue: SimpleQueue[Delta | None] = SimpleQueue()
        self.raised: BaseException | None = None

    def __call__(self, delta: Delta) -> None:
        if self.raised is not None:
            raise self.raised
        if threading.get_ident() == self._caller:
            self.show(delta)
        else:
            self.queue.put(delta)

    def show(self, delta: Delta) -> None:
        """Give `delta` to the caller's sink."""
        try:
            self._sink(delta)
        except BaseException as error:
            self.raised = error
            raise

    def drain(self) -> None:
        """Show what other threads left."""
        while not self.queue.empty():
            delta = self.queue.get()
            if delta is not None:
                self.show(delta)


def _wait(future: Future[Any], relay: _Relay | None) -> Any:
    if relay is None:
        return future.result()
    future.add_done_callback(lambda _: relay.queue.put(None))
    try:
        while (delta := relay.queue.get()) is not None:
            relay.show(delta)
    except BaseException:
        future.cancel()
        raise
    return future.result()


def _takes_sink(model: Model) -> bool:
    complete = model.complete
    function = getattr(complete, "__func__", complete)
    try:
        return _has_sink(function)
    except TypeError:  # a callable that cannot be remembered
        return _has_sink.__wrapped__(function)


@lru_cache(maxsize=256)
def _has_sink(function: object) -> bool:
    try:
        return "sink" in inspect.signature(cast(Callable[..., Any], function)).parameters
    except (TypeError, ValueError):
        return False


def _stuck(who: str, found: Any) -> ModelError:
    if inspect.iscoroutine(found):
        found.close()
    message = f"{who} is async and was asked without await in async code; use `await call_model_async(…)` there"
    return ModelError(ModelFault.BAD_REQUEST, message, retryable=False)


def _foreign(who: str, error: Exception) -> ModelError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f": {error}" if getattr(error, "shows_no_content", False) is True else ""
    return ModelError(ModelFault.UNAVAILABLE, f"{who} raised {type(error).__name__}{place}{said}", retryable=False)
