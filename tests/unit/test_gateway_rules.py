"""Rules of the gateway that need no server: statuses, strict JSON, who may be served without keys, event ids, events as bytes."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic import SecretStr
from uvicorn.lifespan.on import LifespanOn

import gateway.app
from gateway.auth import Door
from gateway.bodies import Bodies
from gateway.loopback import is_loopback, served_hosts
from gateway.plain_json import MAX_VALUES, strict_json
from gateway.problems import answer_to, status_of
from gateway.server import tune_server
from gateway.streams import as_event
from gateway.turns import _wanted_wait_s
from gateway.webhooks.routes import open_hooks
from gateway.webhooks.standard import StandardVerifier
from orchestration.actions.follow import event_id
from orchestration.core import errors
from orchestration.core.agent import StandardWebhooks, Webhook
from orchestration.settings import Settings
from orchestration.state.watcher import Frame, stored_frame


class NoKeys:
    """A store without any key."""

    class client:
        @staticmethod
        def hlen(_: str) -> int:
            return 0


def door(**settings: Any) -> Door:
    served_on = settings.pop("served_on", ())
    return Door(Settings(**settings), NoKeys(), served_on=served_on)  # type: ignore[arg-type]


def test_every_kind_of_error_has_a_status_and_a_code() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.TurnmillError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    statuses = {kind.code: status_of(kind) for kind in kinds}
    promised = {
        400: {"bad_request", "bad_event_id"},
        401: {"unauthorized", "bad_signature"},
        403: {"forbidden"},
        404: {"not_found", "unknown_agent"},
        409: {"conversation_busy", "idempotency_mismatch", "turn_ended", "call_ended", "already_decided", "arguments_differ", "not_held"},
        410: {"approval_expired", "approval_cancelled"},
        413: {"too_large"},
        422: {"validation_error", "arguments_invalid"},
        429: {"rate_limited", "mailbox_full"},
        503: {"store_unavailable"},
    }
    for status, codes in promised.items():
        assert codes <= {code for code, found in statuses.items() if found == status}


def test_a_new_kind_of_error_has_the_status_of_its_ancestor() -> None:
    class Odd(errors.MailboxFull):
        code = "odd"

    answer = answer_to(Odd("full", retry_after_s=2.2))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


def test_our_own_faults_say_nothing_of_themselves() -> None:
    answer = answer_to(errors.Misconfigured("the secret is hunter2"))
    assert (answer.status_code, json.loads(bytes(answer.body))["code"]) == (500, "internal_error")
    assert b"hunter2" not in bytes(answer.body)


def test_a_lost_race_shows_how_it_was_decided() -> None:
    answer = answer_to(errors.AlreadyDecided("denied before", {"approval_id": "ap_1", "state": "denied"}))
    assert json.loads(bytes(answer.body))["approval"] == {"approval_id": "ap_1", "state": "denied"}


def test_a_place_named_by_the_client_is_cut() -> None:
    answer = answer_to(errors.Invalid("wrong", [{"loc": ["body", "k" * 5000], "msg": "no"}]))
    assert len(bytes(answer.body)) < 400


def test_plain_json_passes_as_it_is() -> None:
    value = {"a": [1, -2.5, True, None, "ü 🦊 \u2028"], "b": {"c": 10**90}}
    assert strict_json(json.dumps(value).encode()) == value
    assert strict_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"[1e400]",
        b"1" * 101,
        b'{"a":1,"a":1}',
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
        b"[" * 64 + b"{}" + b"]" * 64,
        b"\xed\xa0\x80",
        b"'a'",
        b"",
    ],
)
def test_what_is_no_plain_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(errors.BadRequest):
        strict_json(body)


def test_texts_do_not_count_as_structure() -> None:
    deep = b"[" * 64 + b'"[[{\\"[{,' + b"," * 200_000 + b"1" * 200 + b'"' + b"]" * 64
    assert strict_json(deep)
    assert strict_json(b"[" + b"0," * (MAX_VALUES - 2) + b"0]")


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * 300_000 + b"0]",
        b"[" + b"0," * 500_000 + b"0]",
        b'{"a":[' + b'"",' * 300_000 + b"0]}",
        b'"' * 1_000_000,
        b'"' + b'\\"' * 500_000,
        b'"' + b"\\" * 999_999,
        b"[" * 1_000_000,
        b"[{" * 300_000,
        b"[1" + b" " * 900_000,
        b"1" * 1_000_000,
    ],
)
def test_whatever_a_megabyte_holds_is_refused_after_few_looks_at_it(body: bytes) -> None:
    with pytest.raises(errors.BadRequest):
        strict_json(body)


def test_a_body_that_never_ends_is_not_waited_for() -> None:
    sent: list[dict[str, Any]] = []

    async def trickle() -> dict[str, Any]:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def unreachable(*_: Any) -> None:
        raise AssertionError("the request must not get through")

    scope = {"type": "http", "method": "POST", "path": "/v1/agents/a/turns", "headers": []}
    asyncio.run(Bodies(unreachable, max_bytes=10_000, read_s=0.05)(scope, trickle, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["code"] == "request_timeout"


def test_a_lone_surrogate_is_told_with_its_place() -> None:
    with pytest.raises(errors.Invalid) as caught:
        strict_json(b'{"a": [{"b": "\\ud83e"}]}')
    assert caught.value.errors == [{"loc": ["body", "a", 0, "b"], "msg": "a lone surrogate is no character"}]
    assert strict_json(b'"\\ud83e\\udd8a"') == "🦊"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "LOCALHOST", "a.localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example", "127.0.0.1.example", "::ffff:10.0.0.1", "2130706433"]
)
def test_addresses_of_others(host: str) -> None:
    assert not is_loopback(host)


def test_without_keys_a_gateway_refuses_to_serve_others() -> None:
    door()
    for settings in ({"host": "0.0.0.0"}, {"host": "192.168.1.5"}, {"served_on": ["0.0.0.0"]}):
        with pytest.raises(errors.Misconfigured, match="loopback"):
            door(**settings)
    keys = json.dumps([{"key": "k" * 16, "sub": "a", "tenant": "t", "scopes": ["turns:read"]}])
    door(host="0.0.0.0", api_keys=SecretStr(keys))


@pytest.mark.parametrize(
    ("argv", "environ", "hosts"),
    [
        (["uvicorn", "gateway.app:app"], {}, []),
        (["uvicorn", "--host", "0.0.0.0", "gateway.app:app"], {}, ["0.0.0.0"]),
        (["uvicorn", "--host=::", "gateway.app:app"], {}, ["::"]),
        (["uvicorn", "gateway.app:app"], {"UVICORN_HOST": "10.1.1.1"}, ["10.1.1.1"]),
        (["gunicorn", "-b", "0.0.0.0:80", "gateway.app:app"], {}, ["0.0.0.0"]),
        (["uvicorn", "gateway.app:app", "--host"], {}, []),
    ],
)
def test_the_address_that_a_server_was_told(argv: list[str], environ: dict[str, str], hosts: list[str]) -> None:
    assert served_hosts(argv, environ) == hosts


async def served_by_uvicorn(argv: list[str], environ: dict[str, str], **options: Any) -> uvicorn.Config:
    """The configuration of a real uvicorn once its app has started."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tune_server(send, argv, environ)
        await send({"type": "lifespan.startup.complete"})

    config = uvicorn.Config(app, **options)
    await LifespanOn(config).startup()
    return config


