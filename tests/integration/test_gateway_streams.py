"""Streams over HTTP as their clients meet them: each frame once and in order, whoever comes, goes, reconnects or never reads."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from gateway_stage import Served, emptied, served_gateway, until
from websockets.sync.client import connect

from gateway.openai_answers import StreamedText
from gateway.parts import Pace
from orchestration import Agent
from orchestration.core.frames import FrameKind, frame
from orchestration.models.scripted import FunctionModel, Step
from orchestration.project import Project
from orchestration.state.frame_hub import FrameHub
from orchestration.testing.servers import RedisServer

ODD = "lf\ncrlf\r\ncr\rnel\x85ls\u2028ps\u2029\ndata: x\n\nid: 7\nevent: done\n\x00\x0b\x0c\x1c🦊 </script>"

release = threading.Event()


def think(messages: list[dict[str, Any]]) -> Step:
    said = str(messages[-1]["content"])
    if "odd" in said:
        return Step(ODD, chunks=7)
    return Step("at last", release=release) if "slow" in said else Step(f"you said {said}", chunks=3)


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    project = Project(agents={"support": Agent("support", FunctionModel(think))})
    with served_gateway(emptied(turnmill_redis), project, working=True, pace=Pace(send_s=2.0), rate_per_s=0) as served:
        yield served
        release.set()


@dataclass(frozen=True)
class Event:
    """One event as a browser's EventSource hands it over."""

    id: str
    kind: str
    data: str


def event_source(stream: httpx.Response) -> Iterator[Event]:
    """The events of a stream by the rules of the HTML standard, read byte by byte as they come."""
    last_id, kind, data, line = "", "", [], bytearray()
    after_cr = False
    for byte in (one for chunk in stream.iter_raw() for one in chunk):
        if byte == 0x0A and after_cr:
            after_cr = False
            continue
        after_cr = byte == 0x0D
        if byte not in (0x0A, 0x0D):
            line.append(byte)
            continue
        text, line = line.decode(), bytearray()
        if not text:
            if data:
                yield Event(last_id, kind, "\n".join(data))
            kind, data = "", []
            continue
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            last_id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


def begun(served: Served, name: str, tenant: str = "dev") -> tuple[str, str]:
    """A conversation and a turn of it that runs for as long as a test writes its frames."""
    conversation, turn = f"cv_{name}", f"tn_{name}"
    served.hand.redis.hset(f"tm:{tenant}:conv:{conversation}", mapping={"agent": "support"})
    served.hand.redis.hset(f"tm:{tenant}:turn:{turn}", mapping={"conv": conversation, "state": "running", "req": "{}"})
    return conversation, turn


def finish(served: Served, conversation: str, turn: str) -> int:
    number = served.hand.put(conversation, turn, frame(FrameKind.DONE, turn, 1, stop_reason="answer", usage={}))
    served.hand.redis.hset(f"tm:dev:turn:{turn}", "state", "completed")
    return number


def follow(served: Served, turn: str, after: str = "", most: int | None = None) -> list[Event]:
    headers = {"Last-Event-ID": after} if after else {}
    found: list[Event] = []
    with httpx.stream("GET", f"{served.url}/v1/turns/{turn}/frames", headers=headers, timeout=60) as stream:
        if stream.status_code == 204:
            return found
        for event in event_source(stream):
            found.append(event)
            if len(found) == most:
                break
    return found


