"""Serves the tools of some modules until it is told to stop, then finishes the calls in hand."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.tool import Tool
from orchestration.mesh.hosting.host import ToolHost, distinct
from orchestration.mesh.session import MeshSession
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.state.tool_records import RedisToolRecords
from workers.stopping import StopSignal

log = logging.getLogger(__name__)


def load_tools(modules: Sequence[str]) -> tuple[Tool[..., Any], ...]:
    """The module-level `Tool` objects of the dotted `modules`, by prefix. The current directory is looked in first.

    Raises:
        Misconfigured: a module cannot be imported, there is no tool in them, or two have the same prefix (names both).
    """
    here = os.getcwd()  # noqa: PTH109 - an entry of sys.path is text
    if here not in sys.path:
        sys.path.insert(0, here)
    tools: list[Tool[..., Any]] = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Misconfigured:
            raise
        except Exception as error:
            raise Misconfigured(f"the tools' module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
        tools.extend(value for value in vars(module).values() if isinstance(value, Tool))
    if not tools:
        raise Misconfigured(f"there is no @tool function in {', '.join(modules) or 'no module'}")
    return distinct(tools)


def serve(modules: Sequence[str], settings: Settings) -> None:
    """Serve the tools of `modules` as `<settings.service>-tools` until SIGTERM or SIGINT.

    Then no call is taken any more, and those in hand have `settings.drain_s` seconds. With an empty `TURNMILL_REDIS_URL`
    no calls are recorded, and no tool is announced as idempotent.

    Raises:
        Misconfigured: nothing to serve, or not under these settings.
    """
    tools = load_tools(modules)
    stop = StopSignal()
    store = Store(settings) if settings.redis_url else None
    records = RedisToolRecords(store) if store is not None else None
    if records is None:
        log.warning("TURNMILL_REDIS_URL is empty: calls are not recorded, so a repeated query may act twice")
    session = MeshSession(settings)
    host = ToolHost(settings, tools, session, records)
    host.start()
    print(f"serving {len(tools)} {'tool' if len(tools) == 1 else 'tools'} as {host.service}", flush=True)
    try:
        stop.wait()
    finally:
        if not host.close(settings.drain_s):
            log.warning("%s stops with calls in hand; their outcome is unknown", host.service)
        if records is not None:
            records.close()
        session.close()
        if store is not None:
            store.close()
