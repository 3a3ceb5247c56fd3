"""The example model server speaks the chat-completions wire over real HTTP."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestration.testing.parts import Part, answers_http
from orchestration.testing.servers import free_port

TOOLS = [{"type": "function", "function": {"name": "math-add", "description": "", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = free_port()
    part = Part(
        "model",
        [sys.executable, "-m", "examples.model_server", "--port", str(port)],
        env=os.environ,
        cwd=Path(__file__).resolve().parents[2],
        log=tmp_path_factory.mktemp("model") / "log",
        ready=lambda _log: answers_http(f"http://127.0.0.1:{port}/v1/models"),
    )
    part.start().wait_ready()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        yield client
    part.stop()


def request(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **more}


def streamed(client: httpx.Client, text: str) -> list[dict[str, Any]]:
    chunks = []
    with client.stream("POST", "/chat/completions", json=request(text, stream=True, stream_options={"include_usage": True})) as response:
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunks.append(json.loads(line.removeprefix("data: ")))
    return chunks


def test_a_streamed_answer_is_the_whole_answer(model: httpx.Client) -> None:
    whole = model.post("/chat/completions", json=request("hello")).json()["choices"][0]
    chunks = streamed(model, "hello")
    pieces = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert len(pieces) > 3 and "".join(pieces) == whole["message"]["content"]
    assert whole["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_pieces_of_a_call_make_its_arguments(model: httpx.Client) -> None:
    chunks = streamed(model, "add 2 and 3")
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "math-add" and calls[0]["id"]
    assert len(calls) > 2
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 2, "b": 3}
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes[-1] == "tool_calls"


def test_the_same_messages_get_the_same_answer(model: httpx.Client) -> None:
    first, second = (model.post("/chat/completions", json=request("calls 3")).json()["choices"] for _ in range(2))
    assert first == second
    assert len({call["id"] for call in first[0]["message"]["tool_calls"]}) == 3


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b'{"messages": [1]}', b'{"messages": [{"role": 1}]}', b"\xff"]
)
def test_what_cannot_be_read_is_refused(model: httpx.Client, body: bytes) -> None:
    response = model.post("/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_an_ordered_failure_comes(model: httpx.Client) -> None:
    limited = model.post("/chat/completions", json=request("fail 429"))
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "1")
    assert model.post("/chat/completions", json=request("fail 503")).status_code == 503
    assert model.get("/elsewhere").status_code == 404
