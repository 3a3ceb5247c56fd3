"""What those who run the gateway look at: the console page, metrics, readiness, and what is checked of Redis at start."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from gateway_stage import Hand, Served, emptied, served_gateway
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import create_app
from orchestration import Agent
from orchestration.core.errors import Misconfigured
from orchestration.models.scripted import FunctionModel
from orchestration.project import Project
from orchestration.settings import Settings
from orchestration.state.checks import check_store
from orchestration.state.store import Store
from orchestration.testing.servers import RedisServer


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    project = Project(agents={"support": Agent("support", FunctionModel(lambda messages: "fine"))})
    with served_gateway(emptied(turnmill_redis), project, working=True) as served:
        yield served


# The console


class Page(HTMLParser):
    """What a page is made of, as far as its policy cares."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids.add(named.get("id") or "")
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style") and data.strip():
            self.inline.append(data)


def test_the_console_needs_nothing_that_its_policy_forbids(gateway: Served) -> None:
    answer = gateway.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    page = Page()
    page.feed(answer.text)
    assert page.inline == []
    assert sorted(page.loaded) == ["/console/console.css", "/console/console.js"]
    script = gateway.client.get("/console/console.js")
    style = gateway.client.get("/console/console.css")
    assert (script.headers["content-type"], style.headers["content-type"]) == ("text/javascript; charset=utf-8", "text/css; charset=utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://", "localStorage"):
        assert word not in script.text, word
    assert "url(" not in style.text and "@import" not in style.text
    assert set(re.findall(r'\bby\("([a-z-]+)"\)', script.text)) <= page.ids


def test_the_console_shows_nothing_by_itself(turnmill_redis: RedisServer) -> None:
    keys = json.dumps([{"key": "key-of-an-operator", "sub": "op", "tenant": "t", "scopes": ["approvals:read"]}])
    with served_gateway(turnmill_redis.url, Project(), api_keys=keys) as served:
        assert served.client.get("/").status_code == 200
        assert served.client.get("/v1/approvals").status_code == 401
        answer = served.client.get("/v1/approvals", headers={"Authorization": "Bearer key-of-an-operator"})
        assert answer.json() == {"approvals": [], "cursor": None}


# Metrics


def measured(served: Served) -> dict[tuple[str, tuple[str, ...]], float]:
    answer = served.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[(sample.name, tuple(sample.labels[name] for name in sorted(sample.labels)))] = sample.value
    return found


def test_answers_are_counted_by_their_route_and_not_by_what_was_asked(gateway: Served) -> None:
    before = measured(gateway)
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "x"}).json()
    for _ in range(3):
        gateway.client.get(f"/v1/turns/{made['turn_id']}")
    gateway.client.get("/v1/turns/tn_none")
    gateway.client.get("/v1/no/such/route")
    gateway.client.post("/v1/agents/support/turns", content=b"{")
    after = measured(gateway)

    def counted(*labels: str) -> float:
        key = ("turnmill_gateway_requests_total", labels)
        return after.get(key, 0) - before.get(key, 0)

    assert counted("GET", "/v1/turns/{turn_id}", "200") == 3
    assert counted("GET", "/v1/turns/{turn_id}", "404") == 1
    assert counted("POST", "/v1/agents/{agent}/turns", "202") == 1
    assert counted("any", "none", "404") == 1
    assert counted("any", "none", "400") == 1, "a body that cannot be read never reaches a route"
    assert not [key for key in after if made["turn_id"] in str(key) or "support" in str(key)]


def test_streams_and_channels_are_counted_while_they_are_open(gateway: Served) -> None:
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "x"}).json()
    conversation = f"/v1/conversations/{made['conversation_id']}/frames"
    with gateway.client.stream("GET", conversation) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        open_ = measured(gateway)
        assert open_[("turnmill_gateway_watchers", ())] == 1
        assert open_[("turnmill_gateway_conversations_watched", ())] == 1
        assert open_[("turnmill_gateway_frames_sent_total", ("sse",))] >= 1
    assert ("process_resident_memory_bytes", ()) in open_


# Redis


@pytest.fixture(scope="module")
def bare_redis() -> Iterator[RedisServer]:
    with RedisServer(appendonly="off") as server:
        yield server


def test_a_redis_without_a_file_is_warned_about(bare_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(Settings(redis_url=bare_redis.url))
    with caplog.at_level(logging.WARNING):
        check_store(store)
    assert "append-only" in caplog.text
    caplog.clear()
    check_store(store, warn=False)
    assert not caplog.text
    store.close()


def test_a_redis_that_evicts_is_refused_and_makes_a_gateway_unready(bare_redis: RedisServer) -> None:
    redis = Hand(bare_redis.url).redis
    with served_gateway(bare_redis.url, Project()) as served:
        assert served.client.get("/readyz").json()["status"] == "ready"
        for policy in ("allkeys-lru", "volatile-ttl"):
            redis.config_set("maxmemory-policy", policy)
            with pytest.raises(Misconfigured, match=policy):
                check_store(served.ports.store)
            ready = served.client.get("/readyz")
            assert (ready.status_code, ready.json()["checks"]["state"]) == (503, "Misconfigured")
        redis.config_set("maxmemory-policy", "noeviction")
        assert served.client.get("/readyz").status_code == 200
    redis.close()


def test_a_redis_that_tells_nothing_of_itself_is_taken_with_a_warning(bare_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    redis = Hand(bare_redis.url).redis
    redis.execute_command("ACL", "SETUSER", "narrow", "on", ">word", "~*", "&*", "+@all", "-info")
    store = Store(Settings(redis_url=bare_redis.url.replace("redis://", "redis://narrow:word@")))
    with caplog.at_level(logging.WARNING):
        check_store(store)
    assert "noeviction" in caplog.text and "word" not in caplog.text
    store.close()
    redis.close()


# Settings


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"cors_origins": ("*",)}, "TURNMILL_CORS_ORIGINS"),
        ({"cors_origins": ("https://app.example.com/path",)}, "TURNMILL_CORS_ORIGINS"),
        ({"trusted_proxies": ("everybody",)}, "TURNMILL_TRUSTED_PROXIES"),
        ({"public_url": "turnmill.example.com"}, "TURNMILL_PUBLIC_URL"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(Misconfigured, match=name):
        create_app(Settings(**settings))
