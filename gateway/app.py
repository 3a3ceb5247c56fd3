"""The gateway's ASGI app: `uvicorn gateway.app:app`. Puts the routes, the rules around them and the process's parts together.

Settings are read when `app` is first asked for, and nothing is connected before the server starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from gateway import agents, approvals, conversations, health, problems, turns
from gateway.auth import Door, served_hosts
from gateway.bodies import Bodies
from gateway.envelope import Envelope
from gateway.parts import Pace, Parts
from gateway.webhooks import routes as webhooks
from orchestration.settings import Settings, load_settings
from orchestration.state.frame_hub import FrameHub
from orchestration.wiring import Ports, open_ports

log = logging.getLogger(__name__)


def create_app(settings: Settings, *, ports: Callable[[Settings], Ports] = open_ports, pace: Pace | None = None) -> FastAPI:
    """The gateway over `settings`.

    Args:
        ports: opens what the routes work with when the server starts; tests give their own.
        pace: times of streams.

    Raises, when the server starts:
        Misconfigured: a setting, the agents' module or a webhook is wrong, or it would serve strangers without keys.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        opened = await run_in_threadpool(ports, settings)
        served_on = served_hosts(sys.argv, os.environ)
        door = await run_in_threadpool(lambda: Door(settings, opened.store, served_on=served_on))
        hooks = webhooks.open_hooks(opened.project.webhooks, os.environ)
        hub = FrameHub(settings.redis_url)
        app.state.parts = Parts(opened, hub, door, hooks, pace or Pace())
        await hub.start()
        try:
            with _stopping_at_signals(hub.stop):
                yield
        finally:
            await hub.close()
            await run_in_threadpool(_close, opened)

    app = FastAPI(
        title="Turnmill",
        version="1",
        summary="AI-agent turns as durable work",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=problems.DOCUMENTED,
        lifespan=lifespan,
    )
    for routes in (turns, conversations, approvals, agents, webhooks, health):
        app.include_router(routes.router)
    problems.install(app)
    app.add_middleware(Bodies, max_bytes=settings.max_body_bytes)
    app.add_middleware(Envelope)
    return app


@contextmanager
def _stopping_at_signals(stop: Callable[[], None]) -> Iterator[None]:
    """End the streams as soon as the server is told to stop: it waits for open answers, and a stream would keep it waiting for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def heard(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)
        passed_on = before[signal.Signals(number)]
        if callable(passed_on):
            passed_on(number, frame)

    # Only where the server has a handler of its own to pass the signal on to; otherwise the signal's usual effect must stay.
    ours = [number for number, handler in before.items() if callable(handler)]
    for number in ours:
        signal.signal(number, heard)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is heard:
                signal.signal(number, before[number])


def _close(ports: Ports) -> None:
    for part in (ports.mesh, ports.queue, ports.store):
        close = getattr(part, "close", None)
        if close is not None:
            try:
                close()
            except Exception as error:
                log.warning("closing: %s", type(error).__name__)


def __getattr__(name: str) -> Any:
    if name == "app":
        app = create_app(load_settings())
        globals()["app"] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
