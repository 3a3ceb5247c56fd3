"""What stands between a model and its server: compression, pages, refusals of every number, resets. The same on both wires."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from email.utils import formatdate
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.models import AnthropicModel, OpenAIChatModel
from orchestration.models.connection import pool
from tests.fixtures.wire.server import Answer, WireServer, chunk, sse

USER = {"role": "user", "content": "hello"}
CHAT = sse(chunk({"content": "Hé"}), chunk({"content": "llo"}, "stop"))
MESSAGES = b"".join(
    f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode()
    for one in (
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hé"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "llo"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    )
)


class Wire:
    def __init__(self, stack: ExitStack, name: str) -> None:
        self._stack = stack
        self.name = name
        self.body = CHAT if name == "chat" else MESSAGES
        self.server: WireServer | None = None

    def ask(self, answer: Answer) -> str:
        self.server = self._stack.enter_context(WireServer([answer]).running())
        model: Any = OpenAIChatModel if self.name == "chat" else AnthropicModel
        said: str = model("m", base_url=self.server.url, api_key="k").complete([USER], sink=lambda _: None).content
        return said

    def fault(self, answer: Answer) -> ModelError:
        with pytest.raises(ModelError) as caught:
            self.ask(answer)
        return caught.value


@pytest.fixture(params=["chat", "messages"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(stack, request.param)
    pool.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_that_was_compressed_unasked_is_read(wire: Wire, encoding: str) -> None:
    packed = gzip.compress(wire.body) if encoding == "gzip" else zlib.compress(wire.body)
    pieces = [packed[at : at + 9] for at in range(0, len(packed), 9)]
    assert wire.ask(Answer(pieces, headers={"content-type": "text/event-stream", "content-encoding": encoding})) == "Héllo"
    assert wire.server is not None and wire.server.asked[0].headers["accept-encoding"] == "identity"


def test_compression_that_is_broken_is_unreadable(wire: Wire) -> None:
    error = wire.fault(Answer([wire.body], headers={"content-encoding": "gzip"}))
    assert (error.kind, error.retryable) == ("protocol", True)


def test_a_compressed_refusal_is_read_too(wire: Wire) -> None:
    body = gzip.compress(json.dumps({"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}).encode())
    error = wire.fault(Answer([body], 400, {"content-encoding": "gzip"}))
    assert error.kind == "context_overflow"


@pytest.mark.parametrize("content_type", ["text/html", "text/event-stream", "application/json"])
def test_a_page_with_status_200_is_no_answer(wire: Wire, content_type: str) -> None:
    page = b"\n<!DOCTYPE html><html><body><h1>502 Bad Gateway</h1></body></html>"
    error = wire.fault(Answer([page], headers={"content-type": content_type}))
    assert (error.kind, error.retryable) == ("protocol", True) and "502" not in str(error)


@pytest.mark.parametrize("body", [b"", b": warm\n\n", b"\r\n"])
def test_an_empty_answer_with_status_200_may_be_tried_again(wire: Wire, body: bytes) -> None:
    error = wire.fault(Answer([body]))
    assert (error.kind, error.retryable) == ("truncated", True)


@pytest.mark.parametrize("at", [0, 60, 150])
def test_a_reset_in_the_answer_may_be_tried_again(wire: Wire, at: int) -> None:
    error = wire.fault(Answer([wire.body[:at]], reset=True))
    assert error.kind in ("truncated", "unavailable") and error.retryable


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, "bad_request", False),
        (401, "auth", False),
        (402, "quota", False),
        (403, "auth", False),
        (404, "bad_request", False),
        (405, "bad_request", False),
        (408, "unavailable", True),
        (409, "unavailable", True),
        (413, "context_overflow", False),
        (415, "bad_request", False),
        (422, "bad_request", False),
        (423, "unavailable", True),
        (425, "unavailable", True),
        (429, "rate_limited", True),
        (499, "unavailable", True),
        (500, "unavailable", True),
        (501, "unavailable", False),
        (502, "unavailable", True),
        (503, "unavailable", True),
        (504, "unavailable", True),
        (520, "unavailable", True),
        (529, "unavailable", True),
        (599, "unavailable", True),
    ],
)
def test_every_refusal_has_its_kind_whatever_its_body(wire: Wire, status: int, kind: str, retryable: bool) -> None:
    for body in (b"", b"<html>no</html>", b'{"error": null}', b"\xff\xfe"):
        error = wire.fault(Answer([body], status, {"content-type": "text/html"}))
        assert (error.kind, error.retryable, error.status) == (kind, retryable, status), body


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("2.5", 2.5, 2.5),
        ("0", 0.0, 0.0),
        (" 7 ", 7.0, 7.0),
        ("-3", None, None),
        ("1e999", None, None),
        ("", None, None),
        ("later", None, None),
        ("@30", 1.0, 31.0),
        ("@-30", 0.0, 0.0),
    ],
)
def test_the_pause_that_is_asked_for_is_read(wire: Wire, value: str, least: float | None, most: float | None) -> None:
    # a date is measured against the answer's own; without one (this server sends it) against the clock
    asked = formatdate(time.time() + float(value[1:]), usegmt=True) if value.startswith("@") else value
    for status in (429, 503, 529):
        pause = wire.fault(Answer([], status, {"retry-after": asked})).retry_after_s
        assert pause == least if least is None or least == most else least <= (pause or 0.0) <= (most or 0.0)
