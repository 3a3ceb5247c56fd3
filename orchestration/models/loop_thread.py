"""One event loop a process, in a thread of its own, for models whose `complete` is async.

All of them share it, since clients of theirs hold connections that belong to the loop that opened them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """An event loop that starts when first needed and is closed at the process's end. A forked child gets a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._parents: list[asyncio.AbstractEventLoop] = []
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def submit(self, awaitable: Awaitable[Any]) -> Future[Any]:
        """Start `awaitable` on the loop. Cancelling the future cancels it. The caller's context variables are seen there."""
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._running())

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on the loop, which must not wait for itself."""
        return self._thread is threading.current_thread()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="turnmill-async-models", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Cancel what still runs, and close the loop."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and thread is not threading.current_thread():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=5.0)

    def _forget(self) -> None:
        # The thread did not come along, and the lock may be held by one that did not. The loop is kept, not closed: its
        # selector is the parent's.
        self._lock = threading.Lock()
        if self._loop is not None:
            self._parents.append(self._loop)
        self._loop = None
        self._thread = None


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        # Let through, it would end the loop under everybody else's calls.
        raise RuntimeError(type(error).__name__) from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


loop_thread = LoopThread()
