"""Tools while the hub or their host restarts: what was there a moment ago is not gone yet, and what is gone is said to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
    codes = {answer.code for answer in looking.answers if answer.outcome is not Outcome.COMPLETED}
    assert codes <= {"mesh_unavailable", "no_reply"}  # away, or it went while a call was under way
    shipped_by_host = effects.read_text().split()
    assert len(set(shipped_by_host)) == len(shipped_by_host)
    assert set(looking.completed()) <= set(shipped_by_host)


def test_who_comes_up_with_its_hub_waits_for_the_hosts(hub: Hub, start_host: Callable[[], Process]) -> None:
    start_host()
    hub.kill()
    mesh = ZenohMesh(settings_for(hub.endpoint, discovery_s=3600))
    mesh.session.start()
    hub.start()
    mesh.session.opened(30)
    assert [spec.prefix for spec in mesh.discover(SHOP)] == ["shop/ship", "shop/slow"]
    mesh.close()


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
