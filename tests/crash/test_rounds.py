"""Rounds that wait for a human, under everything that may happen to their messages and to whoever works on them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import redis

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def client(here: Deployment) -> redis.Redis:
    return redis.Redis.from_url(here.stack.redis.url, decode_responses=True)


def again(message: str, task: str, id_: str, *args: str | int) -> str:
    """A message like this one for another step of the same turn."""
    made = json.loads(message)
    body = json.loads(base64.b64decode(made["body"]))
    body[0] = list(args)
    made["headers"] |= {"task": task, "id": id_}
    made["body"] = base64.b64encode(json.dumps(body).encode()).decode()
    return json.dumps(made)


def taken(here: Deployment) -> None:
    """Wait until no message is left, and all that was taken is done."""
    store = client(here)
    here.until(lambda: not store.exists("plan", "tools", "control") and not store.keys("tm:run:*"), "the messages to be taken")


@pytest.mark.parametrize("point", ["before_claim", "observing", "committed"])
def test_a_worker_killed_in_the_observe_of_a_suspended_round(here: Deployment, name: str, tmp_path: Path, point: str) -> None:
    doomed = here.worker(fault=f"{point}:observe:kill:{tmp_path / 'once'}")
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    assert here.decide(here.waiting_approval(turn)["approval_id"]).status_code == 200
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"] == f"done {name}: paid {name}; wrote {name}w"
    assert here.ledger.effects(name) == here.ledger.effects(f"{name}w") == 1 and here.ledger.asked(name) == 2


def test_a_plan_delivered_twice_at_once_opens_one_round(here: Deployment, name: str) -> None:
    store = client(here)
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})], sleep_s=0.3)
    [plan] = store.lrange("plan", 0, -1)
    store.lpush("plan", plan, plan, plan)
    for _ in range(2):
        here.worker()
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    taken(here)
    assert [one["turn_id"] for one in here.http.get("/v1/approvals").json()["approvals"]].count(turn) == 1
    assert here.decide(approval["approval_id"]).status_code == 200
    assert here.ended(turn)["state"] == "completed"
    assert here.ledger.asked(name) == 2 and here.ledger.effects(name) == here.ledger.effects(f"{name}w") == 1


def test_messages_of_a_suspended_round_delivered_again_change_nothing(here: Deployment, name: str) -> None:
    store = client(here)
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    [plan] = store.lrange("plan", 0, -1)
    steps = [
        again(plan, "turn.plan", f"{turn}.1.plan", "dev", turn, 1),
        again(plan, "turn.tool", f"{turn}.1.tool.0", "dev", turn, 1, 0),
        again(plan, "turn.tool", f"{turn}.1.tool.1", "dev", turn, 1, 1),
        again(plan, "approval.decide", f"{turn}.1.decide.0", "dev", turn, 1, 0),
        again(plan, "turn.observe", f"{turn}.1.observe", "dev", turn, 1),
    ]
    here.worker()
    approval = here.waiting_approval(turn)
    here.until(lambda: [call["state"] for call in here.turn(turn)["calls"]] == ["waiting", "completed"], "the round to wait")
    for step in steps * 2:
        store.lpush("plan", step)
    taken(here)
    assert here.turn(turn)["state"] == "waiting" and here.ledger.effects(name) == 0
    assert here.decide(approval["approval_id"]).status_code == 200
    ended = here.ended(turn)
    frames = here.frames(turn)
    for step in steps * 2:
        store.lpush("plan", step)
    taken(here)
    assert here.turn(turn) == ended and here.frames(turn) == frames and ended["state"] == "completed"
    assert here.ledger.effects(name) == here.ledger.effects(f"{name}w") == 1 and here.ledger.asked(name) == 2


def test_celerys_own_bookkeeping_is_lost_while_a_header_runs(here: Deployment, name: str) -> None:
    here.worker()
    turn = here.submit(name, [("pay", {"key": name, "sleep_s": 1.0}), ("write", {"key": f"{name}w"})])
    assert here.decide(here.waiting_approval(turn)["approval_id"]).status_code == 200
    here.until(lambda: any(call["state"] == "running" and call["name"] == "ledger-pay" for call in here.turn(turn)["calls"]), "it to run")
    store = client(here)
    store.delete(*store.keys("celery-*"))
    ended = here.ended(turn)
    assert ended["state"] == "completed" and [call["state"] for call in ended["calls"]] == ["completed", "completed"]
    assert here.ledger.effects(name) == 1 and here.ledger.asked(name) == 2
