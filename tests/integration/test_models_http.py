"""Model adapters against real HTTP servers: every recorded answer, cuts, silences, keys, forks."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from email.utils import formatdate
from typing import Any

import pytest

from orchestration.core.errors import Misconfigured, ModelError
from orchestration.core.model import Delta, ModelReply, Usage
from orchestration.models import AnthropicModel, Failover, OpenAIChatModel, call_model
from orchestration.models.connection import MAX_REPLY_BYTES, pool
from tests.fixtures.wire.cases import WireCase, check_reply, load_cases
from tests.fixtures.wire.server import Answer, WireServer, chunk, sse

USER = {"role": "user", "content": "my secret question"}
HELLO = sse(chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop"))


class Stage:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def serve(self, *answers: Answer) -> WireServer:
        return self._stack.enter_context(WireServer(answers or [Answer([HELLO])]).running())


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-0123456789")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-0123456789")
    with ExitStack() as stack:
        yield Stage(stack)


@pytest.fixture(scope="module", autouse=True)
def no_connection_is_left() -> Iterator[None]:
    yield
    pool.close()


def chat(server: WireServer, **more: Any) -> OpenAIChatModel:
    return OpenAIChatModel(base_url=server.url, model="m", **more)


def fault(model: Any, messages: Any = (USER,), **more: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        model.complete(list(messages), **more)
    return caught.value


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: f"{case.id} {case.title}")
@pytest.mark.parametrize("size", [3, 1_000_000], ids=["in small pieces", "at once"])
def test_every_recorded_answer_comes_out_as_expected(stage: Stage, case: WireCase, size: int) -> None:
    pieces = [case.body[at : at + size] for at in range(0, len(case.body), size)]
    model = chat(stage.serve(Answer(pieces, case.status, case.headers)), stream=case.stream)
    wanted = case.expect.get("error")
    if not wanted:
        check_reply(case, model.complete([USER], tools=case.definitions))
        return
    error = fault(model, tools=case.definitions)
    assert (error.kind, error.retryable) == (wanted["class"], wanted["retryable"])
    assert error.retry_after_s == wanted.get("retry_after_s")
    if case.id == "G1-O43":
        assert "messages.0.role" in str(error)
    assert "<" not in str(error)


def test_a_pause_until_a_date_is_read(stage: Stage) -> None:
    server = stage.serve(Answer([b"{}"], 503, {"retry-after": formatdate(time.time() + 100, usegmt=True)}))
    error = fault(chat(server))
    assert error.retry_after_s is not None
    assert 90 < error.retry_after_s <= 101


def test_a_request_is_well_formed_and_carries_the_key(stage: Stage) -> None:
    server = stage.serve()
    shown: list[Delta] = []
    tools = [{"type": "function", "function": {"name": "geo", "description": "", "parameters": {"type": "object"}}}]
    reply = chat(server, extra_params={"temperature": 0}, extra_headers={"X-Team": "blue"}).complete([USER], tools=tools, sink=shown.append)
    assert reply == ModelReply("Hello")
    assert shown == [Delta(text="Hel"), Delta(text="lo")]
    asked = server.asked[0]
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer sk-test-0123456789"
    assert asked.headers["x-team"] == "blue"
    assert asked.body == {
        "model": "m",
        "messages": [USER],
        "tools": tools,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }


def test_a_whole_answer_is_asked_for_without_streaming(stage: Stage) -> None:
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    server = stage.serve(Answer([json.dumps(body).encode()], headers={"content-type": "application/json"}))
    assert chat(server, stream=False).complete([USER]) == ModelReply("Hi", usage=Usage(3, 1))
    assert server.asked[0].body["stream"] is False
    assert "stream_options" not in server.asked[0].body


def test_a_query_in_the_base_url_stays(stage: Stage) -> None:
    server = stage.serve()
    OpenAIChatModel("m", base_url=server.url + "/deployments/d/?api-version=1").complete([USER])
    assert server.asked[0].path == "/v1/deployments/d/chat/completions?api-version=1"


class Stop(Exception):
    pass


def test_what_the_sink_raises_closes_the_connection_and_comes_out(stage: Stage) -> None:
    server = stage.serve(Answer([b""], endless=b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', hold=threading.Event()))

    def stop(_: Delta) -> None:
        raise Stop

    with pytest.raises(Stop):
        chat(server).complete([USER], sink=stop)
    assert server.client_left.wait(30)
    with pytest.raises(Stop):
        call_model(chat(server), [USER], sink=stop)


def test_a_connection_cut_in_the_answer_is_not_an_answer(stage: Stage) -> None:
    half = b'data: {"choices":[{"delta":{"content":"The answer is fo"}}]}\n\n'
    for body in (half, half + b'data: {"cho', b'{"choices": [', b""):
        error = fault(chat(stage.serve(Answer([body], cut=True))))
        assert (error.kind, error.retryable) == ("truncated", True), body
    whole = b'data: {"choices":[{"delta":{"content":"42"},"finish_reason":"stop"}]}\n\n'
    assert chat(stage.serve(Answer([whole], cut=True))).complete([USER]).content == "42"


def test_a_server_that_falls_silent_is_given_up(stage: Stage) -> None:
    hold = threading.Event()
    half = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    error = fault(chat(stage.serve(Answer([half], hold=hold)), read_timeout_s=0.2))
    assert (error.kind, error.retryable) == ("unavailable", True)
    assert "silent for 0.2 s" in str(error)


def test_a_server_that_only_keeps_the_connection_warm_is_given_up(stage: Stage) -> None:
    error = fault(chat(stage.serve(Answer(endless=b": waiting\n\n", hold=threading.Event())), timeout_s=0.5))
    assert (error.kind, error.retryable) == ("unavailable", True)
    assert "did not finish within 0.5 s" in str(error)


def test_an_answer_without_end_is_stopped(stage: Stage) -> None:
    piece = b"data: " + json.dumps(chunk({"content": "x" * 500_000})).encode() + b"\n\n"
    error = fault(chat(stage.serve(Answer([piece] * (MAX_REPLY_BYTES // 500_000 + 2)))))
    assert error.kind == "protocol"


def test_nobody_there_may_be_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    error = fault(OpenAIChatModel("m", base_url=url, api_key="k"))
    assert (error.kind, error.retryable) == ("unavailable", True)


def test_a_redirect_is_not_followed_with_the_key(stage: Stage) -> None:
    other = stage.serve()
    error = fault(chat(stage.serve(Answer([], 307, {"location": other.url}))))
    assert (error.kind, other.asked) == ("bad_request", [])


def test_a_missing_key_is_named_and_a_local_server_needs_none(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    error = fault(OpenAIChatModel("m"))
    assert (error.kind, error.retryable) == ("auth", False)
    assert "OPENAI_API_KEY" in str(error)
    server = stage.serve()
    assert "MY_KEY" in str(fault(chat(server, api_key_env="MY_KEY")))
    assert server.asked == []
    chat(server).complete([USER])
    assert "authorization" not in server.asked[0].headers


def test_a_key_is_looked_up_at_each_call(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage.serve()
    model = chat(server)
    monkeypatch.setenv("OPENAI_API_KEY", " sk-second\n")
    model.complete([USER])
    assert server.asked[0].headers["authorization"] == "Bearer sk-second"


def test_neither_key_nor_prompt_is_ever_shown(stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    echo = json.dumps({"error": {"message": "Incorrect key sk-hidden-42 for my secret question"}}).encode()
    server = stage.serve(Answer([echo], 400, {"content-type": "application/json"}))
    model = chat(server, api_key="sk-hidden-42")
    texts = [str(fault(model)), repr(model), str(vars(model)), str(vars(model._endpoint))]
    for bad in ("sk-hidden-42\nx: y", "sk hidden-42", "sk-hidden-42é"):
        monkeypatch.setenv("OPENAI_API_KEY", bad)
        texts.append(str(fault(chat(server))))
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("orchestration")]
    for text in (*texts, *ours):
        assert "hidden-42" not in text
        assert "secret" not in text.replace("SecretStr", "")


def test_a_connection_is_used_again_after_a_whole_answer(stage: Stage) -> None:
    body = json.dumps({"choices": [{"message": {"content": "Hi"}}]}).encode()
    server = stage.serve(Answer([body], headers={"content-type": "application/json"}))
    model = chat(server, stream=False)
    for _ in range(5):
        model.complete([USER])
    assert len({asked.port for asked in server.asked}) == 1


def test_a_connection_is_used_again_after_a_stream(stage: Stage) -> None:
    server = stage.serve()
    model = chat(server)
    while len(server.asked) < 2 or len({asked.port for asked in server.asked}) == len(server.asked):
        model.complete([USER])  # the end of a stream may be read a moment later; the test's time limit ends a wait in vain


def test_a_server_that_never_closes_its_stream_keeps_nobody_waiting(stage: Stage) -> None:
    server = stage.serve(Answer([HELLO], hold=threading.Event()))
    assert [chat(server).complete([USER]).content for _ in range(3)] == ["Hello"] * 3


def test_many_threads_share_one_model(stage: Stage) -> None:
    server = stage.serve()
    model = chat(server)
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda n: model.complete([{"role": "user", "content": str(n)}]).content, range(100)))
    assert replies == ["Hello"] * 100
    assert sorted(int(asked.body["messages"][0]["content"]) for asked in server.asked) == list(range(100))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_opens_its_own_connections(stage: Stage) -> None:
    body = json.dumps({"choices": [{"message": {"content": "Hi"}}]}).encode()
    server = stage.serve(Answer([body], headers={"content-type": "application/json"}))
    model = chat(server, stream=False)
    model.complete([USER])
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if model.complete([USER]).content == "Hi" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model.complete([USER])
    first, in_child, again = (asked.port for asked in server.asked)
    assert first == again != in_child


def test_a_model_of_the_messages_api_is_asked_and_heard(stage: Stage) -> None:
    events = [
        {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 3, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    stream = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    overloaded = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    server = stage.serve(Answer([stream]), Answer([overloaded], 529, {"retry-after": "2"}))
    model = AnthropicModel("c", base_url=server.url)
    shown: list[Delta] = []
    assert model.complete([USER], sink=shown.append) == ModelReply("Hello", usage=Usage(3, 5), model="c")
    assert shown == [Delta(text="Hello")]
    asked = server.asked[0]
    assert asked.path == "/v1/messages"
    assert (asked.headers["x-api-key"], asked.headers["anthropic-version"]) == ("sk-ant-0123456789", "2023-06-01")
    assert asked.body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "my secret question"}]}]
    error = fault(model)
    assert (error.kind, error.retryable, error.retry_after_s) == ("unavailable", True, 2.0)


def test_another_server_answers_when_one_is_down(stage: Stage) -> None:
    down, up = stage.serve(Answer([b"<html>"], 502, {"content-type": "text/html"})), stage.serve()
    model = Failover(chat(down), chat(up))
    assert [model.complete([USER]).content for _ in range(3)] == ["Hello"] * 3
    assert len(down.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"base_url": "localhost:1234"},
        {"base_url": "http://"},
        {"base_url": "http://a:b:c/"},
        {"timeout_s": 0},
        {"read_timeout_s": float("nan")},
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured):
        OpenAIChatModel(**{"model": "m", **wrong})
