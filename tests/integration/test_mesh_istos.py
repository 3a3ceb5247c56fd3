"""Turnmill and a real Istos node on one mesh, each asking the other and finding what the other serves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zenoh
from istos import Istos
from istos.errors import IstosError
from istos.security.authz import JWTAuthorizer, TokenAuthorizer

from orchestration.core.tool import Outcome, discover, tool
from orchestration.mesh.adapter import ZenohMesh
from orchestration.mesh.session import MeshSession
from orchestration.mesh.tokens import Asker, sign
from tests.integration.mesh_stage import SECRET, Hub, end_processes, istos_node, query, settings_for, until

BINARY_NOTE = "binary content, not shown"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    end_processes()


@pytest.fixture(scope="module")
def asked() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def node(hub: Hub, asked: list[Any]) -> Iterator[Callable[..., Any]]:
    def declare(app: Istos) -> None:
        @app.handle("math/add")
        async def add(a: int, b: int = 1) -> int:
            """Add two integers."""
            return a + b

        @app.handle("bill/refund", approval="moves real money")
        async def refund(order_id: str) -> dict[str, Any]:
            asked.append(order_id)
            return {"order_id": order_id, "refunded": True}

        @app.handle("fail/boom")
        async def boom() -> str:
            raise RuntimeError("canary")

        @app.handle("fail/own")
        async def own() -> str:
            raise IstosError("none left", code="out_of_stock")

        @app.handle("fail/nothing")
        async def nothing() -> None:
            asked.append("nothing")

        @app.handle("fail/hang")
        async def hang() -> str:
            await asyncio.sleep(3600)
            return ""

        @app.handle("text/echo")
        async def echo(text: str, flag: bool = False, f: float = 0.0) -> dict[str, Any]:
            return {"text": text, "flag": flag, "f": f}

        @app.handle("list/sum")
        async def total(items: list[int]) -> int:
            return sum(items)

        @app.handle("safe/token", authorizer=TokenAuthorizer("sek"))
        async def by_token() -> str:
            return "in"

        @app.handle("safe/jwt", authorizer=JWTAuthorizer(secret=SECRET, audience="safe/jwt"))
        async def by_jwt() -> str:
            return "in"

        @app.stream("s/gen")
        async def gen(n: int) -> Any:
            for i in range(n):
                yield i

    with istos_node(hub.endpoint, "calc", declare) as run:
        yield run


@pytest.fixture
def mesh(hub: Hub, node: Callable[..., Any]) -> Iterator[ZenohMesh]:
    made = ZenohMesh(settings_for(hub.endpoint))
    until(lambda: made.discover([discover("math/add")]))
    yield made
    made.close()


def ask(mesh: ZenohMesh, prefix: str, /, **arguments: Any) -> Any:
    return mesh.ask(replace(query(prefix, "c-1", **arguments), payload=False))


def test_an_istos_nodes_handlers_are_our_tools(mesh: ZenohMesh) -> None:
    found = {spec.prefix: spec for spec in mesh.discover([discover()])}
    assert {"math/add", "bill/refund", "fail/boom"} <= found.keys()
    assert "s/gen" not in found
    assert not [prefix for prefix in found if prefix.startswith(".istos")]
    add, refund = found["math/add"], found["bill/refund"]
    assert (add.description, add.service, add.idempotent, add.payload, add.approval) == ("Add two integers.", "calc", False, False, None)
    assert add.parameters["required"] == ["a"]
    assert refund.approval == "moves real money"


def test_an_istos_handler_answers_us(mesh: ZenohMesh) -> None:
    answer = ask(mesh, "math/add", a=2, b=40)
    assert (answer.outcome, answer.value) == (Outcome.COMPLETED, 42)
    text = "a;b=c d&é/?%3B🚀\n"
    assert ask(mesh, "text/echo", text=text, flag=True, f=1.5).value == {"text": text, "flag": True, "f": 1.5}


def test_what_an_istos_handler_raises_reaches_us_before_the_time_limit(mesh: ZenohMesh) -> None:
    answers = {prefix: mesh.ask(replace(query(prefix, "c-1"), payload=False, timeout_s=60)) for prefix in ("fail/boom", "fail/own")}
    assert (answers["fail/boom"].outcome, answers["fail/boom"].code) == (Outcome.FAILED, "internal_error")
    assert (answers["fail/own"].outcome, answers["fail/own"].code) == (Outcome.FAILED, "out_of_stock")


@pytest.mark.parametrize(("prefix", "arguments"), [("math/add", {"a": "x"}), ("math/add", {}), ("list/sum", {"items": [1, 2]})])
def test_arguments_that_istos_refuses_are_explained(mesh: ZenohMesh, prefix: str, arguments: dict[str, Any]) -> None:
    answer = ask(mesh, prefix, **arguments)
    assert (answer.outcome, answer.code) == (Outcome.FAILED, "validation_error")
    assert answer.details


def test_a_handler_that_returns_nothing_has_an_unknown_outcome_however_often(mesh: ZenohMesh, asked: list[Any]) -> None:
    asked.clear()
    for n in range(5):
        answer = ask(mesh, "fail/nothing")
        assert (answer.outcome, answer.code) == (Outcome.UNKNOWN, "no_reply")
        assert asked == ["nothing"] * (n + 1)


def test_a_handler_that_hangs_has_an_unknown_outcome(mesh: ZenohMesh) -> None:
    answer = mesh.ask(replace(query("fail/hang", "c-1"), payload=False, timeout_s=0.3))
    assert (answer.outcome, answer.code) == (Outcome.UNKNOWN, "timeout")


def test_istos_authorizers_take_our_tokens(hub: Hub, mesh: ZenohMesh) -> None:
    assert ask(mesh, "safe/jwt").code == "unauthorized"
    assert mesh.ask(replace(query("safe/token", "c-1"), payload=False, forwarded_token="sek")).value == "in"
    signing = ZenohMesh(settings_for(hub.endpoint, mesh_secret=SECRET))
    assert ask(signing, "safe/jwt").value == "in"
    signing.close()


def test_istos_finds_and_asks_our_tools(hub: Hub, node: Callable[..., Any]) -> None:
    @tool("ours/all", approval="ask first")
    def everything(
        a: int, text: str, flag: bool, lst: list[int], obj: dict[str, int], f: float, none: str | None = "x", more: list[str] | None = None
    ) -> dict[str, Any]:
        """Give it all back."""
        return {"a": a, "text": text, "flag": flag, "none": none, "lst": lst, "obj": obj, "f": f, "more": more}

    @tool("ours/boom")
    def boom() -> None:
        raise RuntimeError("canary")

    @tool("ours/nothing")
    def nothing() -> None: ...

    serving = ZenohMesh(settings_for(hub.endpoint, service="My Svc/é"))
    serving.serve([everything, boom, nothing])
    try:
        manifests = until(lambda: found if "My Svc/é-worker" in (found := node(lambda app: app.discover_capabilities())) else None)
        assert "calc" in manifests
        entries = {entry["prefix"]: entry for entry in manifests["My Svc/é-worker"]["capabilities"]}
        assert entries["ours/all"]["kind"] == "handle"
        assert entries["ours/all"]["approval"] == "ask first"
        assert entries["ours/all"]["params_schema"]["required"] == ["a", "text", "flag", "lst", "obj", "f"]
        arguments = {"a": 2, "text": "a;b=c d&é/?", "flag": True, "none": None, "lst": [1, 2], "obj": {"k": 1}, "f": 1.5}
        assert node(lambda app: app.query_once("ours/all", **arguments)) == {**arguments, "more": None}
        assert node(lambda app: app.query_once("ours/nothing")) is None
        for prefix, arguments, code in (("ours/boom", {}, "internal_error"), ("ours/all", {"a": "x"}, "validation_error")):
            with pytest.raises(IstosError) as raised:
                node(lambda app, prefix=prefix, arguments=arguments: app.query_once(prefix, **arguments))
            assert raised.value.code == code
            assert "canary" not in str(raised.value)
    finally:
        serving.close()


def test_istos_with_a_token_of_ours_is_let_in(hub: Hub, node: Callable[..., Any]) -> None:
    @tool("ours/safe")
    def safe() -> str:
        return "in"

    serving = ZenohMesh(settings_for(hub.endpoint, mesh_secret=SECRET))
    serving.serve([safe])
    try:
        until(lambda: "turnmill-worker" in node(lambda app: app.discover_capabilities()))
        token = sign(Asker("istos", "acme"), "ours/safe", secret=SECRET, now_s=time.time())
        assert node(lambda app: app.query_once("ours/safe", token=token)) == "in"
        with pytest.raises(IstosError) as raised:
            node(lambda app: app.query_once("ours/safe"))
        assert raised.value.code == "unauthorized"
    finally:
        serving.close()


def replying(session: MeshSession, key: str, payload: bytes, encoding: str) -> None:
    def on_query(q: zenoh.Query) -> None:
        with q:
            q.reply(q.key_expr, payload, encoding=encoding)

    session.declare(lambda opened: opened.declare_queryable(key, on_query, complete=True))
    session.opened(20)


@pytest.fixture
def peer(hub: Hub) -> Iterator[MeshSession]:
    """A service on the mesh that is neither Istos nor ours."""
    session = MeshSession(settings_for(hub.endpoint))
    yield session
    session.close()


@pytest.mark.parametrize(
    ("payload", "encoding", "outcome", "code", "value"),
    [
        (b"", "zenoh/bytes", Outcome.COMPLETED, "", None),
        (b"not json", "zenoh/bytes", Outcome.FAILED, "bad_reply", None),
        (b'{"x": NaN, "y": -Infinity}', "application/json", Outcome.COMPLETED, "", {"x": None, "y": None}),
        (b"\x89" * 200_000, "image/png", Outcome.COMPLETED, "", {"type": "image/png", "bytes": 200_000, "note": BINARY_NOTE}),
    ],
)
def test_odd_replies_have_known_outcomes(
    mesh: ZenohMesh, peer: MeshSession, payload: bytes, encoding: str, outcome: Outcome, code: str, value: Any
) -> None:
    replying(peer, "odd/reply", payload, encoding)
    until(lambda: mesh.ask(query("odd/reply", "c-1")).code != "not_found")
    answer = mesh.ask(query("odd/reply", "c-1"))
    assert (answer.outcome, answer.code, answer.value) == (outcome, code, value)


def test_hostile_manifests_break_nothing_and_are_complained_of_once(
    mesh: ZenohMesh, peer: MeshSession, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [None, {"prefix": "evil/**", "kind": "handle"}, {"prefix": "evil/fine", "kind": "handle", "approval": 1}]
    replying(peer, ".istos/capabilities/evil", json.dumps({"service": "evil", "capabilities": entries}).encode(), "application/json")
    replying(peer, ".istos/capabilities/worse", b"\xff\x00nonsense", "application/json")
    found = until(lambda: specs if len(specs := mesh.discover([discover("evil/*", "math/add")])) == 2 else None)
    assert [(spec.prefix, spec.approval) for spec in found] == [("evil/fine", True), ("math/add", None)]
    for _ in range(3):
        mesh._discovery.forget()
        mesh.discover([discover("evil/*")])
    complaints = [record.getMessage() for record in caplog.records if "discovery" in record.getMessage()]
    assert len(complaints) == len(set(complaints)) == 3


def test_many_threads_ask_at_once(mesh: ZenohMesh) -> None:
    wrong: list[Any] = []

    def work(n: int) -> None:
        for m in range(20):
            answer = ask(mesh, "math/add", a=n, b=m)
            if answer.value != n + m:
                wrong.append(answer)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
