"""A model's server without a model: it speaks the chat-completions wire, token by token, and answers a handful of requests by rule.

`python -m examples.model_server --port 8089`. The answer is a function of the messages alone, so it may be restarted at any time and
asked twice. Which request means what is in `examples/model_rules.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from examples.model_rules import Answer, answer_to, pieces

#: Seconds between two tokens.
PAUSE_S = 0.02

#: The longest request that is read, in bytes.
MAX_BYTES = 16 * 1024 * 1024

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class BadRequest(Exception):
    """What was sent is no request that this server can answer."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application: `POST …/chat/completions` and `GET …/models`."""
    if scope["type"] != "http":
        return
    path = scope["path"]
    if scope["method"] == "GET" and path.endswith("/models"):
        await _json(send, 200, {"object": "list", "data": [{"id": "demo", "object": "model", "owned_by": "turnmill"}]})
    elif scope["method"] == "POST" and path.endswith("/chat/completions"):
        try:
            request = await _body(receive)
            answer = answer_to(request["messages"], _tool_names(request))
        except BadRequest as error:
            await _json(send, 400, _error(str(error), "invalid_request_error"))
            return
        await asyncio.sleep(answer.wait_s)
        if answer.status != 200:
            await _json(send, answer.status, _error("as it was asked to", "server_error"))
        elif request.get("stream"):
            await _stream(send, request, answer)
        else:
            await _json(send, 200, _whole(request, answer))
    else:
        await _json(send, 404, _error(f"no route {path}", "invalid_request_error"))


async def _body(receive: Receive) -> dict[str, Any]:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BYTES:
            raise BadRequest("the request is too long")
        if not message.get("more_body"):
            break
    try:
        request = json.loads(b"".join(parts))
    except ValueError:
        raise BadRequest("the body is no JSON") from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise BadRequest("'messages' must be a list that is not empty")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in request["messages"]):
        raise BadRequest("each message must be an object with a 'role'")
    return request


def _tool_names(request: dict[str, Any]) -> list[str]:
    tools = request.get("tools") or []
    return [str(tool["function"]["name"]) for tool in tools if isinstance(tool, dict) and "name" in (tool.get("function") or {})]


def _usage(request: dict[str, Any], answer: Answer) -> dict[str, int]:
    asked = len(json.dumps(request["messages"])) // 4 + 1
    told = len(list(pieces(answer.text))) + sum(len(arguments) // 4 + 1 for _, arguments in answer.calls)
    return {"prompt_tokens": asked, "completion_tokens": told, "total_tokens": asked + told}


def _calls(request: dict[str, Any], answer: Answer) -> list[dict[str, Any]]:
    # Ids of their own for each round, but the same ones when the same messages are sent again.
    at = len(request["messages"])
    return [
        {"id": f"call_{at}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(answer.calls)
    ]


def _whole(request: dict[str, Any], answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = _calls(request, answer)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}
    return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(request, answer)}


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-demo", "object": kind, "created": int(time.time()), "model": request.get("model", "demo")}


async def _chunks(request: dict[str, Any], answer: Answer) -> AsyncIterator[dict[str, Any]]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**_head(request, "chat.completion.chunk"), "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(answer.text):
        await asyncio.sleep(answer.pause_s or PAUSE_S)
        yield chunk({"content": piece})
    for index, call in enumerate(_calls(request, answer)):
        arguments = call["function"]["arguments"]
        yield chunk({"tool_calls": [{**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}]})
        for start in range(0, len(arguments), 12):
            await asyncio.sleep(PAUSE_S)
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[start : start + 12]}}]})
    yield chunk({}, "tool_calls" if answer.calls else "stop")
    if (request.get("stream_options") or {}).get("include_usage"):
        yield {**_head(request, "chat.completion.chunk"), "choices": [], "usage": _usage(request, answer)}


async def _stream(send: Send, request: dict[str, Any], answer: Answer) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for chunk in _chunks(request, answer):
        await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _json(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def main() -> None:
    """Serve on loopback until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8089)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
