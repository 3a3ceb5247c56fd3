"""Many approvals at once on a real Redis: expiring together, listed and decided while they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestration import Agent, Gate
from orchestration.actions import read
from orchestration.testing.servers import RedisServer
from tests.fixtures.approvals import OnRedis, Refunds, ran, refund, sweep

WAITING = 300


@pytest.fixture
def here(turnmill_redis: RedisServer) -> Iterator[OnRedis]:
    ran.clear()
    made = OnRedis(turnmill_redis.url, Agent("support", Refunds(), tools=[refund], approvals={"billing/refund": Gate(timeout_s=3600)}))
    made.ports.store.client.flushdb()
    made.ports.lease.register(instead_of=made.ports.lease.process)
    for _ in range(WAITING):
        made.submit("support", "refund")
    made.run()
    yield made
    made.close()


def test_many_that_expire_together_are_all_over_after_a_few_looks(here: OnRedis) -> None:
    client = here.ports.store.client
    ids = [one["approval_id"] for one in read.approvals(here.ports, "dev", limit=1000)["approvals"]]
    assert len(ids) == WAITING
    with client.pipeline(transaction=False) as pipe:
        for id_ in ids:
            pipe.zadd("tm:due", {f"expire:dev/{id_}": 1})
            pipe.hset(f"tm:dev:ap:{id_}", "expires_at", "1")
        pipe.execute()
    looks = 0
    while here.approvals():
        sweep(here)
        looks += 1
        assert looks <= 5
    here.run()
    assert ran == [] and read.approvals(here.ports, "dev", "expired", limit=1000)["cursor"] is None
    assert len(read.approvals(here.ports, "dev", "expired", limit=1000)["approvals"]) == WAITING
    assert client.zcard("tm:due") == 0


def test_the_work_of_a_decision_and_of_a_page_does_not_grow_with_what_waits(here: OnRedis) -> None:
    """Counted in commands of Redis, which no busy machine changes."""

    def commands(work: object) -> int:
        client = here.ports.store.client
        before: dict[str, int] = client.info("stats")  # type: ignore[assignment]
        assert callable(work)
        work()
        after: dict[str, int] = client.info("stats")  # type: ignore[assignment]
        return int(after["total_commands_processed"]) - int(before["total_commands_processed"])

    first = read.approvals(here.ports, "dev", limit=10)
    many = commands(lambda: read.approvals(here.ports, "dev", limit=10, cursor=first["cursor"]))
    oldest = first["approvals"][0]["approval_id"]
    decide_many = commands(lambda: here.decide(oldest, False))
    for one in read.approvals(here.ports, "dev", limit=1000)["approvals"][:-11]:
        here.decide(one["approval_id"], False)
    few = commands(lambda: read.approvals(here.ports, "dev", limit=10))
    decide_few = commands(lambda: here.decide(read.approvals(here.ports, "dev", limit=1)["approvals"][0]["approval_id"], False)) - 2
    assert many <= few + 2 and decide_many <= decide_few + 4
