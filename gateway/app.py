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
from starlette.types import Receive, Scope, Send

from gateway import agents, approvals, channels, conversations, health, links, metrics, openai, problems, tickets, turns
from gateway.auth import Door
from gateway.bodies import Bodies
from gateway.console import page as console
from gateway.cross_origin import cross_origin
from gateway.envelope import Envelope
from gateway.loopback import served_hosts
from gateway.metrics import Meters
from gateway.parts import Pace, Parts
from gateway.proxies import Proxies
from gateway.rates import Brake
from gateway.server import raise_file_limit, tune_server
from gateway.startup import ClearStart, keep_queries_out_of_logs, refuse_to_start
from gateway.webhooks import routes as webhooks
from orchestration.core.errors import Misconfigured, StoreUnavailable
from orchestration.settings import Settings, load_settings
from orchestration.state.checks import check_store
from orchestration.state.frame_hub import FrameHub
from orchestration.state.rates import Rates
from orchestration.wiring import Ports, open_ports

log = logging.getLogger(__name__)


class Gateway(FastAPI):
    """The app; its server is set up as it starts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            raise_file_limit()
            tune_server(send, sys.argv, os.environ)
        await super().__call__(scope, receive, send)


def create_app(settings: Settings, *, ports: Callable[[Settings], Ports] = open_ports, pace: Pace | None = None) -> FastAPI:
    """The gateway over `settings`.

    Args:
        ports: opens what the routes work with when the server starts; tests give their own.
        pace: times of streams.

    Raises:
        Misconfigured: a setting is wrong; or, when the server starts, the agents' module or a webhook is, Redis would throw turns away,
            or strangers would be served without keys.
    """
    proxies = Proxies(settings)
    meters = Meters()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        keep_queries_out_of_logs()
        opened = await run_in_threadpool(ports, settings)
        served_on = served_hosts(sys.argv, os.environ)
        door = await run_in_threadpool(lambda: Door(settings, opened.store, served_on=served_on))
        await run_in_threadpool(_check, opened)
        hooks = webhooks.open_hooks(opened.project.webhooks, os.environ)
        hub = FrameHub(settings.redis_url)
        brake = Brake(Rates(opened.store, per_s=settings.rate_per_s, burst=settings.rate_burst))
        app.state.parts = Parts(opened, hub, door, brake, hooks, proxies, meters, pace or Pace())
        meters.watch("turnmill_gateway_watchers", "open watches of frames", lambda: hub.watching)
        meters.watch("turnmill_gateway_conversations_watched", "conversations that somebody watches", lambda: hub.channels)
        await hub.start()
        try:
            with _stopping_at_signals(hub.stop):
                yield
        finally:
            await hub.close()
            await run_in_threadpool(_close, opened)

    app = Gateway(
        title="Turnmill",
        version="1",
        summary="AI-agent turns as durable work",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=problems.DOCUMENTED,
        lifespan=lifespan,
    )
    for routes in (turns, conversations, approvals, links, agents, channels, tickets, openai, webhooks, health, metrics, console):
        app.include_router(routes.router)
    problems.install(app)
    # The last one added is the outermost.
    app.add_middleware(Bodies, max_bytes=settings.max_body_bytes)
    cross_origin(app, settings.cors_origins)
    app.add_middleware(Envelope, meters=meters, secure=proxies.secure)
    app.add_middleware(ClearStart)
    return app


def _check(ports: Ports) -> None:
    try:
        check_store(ports.store)
    except StoreUnavailable as error:
        log.warning("%s; it is looked at when somebody asks whether this gateway is ready", error)


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
        try:
            app = create_app(load_settings())
        except Misconfigured as error:
            # Whoever asks for this name is a server that starts, and its operator reads one line better than a traceback.
            refuse_to_start(error)
        globals()["app"] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
