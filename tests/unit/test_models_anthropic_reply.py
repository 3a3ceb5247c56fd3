"""Answers of the Messages API become the same replies as those of any other server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.core.model import Delta, ModelReply, RequestedCall, Usage
from orchestration.models.anthropic_reply import AnthropicReply
from orchestration.models.error_text import Shown


def events(*documents: dict[str, Any]) -> bytes:
    return b"".join(f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode() for document in documents)


def read(pieces: Iterable[bytes], shown: list[Delta] | None = None) -> ModelReply:
    return AnthropicReply("model 'm'", None if shown is None else shown.append, Shown()).read(pieces)


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


BEGIN = {
    "type": "message_start",
    "message": {"model": "m-1", "usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1}},
}
END = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 20}}
STOP = {"type": "message_stop"}
ANSWER = events(
    BEGIN,
    {"type": "ping"},
    start(0, type="thinking", thinking="", signature=""),
    delta(0, "thinking_delta", thinking="Hm."),
    delta(0, "signature_delta", signature="sig"),
    start(1, type="redacted_thinking", data="xyz"),
    start(2, type="text", text=""),
    delta(2, "text_delta", text="I look"),
    start(3, type="tool_use", id="toolu_1", name="geo", input={}),
    start(4, type="tool_use", id="toolu_2", name="ping", input={}),
    delta(3, "input_json_delta", partial_json='{"q": '),
    delta(4, "input_json_delta", partial_json=""),
    delta(3, "input_json_delta", partial_json='"x"}'),
    {"type": "something_new", "index": 3},
    END,
    STOP,
)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_streamed_answer_is_read_whole(size: int) -> None:
    shown: list[Delta] = []
    reply = read([ANSWER[at : at + size] for at in range(0, len(ANSWER), size)], shown)
    assert reply == ModelReply(
        content="I look",
        tool_calls=(RequestedCall("geo", '{"q": "x"}', "toolu_1"), RequestedCall("ping", "", "toolu_2")),
        thinking="Hm.",
        finish_reason="tool_calls",
        usage=Usage(15, 20, 5),
        model="m-1",
        thinking_blocks=json.dumps(
            [{"type": "thinking", "thinking": "Hm.", "signature": "sig"}, {"type": "redacted_thinking", "data": "xyz"}]
        ),
    )
    assert shown == [Delta(thinking="Hm."), Delta(text="I look")]


def test_a_whole_answer_is_read_too() -> None:
    content = [{"type": "text", "text": "4"}, {"type": "tool_use", "id": "a", "name": "geo", "input": {"q": "é"}}]
    document = {
        "type": "message",
        "model": "m-1",
        "content": content,
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 3, "output_tokens": 1},
    }
    reply = read([json.dumps(document).encode()])
    assert (reply.content, reply.finish_reason, reply.usage) == ("4", "length", Usage(3, 1))
    assert reply.tool_calls == (RequestedCall("geo", '{"q": "é"}', "a"),)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("refusal", "content_filter"),
        ("model_context_window_exceeded", "length"),
    ],
)
def test_why_it_stopped_is_told_in_our_words(reason: str, finish: str) -> None:
    body = events(BEGIN, start(0, type="text", text="x"), {"type": "message_delta", "delta": {"stop_reason": reason}}, STOP)
    assert read([body]).finish_reason == finish


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (events(BEGIN, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}), "unavailable"),
        (events(BEGIN, {"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}), "rate_limited"),
        (b'{"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}}', "context_overflow"),
        (events(BEGIN, start(0, type="text", text=""), delta(0, "text_delta", text="The answer is fo")), "truncated"),
        (events(BEGIN) + b"event: content_block_delta\ndata: {cut\n\n", "protocol"),
        (events(BEGIN, delta(7, "text_delta", text="x")), "protocol"),
        (events(BEGIN, *(start(n, type="tool_use", id=str(n), name="geo") for n in range(500))), "protocol"),
        (b"<html>", "protocol"),
        (b"{}", "protocol"),
        (b"", "truncated"),
    ],
)
def test_what_is_no_answer_is_never_taken_for_one(body: bytes, kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        read([body])
    assert caught.value.kind == kind


def test_an_answer_is_whole_once_the_reason_for_its_end_is_there() -> None:
    assert read([events(BEGIN, start(0, type="text", text="x"), END)]).content == "x"
