"""A broker beside the store: no commit can ring the bell itself then, so there is an instant to die at between a commit and its message."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from orchestration.testing.servers import redis_server
from tests.crash.conftest import Deployment, ledger_stack, started
from tests.fixtures.ledger import Ledger

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lasting_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for this file, with its broker on a Redis of its own."""
    directory = tmp_path_factory.mktemp("ledger")
    with redis_server(appendonly="always") as store, redis_server(appendonly="always") as broker:
        deployment = started(ledger_stack(store, directory, TURNMILL_BROKER_URL=broker.url), Ledger(directory))
        try:
            yield deployment
        finally:
            deployment.http.close()
            deployment.stack.close()


@pytest.fixture
def apart(lasting_apart: Deployment) -> Iterator[Deployment]:
    """That deployment without any plain worker."""
    yield lasting_apart
    lasting_apart.forget_workers()


@pytest.fixture
def name() -> str:
    return f"n{uuid.uuid4().hex[:8]}"


def broker_of(here: Deployment) -> redis.Redis:
    return redis.Redis.from_url(here.stack.env["TURNMILL_BROKER_URL"], decode_responses=True)


@pytest.mark.parametrize("kind", ["plan", "tool"])
def test_a_worker_killed_between_a_commit_and_its_message_loses_no_turn(apart: Deployment, name: str, tmp_path: Path, kind: str) -> None:
    doomed = apart.worker(fault=f"committed:{kind}:kill:{tmp_path / 'once'}")
    turn = apart.submit(name, [("write", {"key": name}), ("note", {"key": f"{name}n"})])
    apart.until(lambda: not doomed.running, "the worker to die")
    apart.worker()
    ended = apart.ended(turn)
    assert ended["state"] == "completed" and [call["state"] for call in ended["calls"]].count("completed") >= 1
    assert apart.ledger.effects(name) <= 1 and apart.ledger.effects(f"{name}n") == 1
    assert apart.ledger.asked(name) == 2, "a committed reply is not asked for again"


def test_an_approval_is_decided_and_carried_out(apart: Deployment, name: str) -> None:
    apart.worker()
    turn = apart.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    assert apart.decide(apart.waiting_approval(turn)["approval_id"]).status_code == 200
    ended = apart.ended(turn)
    assert [call["state"] for call in ended["calls"]] == ["completed", "completed"] and apart.ledger.effects(name) == 1


def test_messages_that_the_broker_lost_come_back(apart: Deployment, name: str) -> None:
    turns = [apart.submit(f"{name}.{i}", [("write", {"key": f"{name}.{i}"})]) for i in range(5)]
    broker_of(apart).flushall()
    apart.worker()
    for i, turn in enumerate(turns):
        assert apart.ended(turn)["state"] == "completed" and apart.ledger.effects(f"{name}.{i}") == 1


def test_nothing_but_ids_and_tables_is_in_the_broker(apart: Deployment, name: str) -> None:
    apart.submit(name, [("write", {"key": f"{name}-secret"})])
    broker = broker_of(apart)
    apart.until(lambda: broker.llen("plan") == 1, "the message")
    kept = "".join(str(broker.lrange(key, 0, -1)) for key in broker.keys("*") if broker.type(key) == "list")
    assert kept and name not in kept
    assert not broker.keys("tm:*")