def test_clients_who_come_at_any_moment_and_with_any_number_miss_nothing(gateway: Served) -> None:
    conversation, turn = begun(gateway, "moments")
    numbers: list[int] = []
    seed = random.randrange(10**9)
    print("seed", seed)
    chance = random.Random(seed)

    def write() -> None:
        for place in range(2000):
            numbers.append(gateway.hand.write(conversation, turn, str(place)))
        numbers.append(finish(gateway, conversation, turn))

    def watch(pauses: tuple[float, float]) -> tuple[int, str]:
        time.sleep(pauses[0])
        known = list(numbers)
        after = known[int(pauses[1] * len(known))] if known and pauses[1] < 0.8 else 0
        headers = {"Last-Event-ID": str(after)} if after else {}
        return after, httpx.get(f"{gateway.url}/v1/turns/{turn}/frames", headers=headers, timeout=120).text

    writer = threading.Thread(target=write)
    writer.start()
    with ThreadPoolExecutor(50) as pool:
        heard = list(pool.map(watch, [(chance.random() * 2, chance.random()) for _ in range(50)]))
    writer.join()
    for after, text in heard:
        assert [int(number) for number in re.findall("^id: (.*)$", text, re.MULTILINE)] == [number for number in numbers if number > after]
        assert text.rpartition("event: ")[2].startswith("done\n")


def test_a_client_that_drops_the_line_again_and_again_gets_each_frame_once(gateway: Served) -> None:
    conversation, turn = begun(gateway, "drops")
    numbers = [gateway.hand.write(conversation, turn, str(place)) for place in range(60)]
    writer = threading.Thread(
        target=lambda: (numbers.extend(gateway.hand.write(conversation, turn, "x") for _ in range(40)), time.sleep(0.1))
    )
    writer.start()
    joined: list[Event] = []
    while len(joined) < 100:
        joined += follow(gateway, turn, joined[-1].id if joined else "", most=min(7, 100 - len(joined)))
    writer.join()
    numbers.append(finish(gateway, conversation, turn))
    joined += follow(gateway, turn, joined[-1].id)
    assert [int(event.id) for event in joined] == numbers
    assert joined[-1].kind == "done"
    assert follow(gateway, turn, joined[-1].id) == []


def test_all_who_watch_one_turn_get_all_of_it(gateway: Served) -> None:
    conversation, turn = begun(gateway, "crowd")
    channel = f"{gateway.url.replace('http', 'ws', 1)}/v1/agents/support/channel?conversation_id={conversation}&after=0"
    with connect(channel) as socket_, ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(follow, gateway, turn) for _ in range(2)]
        until(lambda: gateway.watching == 3, "the three to watch")
        numbers = [gateway.hand.write(conversation, turn, str(place)) for place in range(50)]
        numbers.append(finish(gateway, conversation, turn))
        heard = [[int(event.id) for event in watcher.result(30)] for watcher in watchers]
        heard.append([int(json.loads(socket_.recv(timeout=30))["seq"]) for _ in numbers])
    assert heard == [numbers] * 3


def test_any_gateway_serves_any_turn_live(gateway: Served, turnmill_redis: RedisServer) -> None:
    release.clear()
    with served_gateway(turnmill_redis.url, gateway.ports.project) as other:
        made = gateway.client.post("/v1/agents/support/turns", json={"input": "slow"}).json()
        with ThreadPoolExecutor(2) as pool:
            watchers = [pool.submit(follow, served, made["turn_id"]) for served in (gateway, other)]
            until(lambda: (gateway.watching, other.watching) == (1, 1), "one watcher at each gateway")
            release.set()
            heard = [watcher.result(30) for watcher in watchers]
        assert heard[0] == heard[1] and heard[0][-1].kind == "done"
        assert follow(other, made["turn_id"], heard[0][0].id) == heard[0][1:]


def test_a_client_that_goes_away_ends_nothing(gateway: Served) -> None:
    release.clear()
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "slow"}).json()
    assert follow(gateway, made["turn_id"], most=1)
    until(lambda: gateway.watching == 0, "the departure to be seen")
    assert gateway.client.get(f"/v1/turns/{made['turn_id']}").json()["state"] == "running"
    release.set()
    until(lambda: gateway.client.get(f"/v1/turns/{made['turn_id']}").json()["state"] == "completed", "the turn to end")


