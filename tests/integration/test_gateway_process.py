"""The gateway as operators start it: `uvicorn gateway.app:app` as a process of its own."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import redis as redis_module
from gateway_stage import Hand, until
from websockets.sync.client import connect

from orchestration.testing.servers import RedisServer

AGENTS = """
from orchestration.core.agent import Agent

class Silent:
    model = "silent"
    def complete(self, messages, *, tools=None):
        raise AssertionError

support = Agent("support", Silent())
"""


@pytest.fixture
def environment(turnmill_redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "gateway_shop.py").write_text(AGENTS, encoding="utf-8")
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    return {**os.environ, "PYTHONPATH": path, "TURNMILL_REDIS_URL": turnmill_redis.url, "TURNMILL_AGENTS": "gateway_shop"}


@contextmanager
def uvicorn(*options: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "uvicorn", "gateway.app:app", *options]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_without_keys_it_does_not_start_on_an_open_address(environment: dict[str, str]) -> None:
    for options, more in ((("--host", "0.0.0.0"), {}), ((), {"TURNMILL_HOST": "0.0.0.0"}), ((), {"UVICORN_HOST": "::"})):
        with uvicorn("--port", str(free_port()), *options, env={**environment, **more}) as process:
            told, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "without API keys the gateway serves loopback only" in told


def test_a_wrong_setting_is_told_in_one_line(environment: dict[str, str]) -> None:
    for wrong, told in (
        ({"TURNMILL_RATE_BURST": "many"}, "TURNMILL_RATE_BURST"),
        ({"TURNMILL_JWT_JWKS": "/no/such/file"}, "TURNMILL_JWT_JWKS"),
    ):
        with uvicorn("--port", str(free_port()), env={**environment, **wrong}) as process:
            output, _ = process.communicate(timeout=60)
        lines = [line for line in output.splitlines() if "turnmill:" in line]
        assert process.returncode != 0
        assert len(lines) == 1 and told in lines[0], output
        assert "Traceback" not in output


def test_a_redis_that_throws_away_what_it_took_is_refused(environment: dict[str, str]) -> None:
    with RedisServer(appendonly="off") as server:
        redis = Hand(server.url).redis
        redis.config_set("maxmemory-policy", "allkeys-lru")
        with uvicorn("--port", str(free_port()), env={**environment, "TURNMILL_REDIS_URL": server.url}) as process:
            output, _ = process.communicate(timeout=60)
        redis.close()
    assert process.returncode != 0
    assert "turnmill: Redis evicts keys" in output and "Traceback" not in output


def test_no_token_and_no_ticket_is_in_a_log_line(environment: dict[str, str]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    keys = '[{"key": "SECRET-OF-SOMEBODY", "sub": "a", "tenant": "t", "scopes": ["turns:read", "turns:write"]}]'
    with uvicorn("--port", str(port), env={**environment, "TURNMILL_API_KEYS": keys}) as process:
        until(lambda: answers(url) or process.poll() is not None, "the gateway to answer", patience_s=60)
        header = {"Authorization": "Bearer SECRET-OF-SOMEBODY"}
        made = httpx.post(f"{url}/v1/agents/support/turns", json={"input": "SECRET-INPUT"}, headers=header).json()
        ticket = httpx.post(f"{url}/v1/tickets", headers=header).json()["ticket"]
        path = f"{url}/v1/turns/{made['turn_id']}/frames"
        assert httpx.get(path, params={"token": "SECRET-OF-SOMEBODY"}).status_code == 401
        assert httpx.get(path, params={"access_token": "SECRET-OF-SOMEBODY"}).status_code == 401
        with httpx.stream("GET", path, params={"ticket": ticket}) as stream:
            assert stream.status_code == 200
            assert next(stream.iter_lines())
        again = httpx.post(f"{url}/v1/tickets", headers=header).json()["ticket"]
        with connect(f"ws://127.0.0.1:{port}/v1/agents/support/channel?ticket={again}") as channel:
            assert "conversation_id" in channel.recv()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert "/frames?…" in output and "/channel?…" in output
    for secret in ("SECRET", ticket, again):
        assert secret not in output


def test_a_stop_ends_open_streams_at_once(environment: dict[str, str], turnmill_redis: RedisServer) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with uvicorn("--port", str(port), env=environment) as process:
        until(lambda: answers(url) or process.poll() is not None, "the gateway to answer", patience_s=60)
        hand = Hand(turnmill_redis.url)
        number = hand.write("cv_stop", "tn_stop", "before the stop")
        hand.redis.hset(hand.key("cv_stop"), "agent", "support")
        with httpx.stream("GET", f"{url}/v1/conversations/cv_stop/frames", timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines) == f"id: {number}"
            process.send_signal(signal.SIGTERM)
            list(lines)
        process.communicate(timeout=60)
        hand.close()
    assert process.returncode in (0, -signal.SIGTERM)


def test_more_watchers_come_in_than_the_usual_bound_on_open_files(environment: dict[str, str], turnmill_redis: RedisServer) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))  # a child begins with it
    try:
        with uvicorn("--port", str(port), env=environment) as process, ExitStack() as open_streams:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            until(lambda: answers(url) or process.poll() is not None, "the gateway to answer", patience_s=60)
            with redis_module.Redis.from_url(turnmill_redis.url) as client:
                client.hset("tm:dev:conv:cv_many", "agent", "support")
            for _ in range(400):
                one = open_streams.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                one.sendall(b"GET /v1/conversations/cv_many/frames HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert one.recv(12) == b"HTTP/1.1 200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_client_that_does_not_read_does_not_hold_up_a_stop(environment: dict[str, str], turnmill_redis: RedisServer) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with uvicorn("--port", str(port), env=environment) as process, socket.socket() as deaf:
        until(lambda: answers(url) or process.poll() is not None, "the gateway to answer", patience_s=60)
        hand = Hand(turnmill_redis.url)
        for _ in range(4):
            hand.write("cv_deaf", "tn_deaf", "x" * 8_000_000)
        hand.redis.hset(hand.key("cv_deaf"), "agent", "support")
        hand.close()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /v1/conversations/cv_deaf/frames HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: 'frames_sent_total{transport="sse"} 2.0' in httpx.get(f"{url}/metrics").text, "a frame that is not taken")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM) and "Application shutdown complete" in output
