"""The session through the life of its hub: it starts before it, survives its death, and tells who lives. Real processes over loopback."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from orchestration.core.errors import MeshUnavailable, Misconfigured
from orchestration.core.tool import Outcome, discover, tool
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.session import MeshSession
from orchestration.settings import Settings
from orchestration.testing.servers import free_port
from tests.integration.mesh_stage import REPOSITORY, Hub, Process, end_processes, host_process, query, settings_for, until


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    end_processes()


def living(hub: Hub, key: str) -> Process:
    """A process that holds a liveliness token."""
    return Process(
        "import time; from orchestration.settings import load_settings; from orchestration.mesh.session import MeshSession;"
        f"s = MeshSession(load_settings()); s.declare_liveliness({key!r}); s.opened(30); print('alive', flush=True); time.sleep(600)",
        TURNMILL_MESH_CONNECT=hub.endpoint,
    )


class Watch:
    """What a liveliness watcher heard: the keys that live, and every drop."""

    def __init__(self, session: MeshSession, pattern: str) -> None:
        self.alive: set[str] = set()
        self.dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.declaration = session.watch_liveliness(pattern, self.alive.add, self._drop)

    def _drop(self, key: str) -> None:
        self.alive.discard(key)
        self.dropped.put(key)


def test_a_killed_process_is_seen_at_once(hub: Hub) -> None:
    session = MeshSession(settings_for(hub.endpoint))
    one, two = living(hub, "live/one"), living(hub, "live/two")
    watch = Watch(session, "live/*")
    until(lambda: watch.alive == {"live/one", "live/two"})
    one.kill()
    assert watch.dropped.get(timeout=30) == "live/one"
    assert watch.alive == {"live/two"}
    two.kill()
    assert watch.dropped.get(timeout=30) == "live/two"
    session.close()


def test_a_token_that_is_taken_back_drops(hub: Hub) -> None:
    session, other = MeshSession(settings_for(hub.endpoint)), MeshSession(settings_for(hub.endpoint))
    watch = Watch(session, "live/**")
    token = other.declare_liveliness("live/a/b")
    until(lambda: watch.alive)
    token.undeclare()
    token.undeclare()
    assert watch.dropped.get(timeout=30) == "live/a/b"
    session.close()
    other.close()


def test_everything_works_again_after_the_hub_restarted(hub: Hub, tmp_path: Path) -> None:
    mesh = ZenohMesh(settings_for(hub.endpoint))
    host = host_process(hub, "tests.integration.mesh_tools", EFFECTS=str(tmp_path / "effects"))
    life = living(hub, "live/one")
    watch = Watch(mesh.session, "live/*")
    until(lambda: watch.alive == {"live/one"} and mesh.discover([discover("shop/*")]))
    assert mesh.ask(query("shop/ship", "c1", order="o-1")).outcome is Outcome.COMPLETED
    for n in range(2):
        hub.kill()
        until(lambda: not mesh.session.connected)
        away = mesh.ask(query("shop/ship", "c2", order="never"))
        assert (away.outcome, away.code) == (Outcome.NOT_RUN, "mesh_unavailable")
        assert [spec.prefix for spec in mesh.discover([discover("shop/*")])] == ["shop/ship", "shop/slow"]
        until(lambda: not watch.alive)
        hub.start()
        until(lambda n=n: mesh.ask(query("shop/ship", f"d{n}", order=f"again-{n}")).outcome is Outcome.COMPLETED)
        until(lambda: watch.alive == {"live/one"})
    while not watch.dropped.empty():
        watch.dropped.get()
    life.kill()
    assert watch.dropped.get(timeout=30) == "live/one"
    assert (tmp_path / "effects").read_text().split() == ["o-1", "again-0", "again-1"]
    assert host.stop() == 0
    mesh.close()


def test_a_call_whose_host_or_hub_dies_has_an_unknown_outcome(hub: Hub, tmp_path: Path) -> None:
    mesh = ZenohMesh(settings_for(hub.endpoint))
    effects, hold = tmp_path / "effects", tmp_path / "hold"
    hold.touch()
    host = host_process(hub, "tests.integration.mesh_tools", EFFECTS=str(effects))
    until(lambda: mesh.discover([discover("shop/slow")]))
    answers: queue.SimpleQueue[tuple[Outcome, str]] = queue.SimpleQueue()

    def ask(order: str) -> None:
        answer = mesh.ask(replace(query("shop/slow", f"c-{order}", order=order, hold=str(hold)), timeout_s=60))
        answers.put((answer.outcome, answer.code))

    for order, end in (("hub", hub.kill), ("host", host.kill)):
        asking = threading.Thread(target=ask, args=(order,))
        asking.start()
        until(lambda order=order: effects.exists() and order in effects.read_text().split())
        end()
        assert answers.get(timeout=30) == (Outcome.UNKNOWN, "no_reply")
        asking.join()
        if order == "hub":
            hub.start()
            until(lambda: mesh.session.connected and mesh.discover([discover("shop/slow")]))
    mesh.close()


def test_a_process_starts_before_its_hub() -> None:
    hub = Hub()
    hub.kill()
    mesh = ZenohMesh(settings_for(hub.endpoint))

    @tool("early/bird")
    def bird() -> str:
        return "sings"

    mesh.serve([bird])
    watch = Watch(mesh.session, "live/*")
    answer = mesh.ask(replace(query("early/bird", "c1"), timeout_s=0.2))
    assert (answer.outcome, answer.code) == (Outcome.NOT_RUN, "mesh_unavailable")
    with pytest.raises(MeshUnavailable):
        mesh.session.publish("a/b", b"x")
    hub.start()
    assert mesh.ask(replace(query("early/bird", "c2"), timeout_s=60)).value == "sings"
    life = living(hub, "live/one")
    until(lambda: watch.alive == {"live/one"})
    other = ZenohMesh(settings_for(hub.endpoint))
    assert until(lambda: other.discover([discover("early/*")]))[0].service == "turnmill-worker"
    life.kill()
    for one in (other, mesh):
        one.close()
    hub.kill()


def test_a_process_that_never_found_its_hub_ends_at_once() -> None:
    code = (
        "from orchestration.settings import load_settings; from orchestration.mesh.session import MeshSession;"
        "s = MeshSession(load_settings()); s.declare_liveliness('a/b'); print('started', flush=True)"
    )
    env = {"TURNMILL_MESH_CONNECT": f"tcp/127.0.0.1:{free_port()}", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "started")


def test_peers_reach_one_another_without_a_hub() -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    listening = ZenohMesh(Settings(mesh_listen=(endpoint,), mesh_secret=""))
    connecting = ZenohMesh(settings_for(endpoint, service="other"))

    @tool("here/one")
    def one() -> int:
        return 1

    @tool("there/two")
    def two() -> int:
        return 2

    listening.serve([one])
    connecting.serve([two])
    until(lambda: listening.discover([discover("there/*")]) and connecting.discover([discover("here/*")]))
    assert (connecting.ask(query("here/one", "c1")).value, listening.ask(query("there/two", "c2")).value) == (1, 2)
    assert listening.ask(query("here/one", "c3")).value == 1
    connecting.close()
    listening.close()


def _in_child(mesh: ZenohMesh, pipe: Connection) -> None:
    answer = mesh.ask(query("fork/tool", "c-child"))
    pipe.send((str(answer.outcome), answer.code, answer.message))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_session_that_was_opened_before_a_fork_is_refused_in_the_child(hub: Hub) -> None:
    mesh = ZenohMesh(settings_for(hub.endpoint))
    mesh.session.opened(30)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(mesh, theirs))
    child.start()
    assert ours.poll(60)
    outcome, code, message = ours.recv()
    assert (outcome, code) == ("not_run", "mesh_unavailable")
    assert "forked" in message
    child.join(60)
    assert child.exitcode == 0
    assert mesh.session.connected
    mesh.close()
    ours.close()
    theirs.close()


def test_a_session_that_was_only_made_before_a_fork_works_in_the_child(hub: Hub, tmp_path: Path) -> None:
    host = host_process(hub, "tests.integration.mesh_tools", EFFECTS=str(tmp_path / "effects"))
    code = """