@pytest.mark.parametrize(
    ("options", "argv", "environ", "ping_s", "stop_s"),
    [
        ({}, ["uvicorn", "gateway.app:app"], {}, 30.0, 10),
        ({"ws_ping_interval": 7.0, "timeout_graceful_shutdown": 3}, ["uvicorn", "gateway.app:app"], {}, 7.0, 3),
        ({}, ["uvicorn", "gateway.app:app", "--ws-ping-interval", "20"], {}, 20.0, 10),
        ({}, ["uvicorn", "--ws-ping-interval=20"], {"UVICORN_TIMEOUT_GRACEFUL_SHUTDOWN": ""}, 20.0, None),
    ],
)
def test_uvicorn_pings_and_stops_as_documented_unless_its_operator_chose(
    options: dict[str, Any], argv: list[str], environ: dict[str, str], ping_s: float, stop_s: int | None
) -> None:
    config = asyncio.run(served_by_uvicorn(argv, environ, **options))
    assert (config.ws_ping_interval, config.timeout_graceful_shutdown) == (ping_s, stop_s)


def test_another_server_is_left_as_it_is() -> None:
    async def send(message: Any) -> None: ...

    tune_server(send, [], {})


@pytest.mark.parametrize(
    "keys",
    [
        "{",
        "{}",
        '[{"key": "short", "sub": "a", "tenant": "t", "scopes": ["admin"]}]',
        '[{"key": "SECRET-SECRET-SECRET", "sub": "a", "tenant": "a b", "scopes": ["admin"]}]',
        '[{"key": "SECRET-SECRET-SECRET", "sub": "a", "tenant": "t", "scopes": ["everything"]}]',
        '[{"key": "SECRET-SECRET-SECRET", "sub": "a", "tenant": "t", "scopes": []}]',
    ],
)
def test_wrong_keys_in_the_settings_are_refused_without_being_shown(keys: str) -> None:
    with pytest.raises(errors.Misconfigured, match="TURNMILL_API_KEYS") as caught:
        door(api_keys=SecretStr(keys))
    assert "SECRET" not in str(caught.value)


