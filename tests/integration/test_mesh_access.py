"""The sample of a hub with access control, `deploy/zenohd.json5`: strangers do not get in, and a tool host hears its own queries alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestration import tool
from orchestration.core.errors import MeshUnavailable
from orchestration.core.tool import Discover, Outcome, ToolQuery
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.session import MeshSession
from orchestration.settings import Settings
from orchestration.testing.parts import wait_until
from orchestration.testing.servers import free_port

SAMPLE = Path(__file__).parents[2] / "deploy" / "zenohd.json5"

Named = Callable[[str], Settings]


@tool("billing/refund")
def refund(amount: int) -> int:
    """Refund an amount."""
    return amount


@tool("elsewhere/thing")
def thing() -> int:
    """What this host may not serve."""
    return 1


@pytest.fixture
def named(tmp_path: Path) -> Iterator[Named]:
    """Settings of somebody of this name, on a hub with the sample's rules."""
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    (tmp_path / "users").write_text("hub:change-me\nworker:w\ntools:t\n")
    rules = SAMPLE.read_text().replace("tcp/127.0.0.1:7447", endpoint).replace("/etc/turnmill/mesh-users", str(tmp_path / "users"))
    (tmp_path / "hub.json5").write_text(rules)
    hub = MeshSession(Settings(mesh_config=str(tmp_path / "hub.json5")), mode="router")
    hub.start()

    def settings(user: str) -> Settings:
        place = tmp_path / f"{user}.json5"
        place.write_text(json.dumps({"transport": {"auth": {"usrpwd": {"user": user, "password": user[0]}}}}))
        return Settings(mesh_connect=(endpoint,), mesh_config=str(place))

    yield settings
    hub.close()


def ask(mesh: ZenohMesh, prefix: str, **arguments: int) -> Outcome:
    return mesh.ask(ToolQuery(prefix, dict(arguments), call_id="tc_1", tenant="dev", sub="ann", roles=(), timeout_s=10.0)).outcome


def test_a_worker_asks_and_a_host_serves_what_is_its_own(named: Named) -> None:
    with ExitStack() as closing:
        host, worker = ZenohMesh(named("tools")), ZenohMesh(named("worker"))
        closing.callback(worker.close)
        closing.callback(host.close)
        host.serve([refund, thing])
        wait_until(lambda: bool(worker.discover([Discover(("billing/*",))])), "the host to be found", 20)
        assert ask(worker, "billing/refund", amount=3) is Outcome.COMPLETED
        assert ask(worker, "elsewhere/thing") is Outcome.NOT_RUN


def test_a_host_hears_nothing_that_is_not_its_own_and_a_stranger_does_not_get_in(named: Named) -> None:
    with ExitStack() as closing:
        worker, spy, stranger = ZenohMesh(named("worker")), MeshSession(named("tools")), MeshSession(named("stranger"))
        for one in (worker, spy, stranger):
            closing.callback(one.close)
        heard: list[str] = []
        spy.subscribe("**", lambda key, _: heard.append(key))
        spy.watch_liveliness("**", heard.append, heard.append)
        session = spy.opened(10)
        living: list[str] = []
        worker.session.watch_liveliness("turnmill/**", living.append, living.append)
        worker.announce_process("one")
        wait_until(lambda: bool(living), "the worker to hear of itself", 20)
        worker.session.publish("turnmill/frames", b"secret")
        assert [reply for reply in session.get("turnmill/**", timeout=1.0) if reply.ok is not None] == []
        time.sleep(0.5)  # nothing tells that nothing will come
        assert heard == []
        with pytest.raises(MeshUnavailable):
            stranger.opened(1.0)
