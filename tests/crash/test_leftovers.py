"""What stays in Redis when all is done: what is documented, each with an end of its own, and nothing of those who died."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from orchestration.testing.servers import RedisServer
from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]

#: What may stay without an end: as many as there are tenants, queues or living processes, and no more.
LASTING = (
    r"tm:dev:(aps|waiting)",
    r"tm:dev:aps:\w+(:ledger)?",  # indexes, trimmed by age
    r"tm:dev:audit",  # kept for TURNMILL_AUDIT_KEPT_S
    r"tm:claimed",
    r"tm:leases",
    r"_kombu\.binding(_permanent)?\.(plan|tools|control)",
    r"_kombu\.binding_deadlines",
)

#: What goes by itself.
PASSING = (
    r"tm:dev:turn:tn_\w+",
    r"tm:dev:conv:cv_\w+(:log|:frames)?",
    r"tm:dev:conv:\w+(:log|:frames)?",
    r"tm:dev:ap:ap_\w+",
    r"tm:dev:idem:.+",
    r"tm:idem:(host:)?[0-9a-f]+",
    r"tm:leader:\w+",
    r"tm:ask:.+",
    r"celery-taskset-meta-tn_\w+\.\d+\.c",
    r"[0-9a-f-]+\.reply\.celery\.pidbox",
    r"_kombu\.binding\.reply\.celery\.pidbox",
)

#: Asks all workers whether they live, and is dead before they answer.
ASKS_AND_DIES = """
import os
from kombu.pidbox import Mailbox
from workers.app import app
Mailbox._collect = lambda *_, **__: os._exit(0)
app.control.inspect(timeout=5).ping()
"""


def left_in(server: RedisServer) -> dict[str, int]:
    """Every key, with its seconds to live; -1 for none."""
    client = redis.Redis.from_url(server.url, decode_responses=True)
    return {key: client.ttl(key) for key in client.scan_iter("*", count=1000)}


def check(left: dict[str, int]) -> None:
    unknown = [key for key in left if not any(re.fullmatch(pattern, key) for pattern in (*LASTING, *PASSING))]
    assert unknown == []
    endless = [key for key, ttl in left.items() if ttl == -1 and not any(re.fullmatch(pattern, key) for pattern in LASTING)]
    assert [key for key in endless if "binding.reply" not in key] == []


def test_nothing_without_an_end_stays_of_turns_of_every_kind(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy(workers=1, GATE_TIMEOUT_S="3600")
    plain = here.submit("plain", [("write", {"key": "a"}), ("note", {"key": "b"})], tokens=3)
    failing = here.submit("failing", [("refuse", {"key": "c"})], faults=1)
    first = here.submit("gated", [("pay", {"key": "d"}), ("write", {"key": "e"})], conversation_id="mine")
    queued = here.submit("queued", conversation_id="mine")
    joined = here.http.post(
        "/v1/agents/ledger/turns", json={"input": '{"name": "joined"}', "conversation_id": "mine", "on_busy": "steer"}
    ).json()["turn_id"]
    assert joined == first
    denied = here.submit("denied", [("pay", {"key": "f"})])
    cancelled = here.submit("cancelled", [("pay", {"key": "g"}), ("write", {"key": "h"})])
    answer = here.http.post("/v1/agents/ledger/turns", json={"input": '{"name": "keyed"}'}, headers={"Idempotency-Key": "k"})
    here.decide(here.waiting_approval(first)["approval_id"])
    here.decide(here.waiting_approval(denied)["approval_id"], False)
    here.until(lambda: here.turn(cancelled)["state"] == "waiting", "the turn to wait")
    here.http.post(f"/v1/turns/{cancelled}/cancel").raise_for_status()
    doomed = here.worker(fault=f"asked:tool:kill:{tmp_path / 'once'}")
    unlucky = [here.submit(f"unlucky{i}", [("write", {"key": f"i{i}"})]) for i in range(8)]
    here.until(lambda: not doomed.running, "the worker to die")
    for turn in (plain, failing, first, queued, denied, cancelled, answer.json()["turn_id"], *unlucky):
        here.ended(turn)
    client = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    passing = ("tm:run:*", "tm:deposed", "tm:unsent", "tm:sent:*", "tm:due", "plan", "tools", "control", "unacked*", "celery-task-meta-*")
    here.until(lambda: not [key for pattern in passing for key in client.keys(pattern)], "all to be taken, sent and done")
    check(left_in(here.stack.redis))
    assert client.get("tm:dev:waiting") == "0"
    assert client.zcard("tm:leases") == 2, "one lease for each living process"


def test_a_header_sent_again_after_its_turns_end_leaves_nothing(deploy: Deploy) -> None:
    here = deploy()
    turn = here.submit("a", [("pay", {"key": "a"})])
    worker = here.worker()
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    client = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    worker.stop()
    here.decide(approval["approval_id"])
    here.until(lambda: client.llen("tools") == 1 and client.exists("tm:sent:tools"), "the header to be sent again")
    here.http.post(f"/v1/turns/{turn}/cancel").raise_for_status()
    # somebody who read the step before the turn ended passes it on now
    client.zadd("tm:unsent", {f"dev/{turn}/1/tool/0": 0})
    here.until(lambda: client.llen("tools") == 2, "it to be sent once more")
    here.worker()
    here.until(lambda: not client.exists("tools", "plan", "tm:unsent", "tm:sent:tools"), "all to be taken")
    assert [key for key in client.keys("celery-taskset-meta-*") if not key.endswith(".c")] == []
    check(left_in(here.stack.redis))


def test_answers_to_somebody_who_has_left_go_by_themselves(here: Deployment) -> None:
    here.worker()
    client = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    here.stack.run(sys.executable, "-c", ASKS_AND_DIES).check_returncode()
    answers = here.until(lambda: client.keys("*-*.reply.celery.pidbox"), "an answer that nobody waits for any more")
    assert [key for key in answers if not 0 < client.ttl(key) <= 60] == []


def test_killed_workers_leave_no_entries_in_tables(here: Deployment) -> None:
    client = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    for _ in range(3):
        doomed = here.worker()
        doomed.kill()
        here.stack.remove(doomed.name)
    assert client.keys("_kombu.binding.celeryev") == client.keys("_kombu.binding.celery.pidbox") == []
    here.until(lambda: client.zcard("tm:leases") == 1, "the dead to lose their leases")
    assert client.keys("tm:run:*") == []