def test_event_ids() -> None:
    assert event_id(None) is None
    assert event_id("") is None
    assert event_id(" 42 ") == 42
    assert event_id("9" * 400) == 2**63 - 1
    for wrong in ("0", "00", "-1", "+1", "1.0", "1e3", "²", "one", "1-0", "$"):
        with pytest.raises(errors.BadEventId):
            event_id(wrong)


def test_an_event_is_one_frame_on_one_data_line() -> None:
    ready = stored_frame(1_700_000_000_000_000, "tn_1", '{"kind":"token","turn_id":"tn_1","text":"a\\nb"}')
    lines = as_event(ready).decode().split("\n")
    assert lines[:2] == ["id: 1700000000000000", "event: token"]
    assert json.loads(lines[2].removeprefix("data: "))["text"] == "a\nb"
    assert lines[3:] == ["", ""]


def test_an_event_has_no_character_at_which_a_client_may_break_a_line() -> None:
    body = json.dumps({"kind": "token", "turn_id": "tn_1", "text": "a\x85b\u2028c\u2029d\x0be"}, ensure_ascii=False, separators=(",", ":"))
    event = as_event(stored_frame(1, "tn_1", body)).decode()
    assert len(event.splitlines()) == 4
    assert json.loads(event.splitlines()[2].removeprefix("data: "))["text"] == "a\x85b\u2028c\u2029d\x0be"


def test_only_stored_frames_have_an_id() -> None:
    assert as_event(Frame(0, "tn_1", "gap", "{}")) == b"event: gap\ndata: {}\n\n"
    assert as_event(None).startswith(b":")


@pytest.mark.parametrize(
    ("prefer", "wait_s"),
    [(None, 0), ("", 0), ("wait=5", 5), ("respond-async, wait=100", 60), ("WAIT = 7", 7), ("wait=x", 0), ("await=9", 0)],
)
def test_how_long_a_client_prefers_to_wait(prefer: str | None, wait_s: int) -> None:
    assert _wanted_wait_s(prefer) == wait_s


def test_a_webhook_without_its_secret_is_refused_at_start() -> None:
    scheme = StandardWebhooks("SHOP_SECRET")
    for environ in ({}, {"SHOP_SECRET": " "}, {"SHOP_SECRET": "whsec_"}):
        with pytest.raises(errors.Misconfigured, match="SHOP_SECRET"):
            StandardVerifier(scheme, environ)
    with pytest.raises(errors.Misconfigured, match="no signature scheme"):
        open_hooks({"a": Webhook("a", "agent", object(), "p", "t", lambda _: None)}, {})


def test_only_the_gateway_speaks_http_and_it_speaks_to_the_rest_through_actions() -> None:
    refused = {"redis", "celery", "kombu", "zenoh", "httpx", "workers"}
    for path in Path(gateway.app.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [name.name for name in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {name.partition(".")[0] for name in names} & refused, path
