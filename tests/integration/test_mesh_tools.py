"""Asking tools that our own hosts serve: what runs, what is refused, and what a repeat gets. Real Zenoh sessions over one hub."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestration.core.errors import Misconfigured
from orchestration.core.tool import Outcome, Tool, discover, tool
from orchestration.core.tool_error import ToolError
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.hosting import ToolHost
from orchestration.mesh.session import MeshSession
from orchestration.state.store import Store
from orchestration.state.tool_records import RedisToolRecords
from orchestration.testing.servers import RedisServer, redis_server
from tests.integration.mesh_stage import SECRET, Hub, end_processes, host_process, query, settings_for, until


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    end_processes()


@pytest.fixture
def mesh(hub: Hub) -> Iterator[ZenohMesh]:
    made = ZenohMesh(settings_for(hub.endpoint))
    yield made
    made.close()


@dataclass
class Serving:
    """Starts hosts in this process that end with the test."""

    hub: Hub
    closers: list[Callable[[], Any]]

    def __call__(self, *tools: Tool[..., Any], redis_url: str = "", **options: Any) -> ToolHost:
        settings = settings_for(self.hub.endpoint, redis_url=redis_url, mesh_secret=options.pop("secret", ""), lease_s=1.0)
        session = MeshSession(settings)
        records = None
        if redis_url:
            store = Store(settings)
            records = RedisToolRecords(store)
            self.closers += [store.close, records.close]
        host = ToolHost(settings, tools, session, records, **options)
        host.start()
        session.opened(20)
        self.closers += [session.close, host.close]
        return host


@pytest.fixture
def serving(hub: Hub) -> Iterator[Serving]:
    made = Serving(hub, [])
    yield made
    for close in reversed(made.closers):
        close()


def known(mesh: ZenohMesh, prefix: str) -> None:
    """Wait until the mesh knows the tool."""
    until(lambda: [spec for spec in mesh.discover([discover(prefix)]) if spec.prefix == prefix])


def test_a_tool_is_asked_by_payload_or_by_selector(serving: Serving, mesh: ZenohMesh) -> None:
    @tool("kinds/echo")
    def echo(text: str, number: int, flag: bool, items: list[int], nothing: str | None = "unset") -> dict[str, Any]:
        return {"text": text, "number": number, "flag": flag, "items": items, "nothing": nothing}

    serving(echo)
    known(mesh, "kinds/echo")
    arguments = {"text": "a;b=c d&é/?%3B🚀", "number": 3, "flag": True, "items": [1, 2]}
    for payload in (True, False):
        answer = mesh.ask(replace(query("kinds/echo", f"c{payload}", **arguments), payload=payload))
        assert (answer.outcome, answer.value) == (Outcome.COMPLETED, {**arguments, "nothing": "unset"})


def test_megabytes_of_arguments_and_results_arrive(serving: Serving, mesh: ZenohMesh) -> None:
    @tool("kinds/double")
    def double(text: str) -> str:
        return text * 2

    serving(double)
    known(mesh, "kinds/double")
    text = "é" * 1_000_000
    for payload in (True, False):
        patient = replace(query("kinds/double", f"c{payload}", text=text), payload=payload, timeout_s=60.0)
        assert mesh.ask(patient).value == text * 2


def test_async_tools_share_one_loop_and_run_at_once(serving: Serving, mesh: ZenohMesh) -> None:
    meeting: list[asyncio.Event] = []

    @tool("kinds/meet")
    async def meet() -> int:
        if not meeting:
            meeting.append(asyncio.Event())
            await meeting[0].wait()
        else:
            meeting[0].set()
        return threading.get_ident()

    serving(meet, threads=1)
    known(mesh, "kinds/meet")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda n: mesh.ask(query("kinds/meet", f"c{n}")), (1, 2))
    assert first.outcome is second.outcome is Outcome.COMPLETED
    assert first.value == second.value


def test_failures_say_what_the_tool_said_and_nothing_else(serving: Serving, mesh: ZenohMesh, caplog: pytest.LogCaptureFixture) -> None:
    @tool("fail/own")
    def own() -> None:
        raise ToolError("out_of_stock", "none left")

    @tool("fail/bug")
    def bug(pin: str) -> None:
        raise RuntimeError(f"canary {pin}")

    @tool("fail/leave")
    async def leave() -> None:
        raise SystemExit(3)

    serving(own, bug, leave)
    known(mesh, "fail/own")
    answer = mesh.ask(query("fail/own", "c1"))
    assert (answer.outcome, answer.code, answer.message) == (Outcome.FAILED, "out_of_stock", "none left")
    for prefix, arguments in (("fail/bug", {"pin": "canary-pin"}), ("fail/leave", {})):
        answer = mesh.ask(query(prefix, "c2", **arguments))
        assert (answer.outcome, answer.code, answer.message) == (Outcome.FAILED, "internal_error", "Internal error")
    answer = mesh.ask(query("fail/bug", "c3", pin={"canary": 1}))
    assert (answer.outcome, answer.code) == (Outcome.FAILED, "validation_error")
    assert answer.details == [{"type": "string_type", "loc": ["pin"], "msg": "Input should be a valid string"}]
    assert "canary" not in caplog.text
    assert "RuntimeError" in caplog.text


def test_a_key_that_nobody_serves_did_not_run(mesh: ZenohMesh) -> None:
    answer = mesh.ask(query("nobody/here", "c1"))
    assert (answer.outcome, answer.code) == (Outcome.NOT_RUN, "not_found")


@pytest.mark.parametrize("prefix", ["a/*", "**", ".istos/health", "a?b", ""])
def test_only_plain_keys_are_asked(mesh: ZenohMesh, prefix: str) -> None:
    answer = mesh.ask(query(prefix, "c1"))
    assert (answer.outcome, answer.code) == (Outcome.FAILED, "bad_request")


def test_a_tool_that_takes_too_long_has_an_unknown_outcome(serving: Serving, mesh: ZenohMesh) -> None:
    release = threading.Event()

    @tool("kinds/late")
    def late() -> str:
        release.wait(30)
        return "late"

    serving(late)
    known(mesh, "kinds/late")
    answer = mesh.ask(replace(query("kinds/late", "c1"), timeout_s=0.3))
    release.set()
    assert (answer.outcome, answer.code) == (Outcome.UNKNOWN, "timeout")


def test_a_query_whose_time_is_up_does_not_run(serving: Serving, mesh: ZenohMesh) -> None:
    ran: list[str] = []
    gate = threading.Event()

    @tool("kinds/queued")
    def queued(name: str) -> None:
        ran.append(name)
        gate.wait(30)

    host = serving(queued, threads=1)
    known(mesh, "kinds/queued")
    first = threading.Thread(target=mesh.ask, args=(query("kinds/queued", "c1", name="first"),))
    first.start()
    until(lambda: ran)
    soon = int(time.time() * 1000) + 200
    second = ThreadPoolExecutor(1).submit(mesh.ask, replace(query("kinds/queued", "c2", name="second"), expires_ms=soon, timeout_s=20))
    until(lambda: time.time() * 1000 > soon)
    gate.set()
    answer = second.result(30)
    first.join()
    assert (answer.outcome, answer.code) == (Outcome.NOT_RUN, "expired")
    assert ran == ["first"]
    assert mesh.ask(replace(query("kinds/queued", "c3", name="third"), expires_ms=1)).code == "expired"
    assert host.close(5)


def test_a_full_host_says_that_nothing_ran(serving: Serving, mesh: ZenohMesh) -> None:
    gate, ran = threading.Event(), threading.Event()

    @tool("kinds/full")
    def full() -> None:
        ran.set()
        gate.wait(30)

    serving(full, max_calls=1)
    known(mesh, "kinds/full")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(mesh.ask, query("kinds/full", "c1"))
        assert ran.wait(30)
        answer = mesh.ask(query("kinds/full", "c2"))
        gate.set()
        assert first.result(30).outcome is Outcome.COMPLETED
    assert (answer.outcome, answer.code) == (Outcome.NOT_RUN, "rate_limit_exceeded")


def test_a_stopping_host_finishes_what_it_has(serving: Serving, mesh: ZenohMesh) -> None:
    gate, ran = threading.Event(), threading.Event()

    @tool("kinds/drained")
    def drained() -> str:
        ran.set()
        gate.wait(30)
        return "done"

    host = serving(drained)
    known(mesh, "kinds/drained")
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(mesh.ask, replace(query("kinds/drained", "c1"), timeout_s=20))
        assert ran.wait(30)
        closing = pool.submit(host.close, 20)
        until(lambda: mesh.ask(query("kinds/drained", "c2")).outcome is Outcome.NOT_RUN)
        gate.set()
        assert closing.result(30) is True
        assert call.result(30).value == "done"


def test_only_tokens_of_our_secret_are_served(hub: Hub, serving: Serving, mesh: ZenohMesh) -> None:
    @tool("safe/who")
    def who() -> str:
        return "let in"

    serving(who, secret=SECRET)
    known(mesh, "safe/who")
    assert (mesh.ask(query("safe/who", "c1")).outcome, mesh.ask(query("safe/who", "c1")).code) == (Outcome.FAILED, "unauthorized")
    assert mesh.ask(replace(query("safe/who", "c2"), forwarded_token="somebody's")).code == "unauthorized"
    trusted, stranger = (ZenohMesh(settings_for(hub.endpoint, mesh_secret=secret)) for secret in (SECRET, "another secret"))
    assert trusted.ask(query("safe/who", "c3")).value == "let in"
    assert stranger.ask(query("safe/who", "c4")).code == "unauthorized"
    trusted.close()
    stranger.close()


def test_serving_without_an_authorizer_is_said_in_the_log(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    @tool("safe/open")
    def open_to_all() -> None: ...

    serving(open_to_all)
    assert "without an authorizer" in caplog.text


def test_idempotent_tools_are_announced_only_with_records(serving: Serving, mesh: ZenohMesh, turnmill_redis: RedisServer) -> None:
    @tool("promise/plain", idempotent=True)
    def plain() -> None: ...

    @tool("promise/kept", idempotent=True, approval="why", timeout_s=9)
    def kept() -> None: ...

    serving(plain, service="plain")
    serving(kept, service="kept", redis_url=turnmill_redis.url)
    found = until(lambda: specs if len(specs := mesh.discover([discover("promise/*")])) == 2 else None)
    assert [(spec.prefix, spec.service, spec.idempotent, spec.approval, spec.timeout_s) for spec in found] == [
        ("promise/kept", "kept", True, "why", 9.0),
        ("promise/plain", "plain", False, None, 5.0),
    ]


def test_a_repeat_gets_the_first_answer_from_any_replica(serving: Serving, mesh: ZenohMesh, turnmill_redis: RedisServer) -> None:
    ran: list[str] = []

    def replica() -> Tool[..., Any]:
        @tool("once/ship", idempotent=True)
        def ship(order: str) -> int:
            ran.append(order)
            if order == "none":
                raise ToolError("out_of_stock", "none left")
            return len(ran)

        return ship

    first = serving(replica(), redis_url=turnmill_redis.url)
    serving(replica(), redis_url=turnmill_redis.url)
    known(mesh, "once/ship")
    call = query("once/ship", f"c-{time.time_ns()}", order="o-1")
    answers = [mesh.ask(call) for _ in range(5)]
    first.close(5)
    answers += [mesh.ask(call) for _ in range(5)]
    assert [answer.value for answer in answers] == [1] * 10
    failing = query("once/ship", f"c-{time.time_ns()}", order="none")
    assert {mesh.ask(failing).code for _ in range(3)} == {"out_of_stock"}
    assert ran == ["o-1", "none"]
    other = mesh.ask(replace(call, arguments={"order": "o-2"}))
    assert (other.outcome, other.code) == (Outcome.FAILED, "conflict")


def test_repeats_while_it_runs_wait_for_its_answer(serving: Serving, mesh: ZenohMesh, turnmill_redis: RedisServer) -> None:
    ran: list[str] = []
    gate = threading.Event()

    @tool("once/wait")
    def wait(order: str) -> str:
        ran.append(order)
        gate.wait(30)
        return "shipped"

    serving(wait, redis_url=turnmill_redis.url, threads=2)
    known(mesh, "once/wait")
    call = replace(query("once/wait", f"c-{time.time_ns()}", order="o-1"), timeout_s=20)
    with ThreadPoolExecutor(9) as pool:
        calls = [pool.submit(mesh.ask, call) for _ in range(8)]
        until(lambda: ran)
        other = pool.submit(mesh.ask, query("once/wait", f"d-{time.time_ns()}", order="o-2"))
        until(lambda: len(ran) == 2)  # the waiting repeats hold no thread
        gate.set()
        assert {one.result(30).value for one in [*calls, other]} == {"shipped"}
    assert ran == ["o-1", "o-2"]


def test_what_did_not_run_may_be_asked_again(serving: Serving, mesh: ZenohMesh, turnmill_redis: RedisServer) -> None:
    tries: list[int] = []

    @tool("once/limited")
    def limited() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise ToolError("rate_limit_exceeded", "later")
        return "ran"

    serving(limited, redis_url=turnmill_redis.url)
    known(mesh, "once/limited")
    call = query("once/limited", f"c-{time.time_ns()}")
    assert mesh.ask(call).outcome is Outcome.NOT_RUN
    assert mesh.ask(call).value == "ran"


def test_a_host_whose_records_are_away_runs_nothing(serving: Serving, mesh: ZenohMesh) -> None:
    ran: list[int] = []

    @tool("once/blind")
    def blind() -> None:
        ran.append(1)

    serving(blind, redis_url="redis://127.0.0.1:1/0")
    known(mesh, "once/blind")
    answer = mesh.ask(query("once/blind", "c1"))
    assert (answer.outcome, answer.code, ran) == (Outcome.NOT_RUN, "store_unavailable", [])


def test_an_answer_that_redis_missed_is_recorded_when_it_is_back(serving: Serving, mesh: ZenohMesh) -> None:
    ran: list[int] = []
    gate = threading.Event()

    @tool("once/outage")
    def outage() -> str:
        ran.append(1)
        gate.wait(30)
        return "shipped"

    with redis_server(appendonly="always", binary="system" if shutil.which("redis-server") else None) as server:
        if server.external:
            pytest.skip("needs a Redis server that it may stop")
        serving(outage, redis_url=server.url)
        known(mesh, "once/outage")
        call = replace(query("once/outage", "c1"), timeout_s=30)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(mesh.ask, call)
            until(lambda: ran)
            server.shut_down()
            gate.set()
            assert first.result(60).value == "shipped"
        server.start()
        assert until(lambda: mesh.ask(call).value) == "shipped"
        assert ran == [1]


def test_two_hosts_and_a_thousand_queries_have_a_thousand_effects(hub: Hub, mesh: ZenohMesh, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    hosts = [host_process(hub, "tests.integration.mesh_tools", EFFECTS=str(effects)) for _ in range(2)]
    assert hosts[0].first_line == "serving 2 tools as turnmill-tools"
    known(mesh, "shop/ship")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: mesh.ask(replace(query("shop/ship", f"c{n}", order=f"o-{n}"), timeout_s=30)), range(1000)))
    assert {answer.outcome for answer in answers} == {Outcome.COMPLETED}
    assert sorted(effects.read_text().split()) == sorted(f"o-{n}" for n in range(1000))
    assert [host.stop() for host in hosts] == [0, 0]


def test_a_record_left_by_a_killed_host_has_an_unknown_outcome(
    hub: Hub, mesh: ZenohMesh, tmp_path: Path, turnmill_redis: RedisServer
) -> None:
    effects, hold = tmp_path / "effects", tmp_path / "hold"
    hold.touch()
    env = {"EFFECTS": str(effects), "TURNMILL_REDIS_URL": turnmill_redis.url, "TURNMILL_LEASE_S": "1"}
    host = host_process(hub, "tests.integration.mesh_tools", **env)
    known(mesh, "shop/slow")
    call = replace(query("shop/slow", f"c-{time.time_ns()}", order="o-1", hold=str(hold)), timeout_s=20)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mesh.ask, call)
        until(effects.exists)
        host.kill()
        first = asked.result(30)
    assert first.outcome is Outcome.UNKNOWN
    replacement = host_process(hub, "tests.integration.mesh_tools", **env)
    until(lambda: mesh.ask(call).code == "unknown_outcome")
    assert effects.read_text().split() == ["o-1"]
    assert replacement.stop() == 0


def test_two_tools_of_one_prefix_are_refused(serving: Serving) -> None:
    @tool("same/key")
    def one() -> None: ...

    @tool("same/key")
    def two() -> None: ...

    with pytest.raises(Misconfigured, match="same/key"):
        serving(one, two)