def test_nothing_on_the_way_may_hold_events_back(gateway: Served) -> None:
    conversation, turn = begun(gateway, "proxies")
    headers = {"Accept-Encoding": "gzip, br, deflate", "Accept": "text/event-stream"}
    with gateway.client.stream("GET", f"/v1/turns/{turn}/frames", headers=headers) as stream:
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["cache-control"] == "no-cache, no-transform"
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers and "content-length" not in stream.headers
        chunks = stream.iter_raw()
        assert next(chunks) == b": still here\n\n", "a proxy needs a first byte although nothing has happened yet"
        gateway.hand.write(conversation, turn, "x")
        assert next(chunks).startswith(b"id: ")


def test_a_silent_stream_is_kept_awake(turnmill_redis: RedisServer) -> None:
    project = Project(agents={"support": Agent("support", FunctionModel(think))})
    with served_gateway(turnmill_redis.url, project, pace=Pace(comment_s=0.05)) as served:
        _, turn = begun(served, "silent")
        with served.client.stream("GET", f"/v1/turns/{turn}/frames") as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [": still here"] * 3


def test_any_text_of_a_model_comes_back_unchanged(gateway: Served) -> None:
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "odd"}).json()
    events = follow(gateway, made["turn_id"])
    frames = [json.loads(event.data) for event in events]
    assert [event.kind for event in events] == [one["kind"] for one in frames]
    assert [event.id for event in events] == [str(one["seq"]) for one in frames]
    assert "".join(one["text"] for one in frames if one["kind"] == "token") == ODD
    assert next(one["content"] for one in frames if one["kind"] == "message") == ODD
    with gateway.client.stream("GET", f"/v1/turns/{made['turn_id']}/frames") as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert len([line for line in lines if line.startswith("data: ")]) == len(events)
    assert {line.partition(":")[0] for line in lines} <= {"id", "event", "data", ""}


