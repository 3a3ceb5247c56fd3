"""What the turn benchmark runs: agents whose model answers at once, and as many empty tasks as a turn has, to compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import redis
from celery import shared_task

from orchestration import Agent, Limits, ModelReply, RequestedCall, Usage, discover, tool


@tool("bench-own/add")
def add(a: int, b: int) -> int:
    """Add two integers, in the worker."""
    return a + b


class Instant:
    """A model without latency: one tool call, then the answer."""

    model = "instant"

    def __init__(self, tool_name: str) -> None:
        self.tool_name = tool_name

    def complete(self, messages: Sequence[dict[str, Any]], *, tools: Any = None) -> ModelReply:
        if messages[-1]["role"] == "user":
            return ModelReply("", (RequestedCall(self.tool_name, '{"a":1,"b":2}'),), usage=Usage(10, 5))
        return ModelReply("done", usage=Usage(12, 3))


remote = Agent("remote", Instant("bench-add"), tools=[discover("bench/*")], limits=Limits(max_rounds=5))
own = Agent("own", Instant("bench-own-add"), tools=[add])

_redis = redis.Redis.from_url(os.environ.get("TURNMILL_REDIS_URL", "redis://127.0.0.1:6379/0"))


@shared_task(name="bare.step", ignore_result=True)
def bare_step() -> None:
    """Nothing."""


@shared_task(name="bare.last", ignore_result=True)
def bare_last(name: str) -> None:
    """Nothing, and say so."""
    _redis.publish("bench:done", name)
