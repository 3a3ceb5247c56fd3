"""`turnmill dev`: the lines of the Procfile as processes of this machine, in one terminal, reloaded when the user's code changes.

It fills in what development needs and no setting names: a Redis server, free ports, a hub of the mesh. Deployments do without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from orchestration.core.errors import Misconfigured
from orchestration.settings import load_settings
from orchestration.testing import tether
from orchestration.testing.parts import answers_http
from orchestration.testing.servers import free_port, redis_server

#: Processes that import the user's modules, so that a change of these concerns them.
RELOADED = ("tools", "worker", "control", "gateway")

#: Seconds that a process gets for its running steps when it is reloaded or stopped.
GRACE_S = 8.0

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta")

_LINE = re.compile(r"([A-Za-z0-9_-]+):\s*(.+)")


def run(procfile: Path, *, model_server: str = "") -> int:
    """Run the processes of `procfile` until SIGINT, SIGTERM or the end of one that is not reloaded; returns the exit status.

    Args:
        model_server: a module started as `python -m MODULE --port N` for the agents' model, unless `OPENAI_BASE_URL` is set.

    Raises:
        Misconfigured: the Procfile, a setting or a module of the user's is missing or wrong; nothing was started.
    """
    commands = read_procfile(procfile)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with contextlib.ExitStack() as stack:
        if os.environ.get("TURNMILL_REDIS_URL"):
            stack.enter_context(redis_server())
            redis_url = os.environ["TURNMILL_REDIS_URL"]
        else:
            redis_url = stack.enter_context(redis_server()).url
        env = environment(redis_url)
        if model_server and not os.environ.get("OPENAI_BASE_URL"):
            port = free_port()
            commands = {"model": f'"{sys.executable}" -m {model_server} --port {port}', **commands}
            env |= {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "development")}
        return _Terminal(commands, env, watched_directories(env), console).run()


def read_procfile(path: Path) -> dict[str, str]:
    """The commands of a Procfile by name. Raises Misconfigured when there is none, or a line of it is no `name: command`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Misconfigured(f"{path}: {error.strerror}; name the file of processes with --procfile") from None
    commands: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] in commands:
            raise Misconfigured(f"{path}, line {number}: expected 'name: command' with a name of its own")
        commands[match[1]] = match[2]
    if not commands:
        raise Misconfigured(f"{path}: no processes in it")
    return commands


def environment(redis_url: str) -> dict[str, str]:
    """The environment of the processes: this one's, and what it leaves open. Raises Misconfigured for a wrong setting."""
    given = {name: value for name, value in os.environ.items() if value or not name.startswith("TURNMILL_")}
    env = {
        "TURNMILL_AGENTS": "examples.shop.agents",
        "TURNMILL_TOOLS": "examples.shop.tools",
        "TURNMILL_MESH_CONNECT": f"tcp/127.0.0.1:{_port_near(7447)}",
        "TURNMILL_MESH_SECRET": secrets.token_urlsafe(32),
        "PORT": str(_port_near(8000)),
        "FLOWER_PORT": str(_port_near(5555)),
        "SHOP_SECRET": "whsec_" + secrets.token_hex(16),
        **given,
        "TURNMILL_REDIS_URL": redis_url,
        "PYTHONUNBUFFERED": "1",
        "PATH": str(Path(sys.executable).parent) + os.pathsep + given.get("PATH", os.defpath),
    }
    env.setdefault("TURNMILL_PUBLIC_URL", f"http://127.0.0.1:{env['PORT']}")
    load_settings()
    return env


def watched_directories(env: Mapping[str, str]) -> list[Path]:
    """Where the user's modules are. Raises Misconfigured for a module that is not there."""
    found: set[Path] = set()
    for name in [env["TURNMILL_AGENTS"], *env["TURNMILL_TOOLS"].split()]:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            raise Misconfigured(f"there is no module {name!r} here; TURNMILL_AGENTS and TURNMILL_TOOLS name the modules to run")
        found.add(Path(spec.origin).parent)
    return sorted(found)