def many(served: Served, conversation: str, turn: str, count: int, size: int) -> None:
    """Write many frames in few round trips."""
    script = served.hand.redis.register_script(
        """
        for i = 1, tonumber(ARGV[3]) do
          local seq = tonumber(redis.call('HINCRBY', KEYS[1], 'seq', 1))
          local id = string.format('%.0f', seq)
          redis.call('XADD', KEYS[1] .. ':frames', 'MAXLEN', '~', 5000, id .. '-0', 't', ARGV[1], 'f', ARGV[2])
          redis.call('PUBLISH', KEYS[1] .. ':live', id .. ' ' .. ARGV[1] .. ' ' .. ARGV[2])
        end
        """
    )
    body = frame(FrameKind.TOKEN, turn, 1, text="x" * size)
    for _ in range(count // 500):
        script(keys=[f"tm:dev:conv:{conversation}"], args=[turn, body, 500])


def stream_of(turn: str) -> str:
    return f"GET /v1/turns/{turn}/frames HTTP/1.1\r\nHost: localhost\r\n\r\n"


def channel_of(conversation: str) -> str:
    return (
        f"GET /v1/agents/support/channel?conversation_id={conversation}&after=0 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )


def deaf_client(served: Served, request: str) -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    url = httpx.URL(served.url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect((url.host, url.port))
    raw.sendall(request.encode())
    return raw


def all_of(raw: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    with raw:
        return b"".join(iter(lambda: raw.recv(1_000_000), b""))


@pytest.mark.parametrize("kind", ["stream", "channel"])
def test_one_that_reads_again_long_after_it_was_cut_off_hears_of_it(turnmill_redis: RedisServer, kind: str) -> None:
    project = Project(agents={"support": Agent("support", FunctionModel(think))})
    with served_gateway(turnmill_redis.url, project, pace=Pace(send_s=0.5)) as served:
        conversation, turn = begun(served, f"late-{kind}")
        first = served.hand.write(conversation, turn, "first")
        raw = deaf_client(served, stream_of(turn) if kind == "stream" else channel_of(conversation))
        until(lambda: served.watching == 1, "it to watch")
        many(served, conversation, turn, 20_000, 1000)
        until(lambda: served.watching == 0, "it to be cut off")
        time.sleep(1.5)  # longer than it would have had to accept a piece
        heard = all_of(raw)
        assert heard.count(b"slow_consumer") == 1
        last = max(int(number) for number in re.findall(rb'"seq":(\d+)', heard))
        finish(served, conversation, turn)
        rest = follow(served, turn, str(last), most=2)  # a gap comes first: so many frames are not kept
        assert first < last < int(rest[-1].id)


def test_one_that_never_reads_is_hung_up_on_at_last(turnmill_redis: RedisServer) -> None:
    project = Project(agents={"support": Agent("support", FunctionModel(think))})
    with served_gateway(turnmill_redis.url, project, pace=Pace(send_s=0.2, linger_s=1.0)) as served:
        conversation, turn = begun(served, "never")
        with deaf_client(served, stream_of(turn)):
            until(lambda: served.watching == 1, "it to watch")
            many(served, conversation, turn, 20_000, 1000)
            until(lambda: served.watching == 0, "it to be cut off")
            until(lambda: "watchers_cut_off_total 1.0" in served.client.get("/metrics").text, "it to be hung up on")


def test_readers_that_never_read_cost_a_bounded_amount_and_nobody_else_anything(gateway: Served) -> None:
    conversation, turn = begun(gateway, "unread")
    gateway.hand.write(conversation, turn, "first")
    deaf = [deaf_client(gateway, stream_of(turn)), deaf_client(gateway, channel_of(conversation))]
    until(lambda: gateway.watching == 2, "the two that never read")
    before = psutil.Process().memory_info().rss
    many(gateway, conversation, turn, 200_000, 300)
    other_conversation, other_turn = begun(gateway, "others")
    gateway.hand.write(other_conversation, other_turn, "not held up")
    assert len(follow(gateway, other_turn, most=1)) == 1
    until(lambda: gateway.watching == 0, "the two to be cut off")
    grown = psutil.Process().memory_info().rss - before
    assert grown < 40_000_000, f"60 MB of unread frames cost {grown / 1e6:.0f} MB"
    for raw in deaf:
        raw.close()


def test_one_that_was_cut_off_is_told_so_and_resumes(turnmill_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.FrameHub", lambda url: FrameHub(url, queue_frames=50))
    project = Project(agents={"support": Agent("support", FunctionModel(think))})
    with served_gateway(turnmill_redis.url, project) as served:
        conversation, turn = begun(served, "cut")
        with served.client.stream("GET", f"/v1/turns/{turn}/frames") as stream:
            events = event_source(stream)
            served.hand.write(conversation, turn, "first")
            heard = [next(events)]
            served.hand.write(conversation, turn, "x" * 8_000_000)  # stays in the way of what comes after it
            for place in range(200):
                served.hand.write(conversation, turn, str(place))
            heard += list(events)
        assert json.loads(heard[-1].data)["code"] == "slow_consumer"
        assert heard[-1].kind == "error" and heard[-1].id == heard[-2].id, "only stored frames have a number"
        finish(served, conversation, turn)
        rest = follow(served, turn, heard[-1].id)
        texts = [json.loads(event.data).get("text") for event in (*heard[:-1], *rest)]
        assert [text for text in texts if text is not None and len(text) < 10] == ["first", *map(str, range(200))]
        metrics = served.client.get("/metrics").text
        assert "turnmill_gateway_watchers_cut_off_total 1.0" in metrics


def test_a_text_that_cannot_be_taken_back_goes_on_where_it_is_the_same() -> None:
    text = StreamedText()
    assert [text.add(1, piece) for piece in ("one ", "two ")] == ["one ", "two "]
    text.begin_again()
    assert [text.add(1, piece) for piece in ("one", " ", "two three")] == ["", "", "three"]
    text.begin_again()
    assert text.add(1, "another") == "\n\nanother"
    assert text.add(2, "next round") == "\n\nnext round"
    assert text.end(2, "next round, whole") == ", whole"
    assert StreamedText().end(3, "said at once") == "said at once"
