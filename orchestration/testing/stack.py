"""A whole deployment of real processes on one machine, each started by its documented command, on free ports, gone with this process.

For tests, the demo and benchmarks. What the processes do is not known here; single processes are handled through `Part`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestration.testing import tether
from orchestration.testing.parts import Part, answers_http, answers_tcp
from orchestration.testing.servers import RedisServer, free_port, redis_server

#: The processes of a deployment, in the order in which they start. `beat` and `flower` only when asked for.
USUAL = ("mesh", "tools", "worker", "control", "gateway")


class Stack:
    """Redis, mesh hub, tool host, workers and gateway as real processes; a context manager that ends them all.

    Args:
        agents: dotted path of the agents' module.
        tools: modules that the tool host serves; none, and it is not started.
        processes: which of `mesh, tools, worker, control, gateway, beat, flower` are started by `start()`.
        redis: a server to use, which is then not stopped here; None takes what `redis_server()` would.
        env: more environment for every process; wins over what is set here.
        threads: pool threads of a worker.
        cwd: where the processes run; their modules are imported from there.
    """

    def __init__(
        self,
        agents: str = "",
        tools: Sequence[str] = (),
        *,
        processes: Sequence[str] = USUAL,
        redis: RedisServer | None = None,
        env: Mapping[str, str] | None = None,
        threads: int = 16,
        cwd: Path | None = None,
    ) -> None:
        self.tools = tuple(tools)
        self.threads = threads
        self.directory = tether.temporary_directory("turnmill-stack-")
        self._processes = tuple(processes)
        self._cwd = cwd or Path.cwd()
        self._parts: dict[str, Part] = {}
        self._own_redis = redis_server() if redis is None else None
        self.redis = redis if redis is not None else self._own_redis.__enter__()  # type: ignore[union-attr]
        self._ports = {name: free_port() for name in ("mesh", "gateway", "flower")}
        self.env = self._environment(agents, env or {})

    @property
    def url(self) -> str:
        """The gateway's address, without a slash at its end."""
        return f"http://127.0.0.1:{self._ports['gateway']}"

    @property
    def flower_url(self) -> str:
        """Flower's address, once `flower` was started."""
        return f"http://127.0.0.1:{self._ports['flower']}"

    @property
    def mesh_endpoint(self) -> str:
        """The Zenoh endpoint of the hub, for peers of a test."""
        return f"tcp/127.0.0.1:{self._ports['mesh']}"

    def start(self) -> Stack:
        """Start the processes and wait until each is ready.

        Raises:
            NotReady: one ended or took too long; everything is stopped, the message has the end of its log.
        """
        try:
            if "mesh" in self._processes:  # the others connect to it
                self.start_process("mesh")
            names = [name for name in self._processes if name != "mesh" and (name != "tools" or self.tools)]
            for part in [self._add(name).start() for name in names]:
                part.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def start_process(self, name: str) -> Part:
        """Start one more process of a deployment by its name, and wait until it is ready."""
        return (self._parts.get(name) or self._add(name)).start().wait_ready()

    def add_replica(self, name: str) -> Part:
        """Start another process like `name` (`worker`, `control`, `tools` or `gateway`); the new one is called `name-2`, `name-3`, …

        A second gateway's address is the `TURNMILL_PUBLIC_URL` of its `env`.
        """
        number = 2
        while f"{name}-{number}" in self._parts:
            number += 1
        return self._add(name, number).start().wait_ready()

    def remove(self, name: str) -> None:
        """Stop a process in an orderly way and forget it."""
        self._parts.pop(name).stop()

    def add(self, name: str, command: Sequence[str], *, ready: Callable[[str], bool] | None = None) -> Part:
        """Start a process that is no part of Turnmill (a model server, a peer on the mesh), and wait until it is ready.

        Args:
            ready: answers whether it is ready, given what it has logged.
        """
        return self._part(name, command, ready, {}).start().wait_ready()

    def run(self, *command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command of a user's in the environment of the processes, and wait for its end; output is captured."""
        return subprocess.run(
            self._found(command), env=self.env, cwd=self._cwd, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def names(self) -> list[str]:
        """The names of the processes."""
        return list(self._parts)

    def logs(self) -> str:
        """The ends of all logs, for the report of a failure."""
        return "\n".join(part.tail() for part in self._parts.values())

    def close(self) -> None:
        """End everything that was started. A second call does nothing."""
        parts, self._parts = list(self._parts.values()), {}
        for part in reversed(parts):
            part.terminate()  # all at once, so that they drain side by side
        for part in reversed(parts):
            part.stop(grace_s=tether.GRACE_S)
        if self._own_redis is not None:
            self._own_redis.__exit__(None, None, None)
            self._own_redis = None
        tether.remove_directory(self.directory)

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _environment(self, agents: str, more: Mapping[str, str]) -> dict[str, str]:
        # Settings of the surrounding shell would make a deployment that nobody described; what is wanted comes in `more`.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNMILL_")}
        programs = str(Path(sys.executable).parent)
        return {
            **inherited,
            "PATH": programs + os.pathsep + inherited.get("PATH", os.defpath),
            "PYTHONUNBUFFERED": "1",
            "TURNMILL_REDIS_URL": self.redis.url,
            "TURNMILL_AGENTS": agents,
            "TURNMILL_MESH_CONNECT": self.mesh_endpoint,
            "TURNMILL_MESH_SECRET": secrets.token_urlsafe(32),
            "TURNMILL_PUBLIC_URL": self.url,
            **more,
        }

    def _add(self, name: str, number: int = 1) -> Part:
        command, ready, env = self._described(name, number)
        return self._part(name if number == 1 else f"{name}-{number}", command, ready, env)

    def _described(self, name: str, number: int) -> tuple[list[str], Callable[[str], bool], dict[str, str]]:
        """The documented command of a process, when it is ready, and what its environment has besides the others'."""
        worker = ["celery", "-A", "workers", "worker", "-P", "threads", "--loglevel", "INFO", "-n", f"{name}-{number}@%h"]
        match name:
            case "mesh":
                port = self._ports["mesh"]
                env = {"TURNMILL_MESH_LISTEN": self.mesh_endpoint, "TURNMILL_MESH_CONNECT": ""}
                return ["turnmill", "mesh"], lambda _log: answers_tcp(port), env
            case "tools":
                return ["turnmill", "tools", *self.tools], _logged(r"^serving \d+ tool"), {}
            case "worker":
                return [*worker, "-Q", "plan,tools", "-c", str(self.threads)], _logged(r" ready\.$"), {}
            case "control":
                return [*worker, "-Q", "control", "-c", "8"], _logged(r" ready\.$"), {}
            case "gateway":
                port = self._ports["gateway"] if number == 1 else free_port()
                url = f"http://127.0.0.1:{port}"
                command = ["uvicorn", "gateway.app:app", "--host", "127.0.0.1", "--port", str(port)]
                return command, lambda _log: answers_http(f"{url}/healthz"), {"TURNMILL_PUBLIC_URL": url}
            case "beat":
                return (
                    ["celery", "-A", "workers", "beat", "--schedule", str(self.directory / "beat")],
                    _logged(r"^celery beat .* is starting\."),
                    {},
                )
            case "flower":
                port = self._ports["flower"]
                command = ["celery", "-A", "workers", "flower", "--address=127.0.0.1", f"--port={port}"]
                return command, lambda _log: answers_http(f"{self.flower_url}/healthcheck"), {}
        raise ValueError(f"{name!r} is no process of a deployment; known are {', '.join((*USUAL, 'beat', 'flower'))}")

    def _part(self, name: str, command: Sequence[str], ready: Callable[[str], bool] | None, env: Mapping[str, str]) -> Part:
        if name in self._parts:
            raise ValueError(f"there is a process {name!r} already")
        log = self.directory / f"{name}.log"
        part = Part(name, self._found(command), env={**self.env, **env}, cwd=self._cwd, log=log, ready=ready)
        self._parts[name] = part
        return part

    def _found(self, command: Sequence[str]) -> list[str]:
        program = shutil.which(command[0], path=self.env["PATH"])
        if program is None:
            raise FileNotFoundError(f"{command[0]} is not installed in this environment; `make install` does it")
        return [program, *command[1:]]


def _logged(pattern: str) -> Callable[[str], bool]:
    return lambda log: re.search(pattern, log, re.MULTILINE) is not None
