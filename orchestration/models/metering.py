"""Counts the model calls that are made in passing, by a compactor above all: their tokens are part of what a turn costs.

A turn's own call needs none of this; its step has the reply in hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from orchestration.core.model import ModelReply

_meter: ContextVar[list[ModelReply] | None] = ContextVar("turnmill_meter", default=None)


@contextmanager
def metered() -> Iterator[list[ModelReply]]:
    """Within it, in this thread and in what it starts for async code, each reply of a model is put into the list that it gives."""
    replies: list[ModelReply] = []
    before = _meter.set(replies)
    try:
        yield replies
    finally:
        _meter.reset(before)


def noted(reply: ModelReply) -> ModelReply:
    """`reply`, put into the list of whoever counts; once, however many wrappers hand it on."""
    replies = _meter.get()
    if replies is not None and not any(one is reply for one in replies):
        replies.append(reply)
    return reply
