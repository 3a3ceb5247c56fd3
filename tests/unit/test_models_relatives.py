"""Ways of bending the wire near to those that were recorded, on both wires: what comes out is right, or an error, never silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelReply
from orchestration.models.anthropic_reply import AnthropicReply
from orchestration.models.chat_reply import ChatReply
from orchestration.models.error_text import Shown
from tests.fixtures.wire.server import chunk, sse

DONE = b"data: [DONE]\n\n"


def read(wire: str, pieces: Iterable[bytes]) -> ModelReply:
    if wire == "chat":
        return ChatReply("model 'm'", ["get", "ping"], None, Shown()).read(pieces)
    return AnthropicReply("model 'm'", None, Shown()).read(pieces)


def data(*documents: Any) -> bytes:
    """Events without a last one."""
    return b"".join(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents)


def calls(*pieces: dict[str, Any]) -> bytes:
    return sse(*(chunk({"tool_calls": [piece]}) for piece in pieces), chunk({}, "tool_calls"))


def call(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"function": function, **more}


def events(*documents: dict[str, Any]) -> bytes:
    return b"".join(f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode() for document in documents)


def block(index: Any, **start: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": start}


def use(index: Any, id: str, **more: Any) -> dict[str, Any]:
    return block(index, type="tool_use", id=id, name="get", **{"input": {}, **more})


def piece(index: Any, given: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta", "partial_json": given}}


def text(index: Any, given: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": given}}


BEGIN = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}}
STOP = {"type": "message_stop"}


def end(reason: str | None = "end_turn", **usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}


#: (wire, what is odd, bytes, text, calls, tokens)
ANSWERS: list[tuple[str, str, bytes, str, list[str], tuple[int, int]]] = [
    (
        "chat",
        "line ends of three kinds",
        data(chunk({"content": "é"})).replace(b"\n\n", b"\r\n\n") + data(chunk({}, "stop")).replace(b"\n\n", b"\n\r\n") + DONE,
        "é",
        [],
        (0, 0),
    ),
    (
        "chat",
        "a comment inside an event",
        b"data: " + json.dumps(chunk({"content": "a"}, "stop")).encode() + b"\n: warm\n\n" + DONE,
        "a",
        [],
        (0, 0),
    ),
    (
        "chat",
        "one document over several data lines",
        b'data: {"choices": [{\ndata: "delta": {"content": "a"},\ndata: "finish_reason": "stop"}]}\n\n' + DONE,
        "a",
        [],
        (0, 0),
    ),
    ("chat", "the end in lower case", data(chunk({"content": "a"}, "stop")) + b"data: [done]\n\n", "a", [], (0, 0)),
    ("chat", "the end as a JSON string", data(chunk({"content": "a"}, "stop")) + b'data: "[DONE]"\n\n', "a", [], (0, 0)),
    (
        "chat",
        "a document a line, without SSE",
        b"\n".join(json.dumps(one).encode() for one in (chunk({"content": "a"}), chunk({"content": "b"}, "stop"))),
        "ab",
        [],
        (0, 0),
    ),
    ("chat", "chunks in an array", json.dumps([chunk({"content": "a"}), chunk({"content": "b"}, "stop")]).encode(), "ab", [], (0, 0)),
    ("chat", "three megabytes in one line", sse(chunk({"content": "x" * 3_000_000}, "stop")), "x" * 3_000_000, [], (0, 0)),
    ("chat", "a number as content", sse(chunk({"content": 42}), chunk({}, "stop")), "42", [], (0, 0)),
    (
        "chat",
        "null everywhere",
        sse(
            {"choices": None},
            {"choices": [{"index": 0, "delta": None}]},
            chunk({"content": None}),
            chunk({"content": "a"}, "stop"),
            chunk({"content": None}, "stop"),
        ),
        "a",
        [],
        (0, 0),
    ),
    (
        "chat",
        "text in place of a delta",
        sse({"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "stop"}]}),
        "ab",
        [],
        (0, 0),
    ),
    (
        "chat",
        "another choice first",
        sse({"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}),
        "a",
        [],
        (0, 0),
    ),
    ("chat", "text after the reason for its end", sse(chunk({"content": "a"}, "stop"), chunk({"content": "b"})), "ab", [], (0, 0)),
    (
        "chat",
        "usage first, growing, as text",
        sse(
            {"choices": [], "usage": {"prompt_tokens": 5}},
            chunk({"content": "a"}, usage={"prompt_tokens": 5, "completion_tokens": 1}),
            chunk({}, "stop", usage=None),
            {"choices": [], "usage": {"prompt_tokens": "5", "completion_tokens": "3"}},
        ),
        "a",
        [],
        (5, 3),
    ),
    ("chat", "an empty error beside content", sse(chunk({"content": "a"}, error={}), chunk({}, "stop", error=None)), "a", [], (0, 0)),
    ("chat", "an upper-case reason", sse(chunk({"content": "a"}, "STOP")), "a", [], (0, 0)),
    (
        "chat",
        "arguments before the name",
        calls(call(None, '{"x":', index=0, id="a"), call("get", None, index=0), call(None, "1}", index=0)),
        "",
        ['{"x":1}'],
        (0, 0),
    ),
    (
        "chat",
        "the second call first",
        calls(call("get", '{"x":2}', index=1, id="b"), call("get", '{"x":1}', index=0, id="a")),
        "",
        ['{"x":2}', '{"x":1}'],
        (0, 0),
    ),
    (
        "chat",
        "one id for two calls, without index",
        calls(call("get", '{"x":1}', id="a"), call("get", '{"x":2}', id="a")),
        "",
        ['{"x":1}', '{"x":2}'],
        (0, 0),
    ),
    (
        "chat",
        "the same with objects",
        calls(call("get", {"x": 1}, id="a"), call("get", {"x": 2}, id="a")),
        "",
        ['{"x": 1}', '{"x": 2}'],
        (0, 0),
    ),
    (
        "chat",
        "a whole call once more at its end",
        calls(call("get", '{"x":', index=0, id="a"), call(None, "1}", index=0), call("get", '{"x": 1}', index=0, id="a")),
        "",
        ['{"x":1}'],
        (0, 0),
    ),
    ("chat", "an index below zero", calls(call("get", '{"x":1}', index=-1, id="a")), "", ['{"x":1}'], (0, 0)),
    (
        "chat",
        "an index with a fraction",
        calls(call("get", '{"x":', index=0.0, id="a"), call(None, "1}", index=0.0)),
        "",
        ['{"x":1}'],
        (0, 0),
    ),
    ("chat", "a function that is null", calls({"index": 0, "id": "a", "function": None}, call("get", "{}", index=0)), "", ["{}"], (0, 0)),
    ("chat", "calls as an object", sse(chunk({"tool_calls": call("get", "{}", id="a")}), chunk({}, "tool_calls")), "", ["{}"], (0, 0)),
    (
        "messages",
        "CRLF, comments, pings",
        b": warm\r\n\r\n"
        + events(BEGIN, {"type": "ping"}, block(0, type="text", text=""), text(0, "é"), end(output_tokens=5), STOP).replace(b"\n", b"\r\n"),
        "é",
        [],
        (10, 5),
    ),
    (
        "messages",
        "no event lines",
        events(BEGIN, block(0, type="text", text="a"), end(output_tokens=5), STOP).replace(b"event:", b":"),
        "a",
        [],
        (10, 5),
    ),
    (
        "messages",
        "no types, only event lines",
        b'event: message_start\ndata: {"message": {}}\n\n'
        b'event: content_block_start\ndata: {"content_block": {"type": "text", "text": "a"}}\n\n'
        b"event: message_stop\ndata: {}\n\n",
        "a",
        [],
        (0, 0),
    ),
    ("messages", "closed as chat is", events(BEGIN, block(0, type="text", text="a"), end(output_tokens=5)) + DONE, "a", [], (10, 5)),
    (
        "messages",
        "one index for all blocks",
        events(
            BEGIN,
            block(0, type="text", text="a"),
            use(0, "1"),
            piece(0, '{"x":1}'),
            use(0, "2"),
            piece(0, '{"x":2}'),
            end("tool_use"),
            STOP,
        ),
        "a",
        ['{"x":1}', '{"x":2}'],
        (10, 1),
    ),
    (
        "messages",
        "interleaved blocks, the later one first",
        events(BEGIN, use(1, "2"), use(0, "1"), piece(1, '{"x":2}'), piece(0, '{"x":'), piece(0, "1}"), end("tool_use"), STOP),
        "",
        ['{"x":1}', '{"x":2}'],
        (10, 1),
    ),
    (
        "messages",
        "an index as text",
        events(BEGIN, use("0", "1"), use("1", "2"), piece("0", '{"x":1}'), piece("1", '{"x":2}'), end("tool_use"), STOP),
        "",
        ['{"x":1}', '{"x":2}'],
        (10, 1),
    ),
    (
        "messages",
        "one id for two calls",
        events(BEGIN, use(0, "1"), piece(0, '{"x":1}'), use(1, "1"), piece(1, '{"x":2}'), end("tool_use"), STOP),
        "",
        ['{"x":1}', '{"x":2}'],
        (10, 1),
    ),
    (
        "messages",
        "input as an object in a piece",
        events(BEGIN, use(0, "1"), piece(0, {"x": 1}), end("tool_use"), STOP),
        "",
        ['{"x": 1}'],
        (10, 1),
    ),
    (
        "messages",
        "input at the start and in pieces",
        events(BEGIN, use(0, "1", input={"x": 1}), piece(0, '{"x":1}'), end("tool_use"), STOP),
        "",
        ['{"x":1}'],
        (10, 1),
    ),
    (
        "messages",
        "end_turn although tools are asked for",
        events(BEGIN, use(0, "1"), piece(0, '{"x":1}'), end("end_turn"), STOP),
        "",
        ['{"x":1}'],
        (10, 1),
    ),
    (
        "messages",
        "counts that go back to zero",
        events(BEGIN, block(0, type="text", text="a"), end(input_tokens=0, output_tokens=7), STOP),
        "a",
        [],
        (10, 7),
    ),
    (
        "messages",
        "text that is null",
        events(BEGIN, block(0, type="text", text=None), text(0, None), text(0, "a"), end(), STOP),
        "a",
        [],
        (10, 1),
    ),
    (
        "messages",
        "blocks and pieces of kinds to come",
        events(
            BEGIN,
            block(0, type="new"),
            {"type": "content_block_delta", "index": 0, "delta": {"type": "new"}},
            block(1, type="text", text="a"),
            end(),
            STOP,
        ),
        "a",
        [],
        (10, 1),
    ),
    ("messages", "content as text", b'{"content": "a", "stop_reason": "end_turn"}', "a", [], (0, 0)),
]


@pytest.mark.parametrize(("wire", "odd", "body", "said", "arguments", "tokens"), ANSWERS, ids=[f"{one[0]}: {one[1]}" for one in ANSWERS])
def test_an_odd_answer_is_read(wire: str, odd: str, body: bytes, said: str, arguments: list[str], tokens: tuple[int, int]) -> None:
    cuts: list[Callable[[], list[bytes]]] = [lambda: [body]]
    if len(body) < 10_000:
        cuts += [lambda: [body[at : at + 1] for at in range(len(body))], lambda: [body[:7], b"", body[7:]]]
    for cut in cuts:
        reply = read(wire, cut())
        assert reply.content == said and [one.arguments for one in reply.tool_calls] == arguments
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == tokens
        assert reply.finish_reason == ("tool_calls" if arguments else "stop")


FAULTS: list[tuple[str, str, bytes, str, bool]] = [
    ("chat", "a proxy's words", b"upstream connect error or disconnect/reset before headers", "truncated", True),
    ("chat", "an error of another shape", b'{"code": 429, "message": "too many"}', "rate_limited", True),
    ("chat", "a refusal of another shape", b'{"detail": "Not authenticated", "status": 401}', "auth", False),
    ("chat", "another shape in a stream", data({"message": "queue full", "code": 503}), "unavailable", True),
    (
        "chat",
        "an error in a choice",
        sse({"choices": [{"delta": {}, "finish_reason": "error", "error": {"code": 502, "message": "gone"}}]}),
        "unavailable",
        True,
    ),
    ("chat", "choices without end", sse({"choices": []}, {"choices": []}), "protocol", True),
    ("chat", "lines, and the last one cut", json.dumps(chunk({"content": "a"})).encode() + b'\n{"choices": [{"del', "protocol", True),
    ("chat", "lines without a reason for the end", b"\n".join([json.dumps(chunk({"content": "a"})).encode()] * 2), "truncated", True),
    ("chat", "white space", b"\n\n \r\n", "truncated", True),
    (
        "messages",
        "an error event without a type",
        events(BEGIN) + b'event: error\ndata: {"error": {"type": "rate_limit_error", "message": "slow"}}\n\n',
        "rate_limited",
        True,
    ),
    ("messages", "it asks for tools and names none", events(BEGIN, end("tool_use"), STOP), "protocol", True),
    ("messages", "a call without a name", events(BEGIN, block(0, type="tool_use", id="1"), end("tool_use"), STOP), "protocol", True),
    ("messages", "an answer of the other wire", b'{"choices": [{"message": {"content": "hi"}}]}', "protocol", True),
    (
        "messages",
        "cut in an event",
        events(BEGIN, block(0, type="text", text="a")) + b'event: message_delta\ndata: {"del',
        "truncated",
        True,
    ),
]


@pytest.mark.parametrize(("wire", "odd", "body", "kind", "retryable"), FAULTS, ids=[f"{one[0]}: {one[1]}" for one in FAULTS])
def test_what_is_no_answer_is_an_error(wire: str, odd: str, body: bytes, kind: str, retryable: bool) -> None:
    for pieces in ([body], [body[at : at + 1] for at in range(len(body))]):
        with pytest.raises(ModelError) as caught:
            read(wire, pieces)
        assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
