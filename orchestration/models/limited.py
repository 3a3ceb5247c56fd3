"""A model with limits that hold across all workers: calls at once, calls and tokens in a minute.

Where there is no room the step is told when to come back, as a due time; nothing waits here for longer than a blink. Outside of a
step (in a script, in a test of the model alone) nobody counts, and the model is just asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from orchestration.core.errors import Misconfigured, ModelBusy
from orchestration.core.model import Message, Model, ModelFault, ModelReply, Sink, ToolDefinition
from orchestration.core.model_limits import ModelLimits, Places
from orchestration.models.calling import call_model, name_of

#: Waits up to this many seconds are slept through in place; a longer one is a due time.
BLINK_S = 0.2

#: Characters of a request that count as one token before its provider has counted.
CHARS_PER_TOKEN = 4

_places: ContextVar[Places | None] = ContextVar("turnmill_places", default=None)


@contextmanager
def counted(places: Places) -> Iterator[None]:
    """Within it, limited models that this thread asks take their places from `places`."""
    before = _places.set(places)
    try:
        yield
    finally:
        _places.reset(before)


class Limited:
    """Asks `model` only when its limits leave room. Thread-safe.

    Args:
        model: any model, sync or async, or a `Failover` of several.
        concurrency: calls under way at once, in all workers together.
        requests_per_minute: calls begun within any 60 s.
        tokens_per_minute: tokens used within about 60 s.
        name: under which it is counted; by default the model's own. Models with one name share the limits.

    Raises:
        Misconfigured: something that is no model, or limits that cannot be any.
    """

    def __init__(
        self,
        model: Model,
        *,
        concurrency: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        name: str = "",
    ) -> None:
        if not callable(getattr(model, "complete", None)):
            raise Misconfigured(f"Limited: {type(model).__name__} has no complete(messages, *, tools=None)")
        self.inner = model
        self.model = str(getattr(model, "model", type(model).__name__))
        self.limits = ModelLimits(name or self.model, concurrency, requests_per_minute, tokens_per_minute)

    @property
    def models(self) -> Sequence[Any]:
        """The models of a `Failover` inside; none otherwise."""
        return tuple(getattr(self.inner, "models", ()))

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
    ) -> ModelReply:
        """Ask the model, if there is room.

        Raises:
            ModelBusy: there is none now; `retry_after_s` says when to come back. The model was not asked.
            ModelError: as the model raises it.
        """
        places = _places.get()
        if places is None:
            return call_model(self.inner, messages, tools=tools, sink=sink)
        estimate = _estimate(messages, tools) if self.limits.tokens_per_minute else 0
        taken = places.take(self.limits, estimate)
        if 0 < taken.wait_s <= BLINK_S:
            time.sleep(taken.wait_s)
            taken = places.take(self.limits, estimate)
        if taken.wait_s > 0:
            message = f"{name_of(self)} is as busy as its limits allow; it was not asked"
            raise ModelBusy(ModelFault.RATE_LIMITED, message, retryable=True, retry_after_s=taken.wait_s)
        used = estimate
        try:
            reply = call_model(self.inner, messages, tools=tools, sink=sink)
            used = reply.usage.input_tokens + reply.usage.output_tokens or estimate
            return reply
        finally:
            places.give_back(self.limits, estimate, used)

    def __repr__(self) -> str:
        return f"Limited({self.inner!r}, {self.limits!r})"


def _estimate(messages: Sequence[Message], tools: Sequence[ToolDefinition] | None) -> int:
    return (sum(len(str(message)) for message in messages) + len(str(tools or ""))) // CHARS_PER_TOKEN + 1
