"""The mesh as the core wants it: `core.ports.Mesh` over one Zenoh session, and the worker's own tools served through the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestration.core.tool import Discover, Tool, ToolAnswer, ToolQuery, ToolSpec
from orchestration.core.tool_record import ToolRecords
from orchestration.mesh.call import ToolCaller
from orchestration.mesh.discovery import Discovery
from orchestration.mesh.hosting import ToolHost
from orchestration.mesh.manifest import service_chunk
from orchestration.mesh.session import Declaration, MeshSession
from orchestration.settings import Settings


class ZenohMesh:
    """Asks and discovers tools. Nothing is opened before it is used, so that a worker may fork first. Safe for threads.

    `records` are those of past calls that `serve` needs to announce idempotent tools; `session` is shared where a process
    has one already.
    """

    def __init__(self, settings: Settings, *, session: MeshSession | None = None, records: ToolRecords | None = None) -> None:
        self._settings = settings
        self._records = records
        self.session = session or MeshSession(settings)
        self._discovery = Discovery(self.session, settings)
        self._caller = ToolCaller(self.session, settings, self._serves, heard_lately=self._discovery.heard_lately)
        self._hosts: list[ToolHost] = []
        self._token: Declaration | None = None
        self._processes = f"turnmill/{service_chunk(settings.service)}/process"

    def ask(self, query: ToolQuery) -> ToolAnswer:
        """Ask one tool once; see `ToolCaller.ask` for the codes."""
        return self._caller.ask(query)

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
        """The tools of the mesh that match one of `wishes`, by prefix; known for `settings.discovery_s` seconds. With `sure`, raises
        MeshUnavailable for at most a quarter of a minute in a process that has not heard the mesh yet."""
        return self._discovery.discover(wishes, sure=sure)

    def serve(self, tools: Sequence[Tool[..., Any]], *, service: str = "") -> ToolHost:
        """Serve `tools` from this process until `close`, as `<settings.service>-worker` unless named otherwise.

        Raises:
            Misconfigured: two tools have the same prefix, or the session cannot open as configured.
        """
        host = ToolHost(self._settings, tools, self.session, self._records, service=service or f"{self._settings.service}-worker")
        host.start()
        self._hosts.append(host)
        self._discovery.forget()
        return host

    def _serves(self, prefix: str) -> bool:
        return any(host.serves(prefix) for host in self._hosts)

    def announce_process(self, process: str) -> None:
        """Hold a liveliness token in the name of this process, in place of an earlier one; it drops when the process dies."""
        held, self._token = self._token, self.session.declare_liveliness(f"{self._processes}/{process}")
        if held is not None:
            held.undeclare()

    def watch_processes(self, on_drop: Callable[[str], object]) -> None:
        """Call `on_drop` with a process's name whenever its token drops. A lost hub drops them all, so each is a suspicion only."""

        def dropped(key: str) -> None:
            on_drop(key.rpartition("/")[2])

        self.session.watch_liveliness(f"{self._processes}/*", lambda _: None, dropped)

    def close(self, drain_s: float = 0.0) -> None:
        """Finish the calls in hand for at most `drain_s` seconds, then close the session for good."""
        for host in self._hosts:
            host.close(drain_s)
        self._hosts.clear()
        self._caller.close()
        self.session.close()
