"""Agents for programs that speak OpenAI's chat completions: the official client, unchanged, against a served gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from gateway_stage import Served, emptied, served_gateway, until
from openai.types.chat import ChatCompletionChunk

from orchestration import Agent, ToolError, tool
from orchestration.core.errors import ModelError
from orchestration.core.model import Usage
from orchestration.models.scripted import FunctionModel, Step
from orchestration.project import Project
from orchestration.testing.local import LocalMesh
from orchestration.testing.servers import RedisServer

KEY = "key-of-a-program-1"
KEYS = json.dumps(
    [
        {"key": KEY, "sub": "program", "tenant": "acme", "scopes": ["turns:write", "turns:read", "approvals:decide"]},
        {"key": "key-of-the-reader-1", "sub": "bob", "tenant": "acme", "scopes": ["turns:read"]},
    ]
)

release = threading.Event()
shown: list[list[dict[str, Any]]] = []
tried: list[str] = []


@tool("math/add", idempotent=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ToolError("only from zero on")
    return a + b


@tool("shop/refund", approval="money moves")
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded {order}"


def think(messages: list[dict[str, Any]], tools: list[Any]) -> Step:
    shown.append(messages)
    last = messages[-1]
    said = str(last["content"])
    usage = Usage(10, 5)
    if last["role"] == "tool":
        return Step(f"it is {said}", usage=usage, chunks=2)
    if "add" in said:
        return Step("Let me see.", tool_calls=[("math-add", {"a": 2, "b": 3})], usage=usage)
    if "refund" in said:
        return Step(tool_calls=[("shop-refund", {"order": "o-1"})], usage=usage)
    if "broken" in said:
        raise ModelError("bad_request", "the provider says no", retryable=False)
    if "stumble" in said:
        tried.append(said)
        return Step("one two three", chunks=["one ", "two ", "three"], error="unavailable" if len(tried) == 1 else None, usage=usage)
    if "slow" in said:
        return Step("at last", release=release, usage=usage)
    return Step(f"you said {said}", chunks=4, usage=usage, thinking="hm")


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    agent = Agent("support", FunctionModel(think), tools=[add, refund], system="You help.")
    project = Project(agents={"support": agent, "other": Agent("other", FunctionModel(think))})
    with served_gateway(emptied(turnmill_redis), project, working=True, mesh=LocalMesh([add, refund]), api_keys=KEYS) as served:
        served.client.headers["Authorization"] = f"Bearer {KEY}"
        yield served
        release.set()


@pytest.fixture
def client(gateway: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1") as made:
        yield made


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def carried(chunk: ChatCompletionChunk) -> dict[str, Any]:
    return dict((chunk.model_extra or {}).get("turnmill", {}))


def test_agents_are_listed_as_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["other", "support"]
    assert client.models.retrieve("support").owned_by == "turnmill"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "unknown_agent"


def test_a_completion_is_a_turn(client: openai.OpenAI, gateway: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(model="support", messages=[user("hi")], temperature=0.3, max_tokens=100)
    answer = raw.parse()
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "you said hi")
    assert (answer.choices[0].finish_reason, answer.model, answer.object) == ("stop", "support", "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 5, 15)
    turn = gateway.client.get(f"/v1/turns/{raw.headers['turnmill-turn']}").json()
    assert (turn["state"], turn["answer"]) == ("completed", "you said hi")
    assert answer.id == f"chatcmpl-{turn['turn_id']}"


def test_a_stream_gives_the_tokens_of_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="support", messages=[user("hi")], stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert text_of(chunks) == "you said hi"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 15
    assert len({chunk.id for chunk in chunks}) == 1
    assert {carried(chunks[0])["turn_id"]} == {chunks[0].id.removeprefix("chatcmpl-")}


def test_tokens_come_before_the_turn_has_ended(client: openai.OpenAI, gateway: Served) -> None:
    with client.chat.completions.create(model="support", messages=[user("hi")], stream=True) as stream:
        first = next(iter(stream))
    assert first.choices
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "slow", "conversation_id": "live"}).json()
    until(lambda: gateway.client.get(f"/v1/turns/{made['turn_id']}").json()["state"] == "running", "the turn to run")
    stream = client.chat.completions.create(
        model="support", messages=[user("hi")], stream=True, extra_headers={"Turnmill-Conversation": "live"}
    )
    chunks = iter(stream)
    head = [next(chunks)]
    assert head[0].choices[0].delta.content == ""
    release.set()
    assert text_of([*head, *chunks]) == "you said hi"


def test_tools_run_between_and_what_was_said_before_them_is_part_of_the_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="support", messages=[user("add")], stream=True))
    assert text_of(chunks) == "Let me see.\n\nit is 5"
    whole = client.chat.completions.create(model="support", messages=[user("add")])
    assert whole.choices[0].message.content == "it is 5"
    assert whole.usage is not None and whole.usage.prompt_tokens == 20


def test_an_approval_is_a_chunk_and_the_stream_stays_open(client: openai.OpenAI, gateway: Served) -> None:
    chunks: list[ChatCompletionChunk] = []
    for chunk in client.chat.completions.create(model="support", messages=[user("refund")], stream=True):
        chunks.append(chunk)
        frame = carried(chunk)
        if frame.get("kind") == "approval_request":
            assert (frame["name"], frame["arguments"], frame["reason"]) == ("shop-refund", {"order": "o-1"}, "money moves")
            path = f"/v1/approvals/{frame['approval_id']}/decision"
            assert gateway.client.post(path, json={"approved": True, "arguments": {"order": "o-2"}}).status_code == 200
    assert text_of(chunks) == "it is refunded o-2"
    kinds = [carried(chunk).get("kind") for chunk in chunks if carried(chunk)]
    assert kinds == [None, "approval_request", "approval_decision", "done"]


def test_a_completion_waits_for_its_approval(client: openai.OpenAI, gateway: Served) -> None:
    answers: list[Any] = []
    waiter = threading.Thread(target=lambda: answers.append(client.chat.completions.create(model="support", messages=[user("refund")])))
    waiter.start()
    gateway_headers = {"Authorization": f"Bearer {KEY}"}

    def pending() -> list[dict[str, Any]]:
        found = gateway.hand.redis.zrange("tm:acme:aps:pending", 0, -1)
        return [{"approval_id": str(one)} for one in found]

    until(pending, "an approval")
    path = f"{gateway.url}/v1/approvals/{pending()[0]['approval_id']}/decision"
    httpx.post(path, json={"approved": False, "note": "no"}, headers=gateway_headers).raise_for_status()
    waiter.join(30)
    assert answers[0].choices[0].message.content.startswith("it is ")


# Conversations


def test_a_named_conversation_is_kept(client: openai.OpenAI, gateway: Served) -> None:
    for way in ({"metadata": {"conversation_id": "kept-1"}}, {"extra_headers": {"Turnmill-Conversation": "kept-1"}}):
        raw = client.chat.completions.with_raw_response.create(model="support", messages=[user("again")], **way)
        assert raw.headers["turnmill-conversation"] == "kept-1"
    assert [message["role"] for message in shown[-1]] == ["system", "user", "assistant", "user"]
    history = gateway.client.get("/v1/conversations/kept-1/history").json()["history"]
    assert len(history) == 4
    assert gateway.hand.redis.ttl("tm:acme:conv:kept-1") > 86_400


def test_without_one_what_is_sent_is_the_history_and_nothing_is_kept(client: openai.OpenAI, gateway: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"x": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        user("earlier"),
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "I found it"},
        {"role": "developer", "content": [{"type": "text", "text": "And kind."}]},
        user([{"type": "text", "text": "and now?"}, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]),
    ]
    raw = client.chat.completions.with_raw_response.create(model="support", messages=messages)
    sent = shown[-1]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert sent[0]["content"] == "You help.\n\nBe brief.\n\nAnd kind."
    assert [call["function"]["arguments"] for call in sent[2]["tool_calls"]] == ['{"x": 1}', '{"x": 1}']
    assert sent[3]["content"] == "found" and "no result" in sent[4]["content"]
    assert sent[-1]["content"][1]["image_url"]["url"] == "https://example.com/a.png"
    conversation = raw.headers["turnmill-conversation"]
    for key in (f"tm:acme:conv:{conversation}", f"tm:acme:conv:{conversation}:log", f"tm:acme:turn:{raw.headers['turnmill-turn']}"):
        assert 0 < gateway.hand.redis.ttl(key) <= 3600


def test_the_same_key_makes_one_turn_also_without_a_conversation(client: openai.OpenAI) -> None:
    def ask(text: str) -> Any:
        return client.chat.completions.with_raw_response.create(
            model="support",
            messages=[user("before"), {"role": "assistant", "content": "x"}, user(text)],
            extra_headers={"Idempotency-Key": "once"},
        )

    assert ask("one").headers["turnmill-turn"] == ask("one").headers["turnmill-turn"]
    with pytest.raises(openai.ConflictError) as caught:
        client.with_options(max_retries=0).chat.completions.create(
            model="support", messages=[user("two")], extra_headers={"Idempotency-Key": "once"}
        )
    assert caught.value.code == "idempotency_mismatch"


# When it goes wrong


def test_a_turn_that_fails_is_an_error_and_is_not_asked_again(client: openai.OpenAI) -> None:
    before = len(shown)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="support", messages=[user("broken")])
    assert caught.value.code == "model_bad_request"
    assert len(shown) == before + 1, "the client made another turn by itself"
    with pytest.raises(openai.APIError) as broken:
        list(client.chat.completions.create(model="support", messages=[user("broken")], stream=True))
    assert broken.value.code == "model_bad_request"


def test_a_step_that_is_tried_again_says_nothing_twice(client: openai.OpenAI) -> None:
    tried.clear()
    chunks = list(client.chat.completions.create(model="support", messages=[user("stumble")], stream=True))
    assert len(tried) == 2
    assert text_of(chunks) == "one two three"


def test_a_cancelled_turn_is_an_error(client: openai.OpenAI, gateway: Served) -> None:
    release.clear()
    caught: list[Exception] = []

    def ask() -> None:
        try:
            client.chat.completions.create(model="support", messages=[user("slow")], extra_headers={"Turnmill-Conversation": "to-cancel"})
        except openai.APIStatusError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()

    def running() -> str | None:
        found = gateway.client.get("/v1/conversations/to-cancel")
        return str(found.json()["running_turn_id"]) if found.status_code == 200 else None

    until(running, "the turn")
    gateway.client.post(f"/v1/turns/{running()}/cancel")
    asking.join(30)
    release.set()
    assert isinstance(caught[0], openai.ConflictError) and caught[0].code == "cancelled"


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        {"messages": [{"role": "wizard", "content": "x"}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": "x"}], "metadata": {"conversation_id": "a b"}},
        {"messages": [{"role": "user", "content": "x"}], "metadata": {"conversation_id": 7}},
    ],
)
def test_what_cannot_be_done_is_told_in_the_shape_that_they_read(client: openai.OpenAI, request_: dict[str, Any]) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.chat.completions.create(model="support", **request_)
    assert caught.value.code == "validation_error"
    assert caught.value.body is not None and caught.value.message


def test_who_may_not_ask_is_told_in_the_shape_that_they_read(gateway: Served) -> None:
    with (
        openai.OpenAI(api_key="key-of-nobody-here", base_url=f"{gateway.url}/v1") as nobody,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        nobody.models.list()
    assert caught.value.code == "unauthorized"
    with openai.OpenAI(api_key="key-of-the-reader-1", base_url=f"{gateway.url}/v1") as reader, pytest.raises(openai.PermissionDeniedError):
        reader.chat.completions.create(model="support", messages=[user("x")])
    with openai.OpenAI(api_key=KEY, base_url=f"{gateway.url}/v1") as client, pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=[user("x")])


def test_a_client_that_goes_away_ends_nothing(client: openai.OpenAI, gateway: Served) -> None:
    release.clear()
    with client.chat.completions.create(model="support", messages=[user("slow")], stream=True) as stream:
        turn_id = carried(next(iter(stream)))["turn_id"]
    until(lambda: gateway.watching == 0, "the departure to be seen")
    assert gateway.client.get(f"/v1/turns/{turn_id}").json()["state"] == "running"
    release.set()
    until(lambda: gateway.client.get(f"/v1/turns/{turn_id}").json()["state"] == "completed", "the turn to end")
