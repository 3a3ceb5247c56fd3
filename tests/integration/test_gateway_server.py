"""What strangers may do to the server before anybody is asked who they are: send heads without end, slowly, or on the side."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest
from gateway_stage import Served, emptied, served_gateway
from websockets.sync.client import connect

import gateway.server
from gateway.server import MAX_HEAD_BYTES
from orchestration import Agent
from orchestration.models.scripted import ScriptedModel
from orchestration.project import Project
from orchestration.testing.servers import RedisServer


@pytest.fixture(scope="module")
def gateway_(turnmill_redis: RedisServer) -> Iterator[Served]:
    project = Project(agents={"support": Agent("support", ScriptedModel(["hi"]))})
    with served_gateway(emptied(turnmill_redis), project) as served:
        yield served


@contextmanager
def line(served: Served) -> Iterator[socket.socket]:
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port or 80), timeout=60) as opened:
        yield opened


def rest_of(opened: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    heard = b""
    try:
        while piece := opened.recv(65536):
            heard += piece
    except ConnectionResetError:
        pass  # it hung up while more was being sent
    return heard


def send_until_refused(opened: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again; how many bytes were taken before the other side hung up."""
    sent = 0
    try:
        while sent < most:
            opened.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


HEAD = b"GET /v1/agents HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/agents/support/turns HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
)
MORE = {
    "one header without end": (HEAD + b"X: ", b"a" * 100_000),
    "headers without end": (HEAD, b"X-Y: " + b"a" * 1000 + b"\r\n"),
    "a line without end": (b"GET /", b"a" * 100_000),
    "trailers without end": (
        CHUNKED + b"1\r\n{\r\n0\r\n",
        b"X-Y: " + b"a" * 1000 + b"\r\n",
    ),
    "chunk extensions without end": (
        CHUNKED + b"1;",
        b"a" * 100_000,
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_what_has_no_end_is_hung_up_on_and_kept_nowhere(gateway_: Served, name: str) -> None:
    begin, piece = MORE[name]
    before = psutil.Process().memory_info().rss
    with line(gateway_) as opened:
        opened.sendall(begin)
        assert send_until_refused(opened, piece, 100_000_000) < 100_000_000
        heard = rest_of(opened)
    assert psutil.Process().memory_info().rss - before < 30_000_000
    assert not heard or heard.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert gateway_.client.get("/healthz").status_code == 200


def test_a_head_that_is_too_large_is_told(gateway_: Served) -> None:
    with line(gateway_) as opened:
        opened.sendall(HEAD + b"X: " + b"a" * MAX_HEAD_BYTES)
        heard = rest_of(opened)
    head, _, body = heard.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"application/problem+json" in head
    assert json.loads(body)["code"] == "headers_too_large"


def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(gateway_: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.server, "HEAD_S", 1.0)
    for begin in (b"", HEAD, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD):
        with line(gateway_) as opened:
            if begin:
                opened.sendall(begin)
            heard = rest_of(opened)  # ends, since the other side hangs up
            assert heard.count(b"HTTP/1.1 200") == begin.count(b"healthz")


def test_many_requests_on_one_connection_and_large_bodies_in_small_chunks_pass(gateway_: Served) -> None:
    with httpx.Client(base_url=gateway_.url) as client:
        for _ in range(30):
            assert client.get("/healthz", headers={"X": "a" * 8000}).status_code == 200
        text = json.dumps({"input": "x" * 100_000}).encode()
        for content in (text, (text[at : at + 1] for at in range(3000))):
            answer = client.post("/v1/agents/support/turns", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == (202 if content is text else 400), answer.text
        pieces = (text[at : at + 7] for at in range(0, len(text), 7))
        assert client.post("/v1/agents/support/turns", content=pieces, headers={"Content-Type": "application/json"}).status_code == 202
    with line(gateway_) as opened:  # several at once on one connection
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 8000 + b"\r\n\r\n"
        opened.sendall(request * 20 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert rest_of(opened).count(b"HTTP/1.1 200") == 21


def test_a_channel_outlives_the_bound_on_heads(gateway_: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.server, "HEAD_S", 1.0)
    with connect(gateway_.url.replace("http", "ws", 1) + "/v1/agents/support/channel") as channel:
        assert "conversation_id" in channel.recv(timeout=30)
        with pytest.raises(TimeoutError):
            channel.recv(timeout=2)
        channel.send("5")
        assert json.loads(channel.recv(timeout=30))["code"] == "bad_request"


@pytest.mark.parametrize("path", ["/v1/agents/support/turns", "/v1/webhooks/none"])
def test_who_sends_too_much_reads_the_refusal_also_where_all_is_sent_before_it_is_read(gateway_: Served, path: str) -> None:
    limit = gateway_.ports.settings.max_body_bytes

    async def ask(client: httpx.AsyncClient, body: bytes, *, announced: bool) -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 65_536):
                yield body[at : at + 65_536]

        return await client.post(path, content=body if announced else pieces(), headers={"Content-Type": "application/json"})

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=gateway_.url, timeout=60) as client:
            asked = [ask(client, b"x" * size, announced=way) for size in (limit + 1, 4 * limit) for way in (True, False) for _ in range(10)]
            return await asyncio.gather(*asked)

    for answer in asyncio.run(ask_all()):
        assert (answer.status_code, answer.json()["code"], answer.headers["connection"]) == (413, "too_large", "close")


def frame_of(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    """One short frame as a client sends it; the mask changes nothing."""
    return bytes([opcode | (0x80 if final else 0), 0x80 | len(payload)]) + b"\0\0\0\0" + payload


FLOODS = {
    "pings": (b"", frame_of(9, b"p" * 125)),
    "empty pings": (b"", frame_of(9)),
    "pongs": (b"", frame_of(10)),
    "pieces of one message": (frame_of(1, b'"', final=False), frame_of(0, final=False)),
    "messages that are none": (b"", frame_of(1, b"5")),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_channel_that_floods_and_does_not_read_is_hung_up_on_or_waits(gateway_: Served, name: str) -> None:
    begin, piece = FLOODS[name]
    before = psutil.Process().memory_info().rss
    with line(gateway_) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(
            b"GET /v1/agents/support/channel HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert opened.recv(10).startswith(b"HTTP/1.1")
        opened.settimeout(2)  # one that is made to wait waits for ever
        opened.sendall(begin)
        assert send_until_refused(opened, piece * 2000, 100_000_000) < 100_000_000
    assert psutil.Process().memory_info().rss - before < 40_000_000
    with connect(gateway_.url.replace("http", "ws", 1) + "/v1/agents/support/channel") as channel:
        assert "conversation_id" in channel.recv(timeout=30)
        assert channel.ping().wait(30), "one that does as it should goes on"
