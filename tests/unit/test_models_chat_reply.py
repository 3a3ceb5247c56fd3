"""What compatible servers send becomes the same reply, however their bytes are cut and whatever they leave out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.core.model import Delta, ModelReply, Usage
from orchestration.models.chat_reply import ChatReply
from orchestration.models.error_text import Shown
from orchestration.models.faults import fault_of_answer
from tests.fixtures.wire.cases import WireCase, check_reply, load_cases
from tests.fixtures.wire.server import chunk, sse

CASES = load_cases()


def read(pieces: Iterable[bytes], tools: Iterable[str] = (), shown: list[Delta] | None = None) -> ModelReply:
    return ChatReply("model 'm'", list(tools), None if shown is None else shown.append, Shown()).read(pieces)


def fault(*pieces: bytes) -> tuple[str, bool]:
    with pytest.raises(ModelError) as caught:
        read(pieces)
    return str(caught.value.kind), caught.value.retryable


def answer_of(case: WireCase, pieces: Iterable[bytes]) -> ModelReply:
    if case.status != 200:
        raise fault_of_answer("model 'm'", case.status, case.headers, b"".join(pieces), Shown())
    return read(pieces, case.tools)


def check(case: WireCase, pieces: Iterable[bytes]) -> None:
    wanted = case.expect.get("error")
    if not wanted:
        check_reply(case, answer_of(case, pieces))
        return
    with pytest.raises(ModelError) as caught:
        answer_of(case, pieces)
    assert caught.value.kind == wanted["class"]
    assert caught.value.retryable is wanted["retryable"]
    assert caught.value.retry_after_s == wanted.get("retry_after_s")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id} {case.title}")
class TestEveryRecordedAnswer:
    def test_comes_out_as_expected(self, case: WireCase) -> None:
        check(case, [case.body])

    def test_may_be_cut_after_every_byte(self, case: WireCase) -> None:
        check(case, [case.body[at : at + 1] for at in range(len(case.body))])

    def test_may_be_cut_in_two_anywhere(self, case: WireCase) -> None:
        for at in range(0, len(case.body), 7):
            check(case, [case.body[:at], case.body[at:]])

    @pytest.mark.parametrize("ends", [b"\r\n", b"\r"])
    def test_may_use_other_line_ends(self, case: WireCase, ends: bytes) -> None:
        body = case.body.replace(b"\r\n", b"\n").replace(b"\n", ends)
        check(case, [body[at : at + 5] for at in range(0, len(body), 5)])

    def test_may_begin_with_a_byte_order_mark_and_blank_lines(self, case: WireCase) -> None:
        check(case, [b"\xef", b"\xbb", b"\xbf\n", b"\n" + case.body])


def call(index: Any = None, id: Any = None, name: str | None = None, arguments: Any = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {key: value for key, value in (("index", index), ("id", id)) if value is not None} | {"function": function}


def calls(*chunks: list[dict[str, Any]], tools: Iterable[str] = ("get_weather", "get_time", "ping")) -> list[tuple[str, str]]:
    body = sse(*(chunk({"tool_calls": pieces}) for pieces in chunks), chunk({}, "tool_calls"))
    return [(found.name, found.arguments) for found in read([body], tools).tool_calls]


PARIS, OSLO = '{"city": "Paris"}', '{"city": "Oslo"}'
BOTH = [("get_weather", PARIS), ("get_weather", OSLO)]


@pytest.mark.parametrize(
    ("what", "chunks", "expected"),
    [
        ("every call under index 0, with ids", [[call(0, "a", "get_weather", PARIS)], [call(0, "b", "get_weather", OSLO)]], BOTH),
        ("every call under index 0, without ids", [[call(0, "", "get_weather", PARIS)], [call(0, "", "get_weather", OSLO)]], BOTH),
        ("no index, no id, one chunk", [[call(None, None, "get_weather", PARIS), call(None, None, "get_weather", OSLO)]], BOTH),
        ("no index, no id, two chunks", [[call(None, None, "get_weather", PARIS)], [call(None, None, "get_weather", OSLO)]], BOTH),
        ("one made-up id for both", [[call(0, "x", "get_weather", PARIS), call(1, "x", "get_weather", OSLO)]], BOTH),
        ("one made-up id, no index", [[call(None, "x", "get_weather", PARIS), call(None, "x", "get_weather", OSLO)]], BOTH),
        ("index as text", [[call("0", "a", "get_weather", PARIS)], [call("1", "b", "get_weather", OSLO)]], BOTH),
        ("index begins at 1", [[call(1, "a", "get_weather", "")], [call(1, None, None, PARIS)]], BOTH[:1]),
        ("a new id for every piece", [[call(0, "a", "get_weather", '{"city": ')], [call(0, "b", None, '"Paris"}')]], BOTH[:1]),
        (
            "id and name repeated with every piece",
            [[call(0, "a", "get_weather", '{"city": ')], [call(0, "a", "get_weather", '"Paris"}')], [call(0, "a", "get_weather", "")]],
            BOTH[:1],
        ),
        ("name repeated, no id", [[call(0, None, "get_weather", PARIS)], [call(0, None, "get_weather", "")]], BOTH[:1]),
        ("name grows", [[call(0, "a", "get_")], [call(0, "a", "get_weather", PARIS)]], BOTH[:1]),
        ("name in pieces, no index", [[call(None, "a", "get_wea")], [call(None, None, "ther", PARIS)]], BOTH[:1]),
        ("index runs on, id stays", [[call(0, "a", "get_weather", '{"city": ')], [call(1, "a", None, '"Paris"}')]], BOTH[:1]),
        ("two calls without arguments", [[call(None, None, "ping"), call(None, None, "ping")]], [("ping", ""), ("ping", "")]),
        ("an empty piece at the end", [[call(0, "a", "get_weather", PARIS)], [call(1, "", "", "")]], BOTH[:1]),
        (
            "an escaped half character in each piece",
            [[call(0, "a", "ping", '{"x": "\ud83d')], [call(0, None, None, '\ude00"}')]],
            [("ping", '{"x": "😀"}')],
        ),
    ],
)
def test_calls_are_told_apart(what: str, chunks: list[list[dict[str, Any]]], expected: list[tuple[str, str]]) -> None:
    assert calls(*chunks) == expected


def test_a_call_without_a_name_is_unreadable_and_calls_without_end_are_stopped() -> None:
    assert fault(sse(chunk({"tool_calls": [call(0, "a", None, "{}")]}), chunk({}, "tool_calls"))) == ("protocol", True)
    assert fault(sse(*(chunk({"tool_calls": [call(n, f"c{n}", "ping", "{}")]}) for n in range(200)))) == ("protocol", True)


def test_pieces_reach_the_sink_as_they_come_and_make_the_reply() -> None:
    shown: list[Delta] = []
    reply = read([sse(chunk({"reasoning": "Hm. "}), chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop"))], shown=shown)
    assert shown == [Delta(thinking="Hm. "), Delta(text="Hel"), Delta(text="lo")]
    assert (reply.content, reply.thinking) == ("Hello", "Hm. ")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_thinking_in_tags_is_no_part_of_the_answer(size: int) -> None:
    text = "\n<think>Two <b>and</b> two.</think>\n\n4 < 5, not <think>"
    reply = read([sse(*(chunk({"content": text[at : at + size]}) for at in range(0, len(text), size)), chunk({}, "stop"))])
    assert (reply.content, reply.thinking) == ("4 < 5, not <think>", "Two <b>and</b> two.")


def test_an_answer_that_only_looks_like_a_tag_stays_whole() -> None:
    reply = read([sse(chunk({"content": "  <th"}), chunk({"content": "ead> is a tag"}, "stop"))])
    assert reply.content == "  <thead> is a tag"


def test_halves_of_a_character_are_joined_and_lone_ones_replaced() -> None:
    shown: list[Delta] = []
    body = sse(chunk({"content": "a\ud83d"}), chunk({"content": "\ude00b\ud83d"}), chunk({"content": ""}, "stop"))
    assert read([body], shown=shown).content == "a😀b\ufffd"
    assert "".join(delta.text for delta in shown) == "a😀b\ufffd"


def test_content_in_parts_and_refusals_are_read() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes"}]
    reply = read([sse(chunk({"content": parts}, "stop"))])
    assert (reply.content, reply.thinking) == ("Yes", "Hm.")
    refused = read([sse(chunk({"refusal": "I will not."}, "stop"))])
    assert (refused.content, refused.finish_reason) == ("I will not.", "content_filter")


def test_tokens_are_counted_under_any_name() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert read([sse(chunk({"content": "x"}, "stop", usage=usage))]).usage == Usage(9, 4, 5, 2)
    assert read([sse(chunk({"content": "x"}, "stop", usage={"input_tokens": 3, "output_tokens": None}))]).usage == Usage(3, 0)
    assert read([sse(chunk({"content": "x"}, "stop", usage="many"))]).usage == Usage()
    assert read([sse(chunk({"content": "x"}, "stop", usage={"prompt_tokens": 10**400, "completion_tokens": -1}))]).usage.output_tokens == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "truncated"),
        (b"data: [DONE]\n\n", "protocol"),
        (b'{"ok": true}', "protocol"),
        (b'{"choices": [{"mess', "protocol"),
        (b"<html>Please log in</html>", "protocol"),
        (b"data: 7\n\n", "protocol"),
        (b": waiting\n\n: waiting\n\n", "truncated"),
        (b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: {"choi', "truncated"),
        (sse(chunk({}, "error")), "unavailable"),
        (sse(chunk({}, "tool_calls")), "protocol"),
        (b"event: error\ndata: engine died\n\n", "unavailable"),
        (b'data: {"error":{"code":429,"message":"slow down"}}\n\n', "rate_limited"),
        (b'{"error":{"message":"prompt is too long","type":"invalid_request_error"}}', "context_overflow"),
    ],
)
def test_what_is_no_answer_is_never_taken_for_an_empty_one(body: bytes, expected: str) -> None:
    assert fault(body)[0] == expected


def test_an_end_without_closing_line_or_blank_line_is_an_end_when_the_server_said_why() -> None:
    assert read([b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}']).content == "x"
    assert read([sse(chunk({"content": "x"}))]).finish_reason == "stop"


def test_events_that_a_server_does_not_separate_are_read_one_a_line() -> None:
    lines = [chunk({"content": "a"}), chunk({"content": "b"}, "stop")]
    body = b"".join(b"data: " + json.dumps(line).encode() + b"\n" for line in lines) + b"data: [DONE]\n"
    assert read([body]).content == "ab"


def test_a_broken_connection_after_the_end_was_announced_loses_nothing() -> None:
    def pieces() -> Iterable[bytes]:
        yield b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
        raise ModelError("truncated", "cut", retryable=True)

    assert read(pieces()).content == "x"
