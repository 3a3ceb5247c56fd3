"""A step's message is the same whether a commit's script pushes it or Celery publishes it: a worker cannot tell them apart."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
import redis
from celery import signals

from orchestration.core.ids import StepId, StepKind
from orchestration.queue.sender import CeleryQueue
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.testing.servers import redis_server
from workers import app as workers_app

STEPS = [
    StepId("acme", "tn_1", 1, StepKind.PLAN),
    StepId("acme", "tn_1", 3, StepKind.PLAN),
    StepId("acme", "tn_1", 2, StepKind.TOOL, 4),
    StepId("acme", "tn_1", 2, StepKind.OBSERVE),
]


def _read(message: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(message)
    read["body"] = json.loads(base64.b64decode(read["body"]))
    assert len(read["properties"].pop("delivery_tag")) == 36
    return read


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    with redis_server() as server:
        app = workers_app.make_app(Settings(redis_url=server.url))
        monkeypatch.setattr(workers_app, "app", app)
        settings = Settings(redis_url=server.url, celery_app="workers.app:app")
        yield CeleryQueue(settings, Store(settings)), redis.Redis.from_url(server.url, decode_responses=True)
        app.close()


def test_a_message_that_a_script_pushes_is_the_one_that_celery_would_publish(queue: Any) -> None:
    sender, client = queue
    with contextlib.closing(client):
        for step in STEPS:
            rung = sender.ring([step])
            name, message = rung[str(step)]
            sender.send([step], headers=())
            assert _read(message) == _read(client.rpop(name)), step
            again = sender.ring([step])[str(step)][1]
            assert json.loads(again)["properties"]["delivery_tag"] != json.loads(message)["properties"]["delivery_tag"]


def test_who_listens_to_celerys_publishing_hears_every_message(queue: Any) -> None:
    sender, client = queue

    def heard(**_: Any) -> None: ...

    assert sender.ring(STEPS)
    signals.before_task_publish.connect(heard, weak=False)
    try:
        assert sender.ring(STEPS) == {}
    finally:
        signals.before_task_publish.disconnect(heard)
        client.close()
