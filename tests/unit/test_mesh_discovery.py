"""What is believed of other services' manifests, and how several become one catalogue."""

from __future__ import annotations

import json
import time

import pytest

from orchestration.core.errors import Unauthorized
from orchestration.core.tool import Discover, ToolSpec, discover, tool
from orchestration.mesh.discovery import select
from orchestration.mesh.manifest import Manifest, decode_manifest, encode_manifest, manifest_key
from orchestration.mesh.tokens import Asker, sign, verify


@tool("billing/refund", approval="moves real money", idempotent=True, timeout_s=20)
def refund(order: str, amount: float = 1.0) -> dict[str, float]:
    """Refund an order."""
    return {order: amount}


def manifest(*entries: object, service: object = "peer") -> Manifest:
    return decode_manifest(json.dumps({"service": service, "capabilities": list(entries)}).encode())


def test_what_we_serve_is_what_others_read() -> None:
    read = decode_manifest(encode_manifest("shop", [refund.spec], records=True))
    assert read.service == "shop"
    spec = read.tools[0]
    assert (spec.prefix, spec.description, spec.approval, spec.idempotent, spec.payload, spec.timeout_s) == (
        "billing/refund",
        "Refund an order.",
        "moves real money",
        True,
        True,
        20,
    )
    assert spec.parameters == refund.spec.parameters


def test_without_records_nothing_is_announced_as_idempotent() -> None:
    assert not decode_manifest(encode_manifest("shop", [refund.spec], records=False)).tools[0].idempotent


@pytest.mark.parametrize(("service", "key"), [("My Svc/é", ".istos/capabilities/My-Svc"), ("--", ".istos/capabilities/istos")])
def test_a_services_name_becomes_one_chunk(service: str, key: str) -> None:
    assert manifest_key(service) == key


def test_only_handlers_are_tools_and_reserved_keys_never_are() -> None:
    read = manifest(
        {"prefix": "a/b", "kind": "handle"},
        {"prefix": "agent/chat", "kind": "channel"},
        {"prefix": "s/gen", "kind": "stream"},
        {"prefix": ".istos/health", "kind": "handle"},
    )
    assert [spec.prefix for spec in read.tools] == ["a/b"]
    assert read.skipped == ()


@pytest.mark.parametrize(
    "entry",
    [
        5,
        None,
        {"kind": "handle"},
        {"kind": "handle", "prefix": 7},
        {"kind": "handle", "prefix": "a/**"},
        {"kind": "handle", "prefix": "a/b", "params_schema": "string"},
        {"kind": "handle", "prefix": "a/b", "params_schema": {"type": "array"}},
        {"kind": "handle", "prefix": "a/b", "params_schema": {"type": "object", "properties": 5}},
        {"kind": "handle", "prefix": "a/b", "params_schema": {"type": "object", "properties": {"x": {"type": "nonsense"}}}},
        {"kind": "handle", "prefix": "a/b", "params_schema": {"properties": {"x": {"$ref": "http://169.254.169.254/latest"}}}},
        {"kind": "handle", "prefix": "a/b", "params_schema": {"description": "x" * 100_000}},
    ],
)
def test_a_broken_entry_is_named_and_the_others_stand(entry: object) -> None:
    read = manifest(entry, {"prefix": "good/one", "kind": "handle", "description": None})
    assert [spec.prefix for spec in read.tools] == ["good/one"]
    assert len(read.skipped) == 1


@pytest.mark.parametrize(
    "payload", [b"", b"5", b"[]", b'{"service": "x"}', b'{"service": 5, "capabilities": []}', b"\xff", b"x" * 9_000_000]
)
def test_what_is_no_manifest_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decode_manifest(payload)


@pytest.mark.parametrize(
    ("value", "approval"),
    [(True, True), ("why", "why"), (False, None), (None, None), ("", True), (1, True), ({"by": "x"}, True), (0, True)],
)
def test_an_odd_demand_for_approval_is_a_demand(value: object, approval: object) -> None:
    assert manifest({"prefix": "a/b", "kind": "handle", "approval": value}).tools[0].approval == approval


@pytest.mark.parametrize(("value", "timeout_s"), [(12, 12.0), ("5", 5.0), (-1, 5.0), (True, 5.0), (10**9, 3600.0)])
def test_time_limits_of_peers_are_kept_within_reason(value: object, timeout_s: float) -> None:
    assert manifest({"prefix": "a/b", "kind": "handle", "timeout_s": value}).tools[0].timeout_s == timeout_s


def test_one_key_of_two_services_is_one_tool_with_the_stricter_rules() -> None:
    one = Manifest("alpha", (ToolSpec("pay/now", "first", idempotent=True, payload=True, service="alpha"),))
    two = Manifest("beta", (ToolSpec("pay/now", "second", approval="money", timeout_s=9, service="beta"),))
    for order in ([one, two], [two, one]):
        for wish in (discover("pay/*"), discover("pay/*", services=["alpha"])):
            (spec,) = select(order, [wish])
            assert (spec.description, spec.approval, spec.idempotent, spec.payload, spec.timeout_s) == ("first", "money", False, False, 9)


def test_wishes_choose_by_key_and_service_in_a_stable_order() -> None:
    manifests = [
        Manifest("b", (ToolSpec("math/mul", service="b"), ToolSpec("math/add", service="b"))),
        Manifest("a", (ToolSpec("geo/find", service="a"),)),
    ]
    assert [spec.prefix for spec in select(manifests, [Discover(("**",))])] == ["geo/find", "math/add", "math/mul"]
    assert [spec.prefix for spec in select(manifests, [discover("math/*"), discover("geo/find", services=["b"])])] == [
        "math/add",
        "math/mul",
    ]


def test_a_wish_may_gate_what_its_owner_does_not() -> None:
    manifests = [Manifest("a", (ToolSpec("math/add", service="a"), ToolSpec("math/mul", approval="why", service="a")))]
    add, mul = select(manifests, [discover("math/*", approval=["math/*"])])
    assert (add.approval, mul.approval) == (True, "why")


def test_a_token_holds_for_its_key_and_its_secret_only() -> None:
    asker = Asker("alice", "acme", ("ops",))
    token = sign(asker, "a/b", secret="short", now_s=time.time())
    assert verify(token, "a/b", secret="short") == asker
    stale = sign(asker, "a/b", secret="short", now_s=time.time() - 200)
    for wrong, key, secret in (
        (token, "a/c", "short"),
        (token, "a/b", "other"),
        (stale, "a/b", "short"),
        ("", "a/b", "short"),
        ("x.y.z", "a/b", "short"),
    ):
        with pytest.raises(Unauthorized) as refused:
            verify(wrong, key, secret=secret)
        assert not wrong or wrong not in str(refused.value)


def test_the_words_of_a_service_that_is_away_count_only_where_no_other_serves_the_key() -> None:
    here = Manifest("new", (ToolSpec("pay/now", "new words", payload=True, service="new"),))
    away = Manifest("away", (ToolSpec("pay/now", "old words", approval="money", service="away"), ToolSpec("pay/late", service="away")))
    late, now = select([here], [discover("pay/*")], absent=[away])
    assert (late.prefix, late.service) == ("pay/late", "away")
    assert (now.description, now.approval, now.payload) == ("new words", "money", False)
