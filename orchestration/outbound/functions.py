"""Calling a function of the user's module, sync or async, that may raise or hang: neither must hold up a worker."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

from orchestration.outbound.told import Told

log = logging.getLogger("turnmill.outbound")

#: How long a function may take, in seconds; it counts as failed then, though it may go on.
LIMIT_S = 30.0

#: Functions that may hang at a time in this process before no further one is begun.
MAX_HANGING = 8

_hanging = threading.Semaphore(MAX_HANGING)


def call(function: Callable[[Any], object], argument: Any, *, limit_s: float = LIMIT_S, room: threading.Semaphore = _hanging) -> Told:
    """Call `function` once in a thread of its own and say what came of it. Never raises, and returns after `limit_s` at the latest.

    `room` is for those that run or hang; where it has none left, nothing is called (`busy`).
    """
    if not room.acquire(blocking=False):
        log.warning("%s was not called: too many calls of functions hang", _name(function))
        return Told("busy")
    ended = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            made = function(argument)
            if inspect.isawaitable(made):
                asyncio.run(_awaited(made))
        except BaseException as error:  # SystemExit of a user's function is no reason to stop a worker
            failure.append(error)
        finally:
            ended.set()
            room.release()

    threading.Thread(target=run, name="turnmill-function", daemon=True).start()
    if not ended.wait(limit_s):
        log.warning("%s takes longer than %.0f s; it counts as failed", _name(function), limit_s)
        return Told("timeout")
    if failure:
        log.warning("%s failed: %s", _name(function), _where(failure[0]))
        return Told(type(failure[0]).__name__)
    return Told()


async def _awaited(value: Any) -> Any:
    return await value


def _name(function: Callable[[Any], object]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _where(error: BaseException) -> str:
    """The kind of an exception and its place; its text may hold what must not be logged."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