class _Terminal:
    """The running processes and their one output."""

    def __init__(self, commands: Mapping[str, str], env: Mapping[str, str], watched: list[Path], console: Console) -> None:
        self._commands = dict(commands)
        self._env = dict(env)
        self._watched = watched
        self._console = console
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        # a SimpleQueue, since a signal handler puts into it too
        self._happened: queue.SimpleQueue[tuple[str, subprocess.Popen[bytes] | None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._width = max(len(name) for name in self._commands)

    def run(self) -> int:
        """Start, watch and at the end stop the processes; returns the exit status."""
        with self._signals():
            for name in self._commands:
                self._start(name)
            for duty in (self._watch_files, self._announce):
                threading.Thread(target=duty, daemon=True).start()
            try:
                return self._follow()
            finally:
                self._stopping.set()
                self._stop(list(self._children))

    def _follow(self) -> int:
        while True:
            what, child = self._happened.get()
            if what == "stop":
                self._say("turnmill", "stopping")
                return 0
            if what == "changed":
                names = [name for name in self._commands if name in RELOADED]
                self._say("turnmill", f"changed: starting {', '.join(names)} again")
                self._stop(names)
                for name in names:
                    self._start(name)
            elif child is not None and self._children.get(what) is child:  # ended by itself, not by a reload
                status = child.wait()
                if what not in RELOADED:
                    self._say("turnmill", f"{what} ended with status {status}; stopping")
                    return status or 1
                self._say("turnmill", f"{what} ended with status {status}; it starts again when a file changes")

    def _start(self, name: str) -> None:
        child = tether.spawn(["/bin/sh", "-c", self._commands[name]], env=self._env, cwd=Path.cwd(), output=subprocess.PIPE)
        self._children[name] = child
        threading.Thread(target=self._pump, args=(name, child), daemon=True).start()

    def _stop(self, names: list[str]) -> None:
        children = [self._children.pop(name) for name in names if name in self._children]
        for child in children:
            if child.poll() is None:
                tether.signal_group(child, signal.SIGTERM)  # all at once, so that they drain side by side
        for child in children:
            tether.end(child, grace_s=GRACE_S, asked=True)

    def _pump(self, name: str, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                self._say(name, line.decode(errors="replace").rstrip())
        self._happened.put((name, child))

    def _say(self, name: str, line: str) -> None:
        names = list(self._commands)
        colour = COLOURS[names.index(name) % len(COLOURS)] if name in names else "bold"
        self._console.print(Text(f"{name:>{self._width}} | ", style=colour) + Text(line))

    def _announce(self) -> None:
        url = f"http://127.0.0.1:{self._env['PORT']}"
        while not answers_http(f"{url}/healthz"):
            if self._stopping.wait(0.2):
                return
        self._say("turnmill", f"gateway  {url}   (its routes: {url}/openapi.json)")
        if "flower" in self._commands:
            self._say("turnmill", f"Flower   http://127.0.0.1:{self._env['FLOWER_PORT']}")
        self._say("turnmill", f"mesh     {self._env['TURNMILL_MESH_CONNECT']}")
        if not os.environ.get("TURNMILL_REDIS_URL"):
            self._say("turnmill", f"Redis    {self._env['TURNMILL_REDIS_URL']}   (ours; what is in it goes with it at the end)")
        self._say("turnmill", f"agents   {self._env['TURNMILL_AGENTS']}, reloaded on change. Ctrl-C ends everything.")

    def _watch_files(self) -> None:
        try:
            import watchfiles
        except ImportError:
            self._say("turnmill", "watchfiles is not installed (pip install 'turnmill[testing]'): changes are not noticed")
            return
        for _ in watchfiles.watch(*self._watched, watch_filter=watchfiles.PythonFilter(), stop_event=self._stopping, raise_interrupt=False):
            self._happened.put(("changed", None))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(_number: int, _frame: object) -> None:
            if self._stopping.is_set():  # asked twice: no more patience
                for child in self._children.values():
                    tether.signal_group(child, signal.SIGKILL)
            self._happened.put(("stop", None))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _port_near(wanted: int) -> int:
    """`wanted` when nothing listens there, else any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
    return wanted
