"""Tools while the hub or their host restarts: what was there a moment ago is not gone yet, and what is gone is said to be."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestration.core.errors import MeshUnavailable
from orchestration.core.tool import Outcome, ToolAnswer, ToolSpec, discover
from orchestration.mesh import call, discovery
from orchestration.mesh.adapter import ZenohMesh
from tests.integration.mesh_stage import Hub, Process, end_processes, host_process, query, settings_for, until

SHOP = [discover("shop/*")]


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    end_processes()


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    return tmp_path / "effects"


@pytest.fixture
def start_host(hub: Hub, effects: Path) -> Callable[[], Process]:
    return lambda: host_process(hub, "tests.integration.mesh_tools", EFFECTS=str(effects))


@pytest.fixture
def mesh(hub: Hub) -> Iterator[ZenohMesh]:
    made = ZenohMesh(settings_for(hub.endpoint))
    yield made
    made.close()


class Looking(threading.Thread):
    """Looks for the shop's tools and asks one, again and again, until it is told to stop."""

    def __init__(self, mesh: ZenohMesh) -> None:
        super().__init__(daemon=True)
        self._mesh = mesh
        self._stop_looking = threading.Event()
        self.found: list[list[ToolSpec]] = []
        self.answers: list[ToolAnswer] = []

    def run(self) -> None:
        while not self._stop_looking.wait(0.01):
            self.found.append(self._mesh.discover(SHOP))
            self.answers.append(self._mesh.ask(query("shop/ship", f"c{len(self.answers)}", order=f"o-{len(self.answers)}")))

    def completed(self) -> list[str]:
        """The orders that were shipped."""
        return [f"o-{n}" for n, answer in enumerate(list(self.answers)) if answer.outcome is Outcome.COMPLETED]

    def stop(self) -> None:
        self._stop_looking.set()
        self.join()


def test_a_restarting_hub_hides_no_tool(hub: Hub, mesh: ZenohMesh, start_host: Callable[[], Process], effects: Path) -> None:
    start_host()
    until(lambda: mesh.discover(SHOP))
    looking = Looking(mesh)
    looking.start()
    for _ in range(4):
        hub.kill()
        until(lambda: not mesh.session.connected)
        hub.start()
        shipped = len(looking.completed())
        until(lambda shipped=shipped: len(looking.completed()) > shipped)
    looking.stop()
    assert all(len(found) == 2 for found in looking.found)
    # it was away, or it went while a call was under way
    assert all(answer.outcome in (Outcome.COMPLETED, Outcome.UNKNOWN, Outcome.NOT_RUN) for answer in looking.answers)
    assert {answer.code for answer in looking.answers if answer.outcome is Outcome.NOT_RUN} <= {"mesh_unavailable"}
    shipped_by_host = effects.read_text().split()
    assert len(set(shipped_by_host)) == len(shipped_by_host)
    assert set(looking.completed()) <= set(shipped_by_host)


@pytest.mark.parametrize("away", ["killed", "stopped"])
def test_who_never_heard_the_mesh_says_so(hub: Hub, start_host: Callable[[], Process], monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    monkeypatch.setattr(discovery, "DOUBT_S", 600.0)
    start_host()
    hub.kill() if away == "killed" else hub.pause()
    mesh = ZenohMesh(settings_for(hub.endpoint, discovery_s=3600))
    for _ in range(2):
        with pytest.raises(MeshUnavailable):
            mesh.discover(SHOP, sure=True)
    assert mesh.discover(SHOP) == []
    hub.start() if away == "killed" else hub.resume()

    def found() -> list[str]:
        with contextlib.suppress(MeshUnavailable):
            return [spec.prefix for spec in mesh.discover(SHOP, sure=True)]
        return []

    assert until(found) == ["shop/ship", "shop/slow"]
    mesh.close()


def test_where_there_is_no_hub_nobody_is_kept_waiting_for_ever(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DOUBT_S", 0.1)
    hub.kill()
    mesh = ZenohMesh(settings_for(hub.endpoint))

    def answered() -> bool:
        with contextlib.suppress(MeshUnavailable):
            return mesh.discover(SHOP, sure=True) == []
        return False

    until(answered)
    mesh.close()


def test_one_service_that_hangs_keeps_nobody_waiting(hub: Hub, start_host: Callable[[], Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DOUBT_S", 600.0)
    start_host()
    with_hung = ZenohMesh(settings_for(hub.endpoint))
    held: list[object] = []
    with_hung.session.declare(lambda session: session.declare_queryable(".istos/capabilities/hung", held.append))
    with_hung.session.opened(30)
    mesh = ZenohMesh(settings_for(hub.endpoint))

    def found() -> int:
        with contextlib.suppress(MeshUnavailable):
            return len(mesh.discover(SHOP, sure=True))
        return 0

    assert until(found) == 2
    held.clear()
    mesh.close()
    with_hung.close()


def test_a_replica_that_hangs_hides_no_tool(hub: Hub, start_host: Callable[[], Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DOUBT_S", 600.0)
    hosts = [start_host(), start_host()]
    for host in hosts:  # whichever the hub would have asked
        host.signal(signal.SIGSTOP)
        mesh = ZenohMesh(settings_for(hub.endpoint, discovery_s=3600))

        def found(mesh: ZenohMesh = mesh) -> int:
            with contextlib.suppress(MeshUnavailable):
                return len(mesh.discover(SHOP, sure=True))
            return 0

        assert until(found) == 2
        mesh.close()
        host.signal(signal.SIGCONT)


def test_a_call_waits_for_its_restarting_host(
    mesh: ZenohMesh, start_host: Callable[[], Process], effects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "COMES_BACK_S", 60.0)
    host = start_host()
    until(lambda: mesh.discover(SHOP))
    host.kill()
    asked: list[ToolAnswer] = []
    asking = threading.Thread(target=lambda: asked.append(mesh.ask(query("shop/slow", "c1", order="o-1", hold="nothing"))))
    asking.start()
    start_host()
    asking.join()
    assert [answer.outcome for answer in asked] == [Outcome.COMPLETED]
    assert effects.read_text().split() == ["o-1"]


def test_a_tool_that_is_gone_reads_so_and_is_forgotten(
    mesh: ZenohMesh, start_host: Callable[[], Process], effects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start_host()
    until(lambda: mesh.discover(SHOP))
    assert host.stop() == 0
    assert len(mesh.discover(SHOP)) == 2  # a rolling deploy looks like that
    answer = mesh.ask(query("shop/ship", "c1", order="o-1"))
    assert (answer.outcome, answer.code) == (Outcome.NOT_RUN, "not_found")
    monkeypatch.setattr(discovery, "KEEP_S", 0.1)
    until(lambda: not mesh.discover(SHOP))
    assert not effects.exists()


def test_a_stopping_replica_leaves_no_call_in_doubt(hub: Hub, mesh: ZenohMesh, start_host: Callable[[], Process], effects: Path) -> None:
    host = start_host()
    until(lambda: mesh.discover(SHOP))
    looking = [Looking(mesh) for _ in range(4)]
    for one in looking:
        one.start()
    for _ in range(6):
        replacement = start_host()
        shipped = len(effects.read_text().split())
        until(lambda shipped=shipped: len(effects.read_text().split()) > shipped + 100)
        assert host.stop() == 0
        host = replacement
    for one in looking:
        one.stop()
    answers = [answer for one in looking for answer in one.answers]
    assert {answer.code for answer in answers if answer.outcome is not Outcome.COMPLETED} <= {"rate_limit_exceeded"}
    assert len(effects.read_text().split()) == sum(answer.outcome is Outcome.COMPLETED for answer in answers)
