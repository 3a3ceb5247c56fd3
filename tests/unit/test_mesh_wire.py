"""The bytes of a tool query and its reply: what goes out, what is understood, and what a hostile peer cannot do."""

from __future__ import annotations

import json
import math

import pytest

from orchestration.core.tool import Outcome
from orchestration.mesh import strict_json, wire
from orchestration.mesh.wire import Attachment

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_arguments_travel_as_the_contract_writes_them() -> None:
    sent = wire.encode_parameters(
        {"a": 2, "text": "a;b=c d&é/?", "flag": True, "none": None, "lst": [1, 2], "obj": {"k": 1}, "f": 1.5, "e": ""}
    )
    assert sent == "a=2;text=a%3Bb%3Dc%20d%26%C3%A9/%3F;flag=true;lst=%5B1%2C2%5D;obj=%7B%22k%22%3A1%7D;f=1.5;e="


@pytest.mark.parametrize("text", ["", " ", "a=b;c=d", "%3B", "+", "?#$*&|", "\n\x00\t", "日本 é 🚀", "'\"\\", "x" * 100_000, "half \ud83d"])
def test_any_text_arrives_as_it_was_sent(text: str) -> None:
    expected = strict_json.clean_text(text)
    assert wire.decode_parameters(wire.encode_parameters({"a": text, f"n{text[:50]}": "b"})) == {"a": expected, f"n{expected[:50]}": "b"}


def test_a_token_alone_travels_bare_and_more_travels_as_json() -> None:
    assert wire.encode_attachment(Attachment()) is None
    assert wire.encode_attachment(Attachment(token="tok-1")) == b"tok-1"
    full = Attachment(token="t", cid="c-1", traceparent=TRACEPARENT, idem="i", exp=1700000000000)
    assert json.loads(wire.encode_attachment(full) or b"") == {
        "tok": "t",
        "cid": "c-1",
        "tp": TRACEPARENT,
        "idem": "i",
        "exp": 1700000000000,
    }
    assert wire.decode_attachment(wire.encode_attachment(full)) == full


def test_idempotency_key_and_expiry_never_travel_without_a_correlation_id() -> None:
    assert wire.encode_attachment(Attachment(idem="i", exp=1)) is None
    assert wire.encode_attachment(Attachment(token="t", idem="i", exp=1)) == b"t"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, Attachment()),
        (b"", Attachment()),
        (b"tok-1", Attachment(token="tok-1")),
        (b'{"foo": 1}', Attachment(token='{"foo": 1}')),
        (b'{"cid": "c", "later": [1]}', Attachment(cid="c")),
        (b'{"cid": "quote\\"", "tok": "t"}', Attachment(token="t")),
        (b'{"cid": "c", "tp": "nonsense", "tok": 5}', Attachment(cid="c")),
        (b"{broken", Attachment(token="{broken")),
        (b"\xff\xfe", Attachment()),
    ],
)
def test_attachments_of_peers_are_read_leniently(data: bytes | None, expected: Attachment) -> None:
    assert wire.decode_attachment(data) == expected


@pytest.mark.parametrize("parts", [{"idem": 5}, {"idem": "x" * 300}, {"exp": "soon"}, {"exp": True}])
def test_a_promise_that_cannot_be_kept_is_refused(parts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"idem|exp"):
        wire.decode_attachment(json.dumps({"cid": "c", **parts}).encode())


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b"42", 42),
        (b'"IN"', "IN"),
        (b"null", None),
        (b"", None),
        (b'{"x": NaN, "y": -Infinity, "z": 1e999}', {"x": None, "y": None, "z": None}),
        (b'"x\\ud83dy"', "x\ufffdy"),
        (b'{"a\\ud83d": 1}', {"a\ufffd": 1}),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b'{"error": null, "code": 1}', {"error": None, "code": 1}),
        (b'{"__istos_error": false, "error": "e", "code": "c", "message": "m"}', {"error": "e", "code": "c", "message": "m"}),
    ],
)
def test_a_reply_is_strict_json_in_the_end(payload: bytes, value: object) -> None:
    answer = wire.decode_reply(payload, "zenoh/bytes")
    assert (answer.outcome, answer.value) == (Outcome.COMPLETED, value)
    json.dumps(answer.value, allow_nan=False).encode()


@pytest.mark.parametrize("payload", [b"not json", b"\xff\xfe\x00", b"[" * 5000 + b"]" * 5000, b'{"a":' * 300 + b"1" + b"}" * 300])
def test_a_reply_that_cannot_be_read_is_a_clear_failure(payload: bytes) -> None:
    answer = wire.decode_reply(payload, "zenoh/bytes")
    assert (answer.outcome, answer.code) == (Outcome.FAILED, "bad_reply")


def test_a_number_of_ten_thousand_digits_does_no_harm() -> None:
    answer = wire.decode_reply(b"9" * 10_000, "")
    assert answer.outcome is Outcome.COMPLETED
    json.dumps(answer.value)


def test_binary_replies_are_described() -> None:
    for kind in ("image/png", "application/octet-stream", "audio/mpeg"):
        answer = wire.decode_reply(b"\x89" * 204_800, kind)
        assert answer.outcome is Outcome.COMPLETED
        assert answer.value["type"] == kind
        assert answer.value["bytes"] == 204_800
        assert len(json.dumps(answer.value)) < 200


def test_plain_text_that_says_so_is_text() -> None:
    assert wire.decode_reply(b"hello there", "text/plain").value == "hello there"


@pytest.mark.parametrize(
    ("reply", "outcome", "code"),
    [
        ({"__istos_error": True, "error": "conflict", "code": "conflict", "message": "m"}, Outcome.FAILED, "conflict"),
        ({"error": "own", "code": "own", "message": "m"}, Outcome.FAILED, "own"),
        ({"__istos_error": True}, Outcome.FAILED, "internal_error"),
        ({"__istos_error": True, "code": 5, "message": None, "error": "x"}, Outcome.FAILED, "x"),
        ({"__istos_error": True, "code": "rate_limit_exceeded", "message": "m"}, Outcome.NOT_RUN, "rate_limit_exceeded"),
        ({"__istos_error": True, "code": "expired", "message": "m"}, Outcome.NOT_RUN, "expired"),
        ({"__istos_error": True, "code": "unknown_outcome", "message": "m"}, Outcome.UNKNOWN, "unknown_outcome"),
    ],
)
def test_errors_say_what_is_known(reply: dict[str, object], outcome: Outcome, code: str) -> None:
    answer = wire.decode_reply(json.dumps(reply).encode(), "zenoh/bytes")
    assert (answer.outcome, answer.code) == (outcome, code)
    assert answer.message


def test_a_result_that_looks_like_an_error_arrives_as_a_result() -> None:
    result = {"error": "none", "code": "x", "message": "all fine"}
    answer = wire.decode_reply(wire.encode_result(result))
    assert (answer.outcome, answer.value) == (Outcome.COMPLETED, result)


def test_results_are_written_strictly() -> None:
    assert wire.encode_result({"a": math.nan, "b": "\ud83d", 3: [math.inf]}) == '{"a":null,"b":"\ufffd","3":[null]}'.encode()


@pytest.mark.parametrize("key", ["billing/refund", "a.b", "étage/1", "x"])
def test_plain_keys_are_tool_keys(key: str) -> None:
    assert wire.is_tool_key(key)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a/*", "**", "a/$*", "a?x=1", "a b", ".istos/health", ".istos", "x" * 2000, "a\ud83d"]
)
def test_no_other_key_is_ever_asked(key: str) -> None:
    assert not wire.is_tool_key(key)
