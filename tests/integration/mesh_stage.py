"""What the mesh's tests stand on: a hub and tool hosts as real processes, an Istos node in a thread, and settings that connect to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from istos import Istos
from istos.communication.config import IstosZenohConfig

from orchestration.core.tool import ToolQuery
from orchestration.settings import Settings
from orchestration.testing.servers import free_port

T = TypeVar("T")

SECRET = "a secret of the mesh's tests, 32 bytes and more"

REPOSITORY = Path(__file__).parent.parent.parent


def until(what: Callable[[], T], *, seconds: float = 30.0) -> T:
    """The first true value of `what`, asked again and again; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, "what the test waits for did not come"
        time.sleep(0.02)


def settings_for(endpoint: str, **more: Any) -> Settings:
    """Settings of a process that connects to `endpoint`; nothing of the environment."""
    return Settings(**{"mesh_connect": (endpoint,), "redis_url": "", "mesh_secret": "", "discovery_s": 0.05, **more})


def query(prefix: str, call_id: str, /, **arguments: Any) -> ToolQuery:
    """A query as a step would ask it, with the arguments in the payload."""
    return ToolQuery(prefix, arguments, call_id, tenant="acme", sub="alice", payload=True)


class Process:
    """A child process whose first line of output says that it is ready."""

    def __init__(self, code: str, **env: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        )
        _processes.append(self)
        assert self._child.stdout is not None
        self.first_line = self._child.stdout.readline().strip()
        assert self.first_line, "the process ended before it was ready"

    def kill(self) -> None:
        """kill -9."""
        self._child.kill()
        self._reap()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._child.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._child.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        code = self._child.wait(60)
        if self in _processes:
            _processes.remove(self)
        assert self._child.stdout is not None
        self._child.stdout.close()
        return code


#: Those that have not ended.
_processes: list[Process] = []


def end_processes() -> None:
    """Kill what a test left running, as a failed one does."""
    for process in list(_processes):
        process.kill()


class Hub:
    """A hub that can be killed and started again on the same port."""

    def __init__(self) -> None:
        self.endpoint = f"tcp/127.0.0.1:{free_port()}"
        self._process: Process | None = None
        self.start()

    def start(self) -> None:
        self._process = Process(
            "from orchestration.settings import load_settings; from workers.mesh_hub import run_hub; run_hub(load_settings())",
            TURNMILL_MESH_LISTEN=self.endpoint,
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)


def host_process(hub: Hub, module: str, **env: str) -> Process:
    """A tool host in a process of its own, as `turnmill tools` runs it."""
    code = (
        f"from orchestration.settings import load_settings; from workers.tool_host.main import serve;serve([{module!r}], load_settings())"
    )
    return Process(code, **{"TURNMILL_MESH_CONNECT": hub.endpoint, "TURNMILL_REDIS_URL": "", **env})


@contextlib.contextmanager
def istos_node(
    endpoint: str, name: str, declare: Callable[[Istos], None] = lambda app: None, **options: Any
) -> Iterator[Callable[..., Any]]:
    """An Istos node that connects to `endpoint`; yields a function that runs a coroutine made from the node, in the node's loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="istos", daemon=True)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of unencrypted loopback
        config = IstosZenohConfig(connect_endpoints=[endpoint], multicast_scouting=False)
        app = Istos(config=config, service_name=name, configure_logging=False, enable_metrics=False, **options)
        declare(app)
        serving = app.serving()
        asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(30)

    def run(make: Callable[[Istos], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(app), loop).result(60)

    try:
        yield run
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(30)
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def _cancel_others() -> None:
    """A handler that hangs would be left to the garbage collector."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