import os
from orchestration.core.tool import ToolQuery
from orchestration.mesh.adapter import ZenohMesh
from orchestration.settings import load_settings
mesh = ZenohMesh(load_settings())
child = os.fork()
answer = mesh.ask(ToolQuery("shop/ship", {"order": "child" if child == 0 else "parent"}, "c", "acme", "alice", timeout_s=20))
if child == 0:
    os._exit(0 if answer.value == {"shipped": "child"} else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, answer.value, flush=True)
"""
    parent = Process(code, TURNMILL_MESH_CONNECT=hub.endpoint)
    assert parent.first_line == "0 {'shipped': 'parent'}"
    assert host.stop() == 0


def test_a_closed_session_stays_closed(hub: Hub) -> None:
    mesh = ZenohMesh(settings_for(hub.endpoint))
    mesh.session.opened(30)
    mesh.close()
    mesh.close()
    assert mesh.ask(query("a/b", "c1")).code == "mesh_unavailable"
    assert mesh.discover([discover()]) == []
    assert not mesh.session.connected


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh_listen": ("nonsense",)},
        {"mesh_connect": ("tcp",)},
        {"mesh_config": "/nowhere/zenoh.json5"},
        {"mesh_listen": ("tcp/192.0.2.1:7447",)},
    ],
)
def test_endpoints_that_cannot_work_are_refused_at_start(settings: dict[str, object]) -> None:
    session = MeshSession(Settings(**settings))
    with pytest.raises(Misconfigured):
        session.start()


def test_a_configuration_file_is_honoured(tmp_path: Path, hub: Hub) -> None:
    file = tmp_path / "zenoh.json5"
    file.write_text('{mode: "client", connect: {endpoints: ["%s"]}, scouting: {multicast: {enabled: false}}}' % hub.endpoint)  # noqa: UP031
    session = MeshSession(Settings(mesh_config=str(file)))
    session.opened(30)
    assert session.connected
    session.close()


def test_messages_reach_their_subscribers_in_order(hub: Hub) -> None:
    session, other = MeshSession(settings_for(hub.endpoint)), MeshSession(settings_for(hub.endpoint))
    heard: list[tuple[str, bytes]] = []
    ready = threading.Event()

    def on_message(key: str, payload: bytes) -> None:
        ready.set()
        if payload != b"knock":
            heard.append((key, payload))

    session.subscribe("frames/*", on_message)
    other.opened(30)
    until(lambda: other.publish("frames/a", b"knock") or ready.wait(0.1))
    for n in range(100):
        other.publish("frames/a", str(n).encode())
    until(lambda: len(heard) == 100)
    assert [payload for _, payload in heard] == [str(n).encode() for n in range(100)]
    session.close()
    other.close()
