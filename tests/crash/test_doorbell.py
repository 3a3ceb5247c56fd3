"""The broker is a doorbell: messages that get lost, come twice, or come late change nothing."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable

import pytest
import redis

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def client(here: Deployment) -> redis.Redis:
    return redis.Redis.from_url(here.stack.redis.url, decode_responses=True)


def test_a_busy_worker_killed_twenty_times_loses_no_turn(here: Deployment, name: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    turns = []
    doomed = here.worker()
    for kill in range(20):
        turns += [here.submit(f"{name}.{kill}.{i}", [("note", {"key": f"{name}.{kill}.{i}"})]) for i in range(8)]
        wanted = here.ledger.directory / "model"
        lines = len(wanted.read_text().splitlines()) if wanted.exists() else 0
        here.until(lambda lines=lines: len(here.ledger.lines("model")) > lines, "the worker to be busy")
        for _ in range(dice.randrange(3)):
            here.turn(turns[-1])  # a short while
        doomed.kill()
        doomed.start()
    doomed.wait_ready()
    for turn in turns:
        assert here.ended(turn)["state"] == "completed"
    for kill in range(20):
        for i in range(8):
            assert here.ledger.effects(f"{name}.{kill}.{i}") == 1
    assert here.ledger.lines("faults") == []


def test_messages_that_are_lost_come_back(here: Deployment, name: str) -> None:
    turns = [here.submit(f"{name}.{i}", [("write", {"key": f"{name}.{i}"})]) for i in range(5)]
    client(here).delete("plan")
    here.worker()
    for i, turn in enumerate(turns):
        assert here.ended(turn)["state"] == "completed"
        assert here.ledger.effects(f"{name}.{i}") == 1


def test_a_backlog_is_not_doubled(here: Deployment, name: str) -> None:
    for i in range(40):
        here.submit(f"{name}.{i}", conversation_id=f"{name}-{i}")
    store = client(here)
    assert store.llen("plan") == 40
    # as if they had waited for an hour already
    for step, sent in store.zrange("tm:sent:plan", 0, -1, withscores=True):
        store.zadd("tm:sent:plan", {step: sent - 3_600_000})
        store.hset("tm:claimed", "plan", str(int(sent - 3_600_000)))
    looks = int(store.info("commandstats")["cmdstat_smembers"]["calls"])
    here.until(lambda: int(store.info("commandstats")["cmdstat_smembers"]["calls"]) > looks + 10, "the sweeps to look ten times")
    assert store.llen("plan") == 40
    here.worker()
    here.until(lambda: store.llen("plan") == 0 and not store.zcard("tm:sent:plan"), "the backlog to be worked off")


def test_every_message_delivered_again_later_changes_nothing(here: Deployment, name: str) -> None:
    store = client(here)
    here.submit(f"{name}.0", [("write", {"key": f"{name}.x"}), ("write", {"key": f"{name}.y"})])
    plan = store.lindex("plan", 0)
    here.worker()
    turn = json.loads(plan)["headers"]["id"].split(".")[0]
    ended = here.ended(turn)
    frames = here.frames(turn)
    template = json.loads(plan)
    for task, args, id_ in [
        ("turn.plan", ["dev", turn, 1], f"{turn}.1.plan"),
        ("turn.tool", ["dev", turn, 1, 0], f"{turn}.1.tool.0"),
        ("turn.tool", ["dev", turn, 1, 1], f"{turn}.1.tool.1"),
        ("turn.observe", ["dev", turn, 1], f"{turn}.1.observe"),
        ("turn.plan", ["dev", turn, 2], f"{turn}.2.plan"),
    ] * 2:
        body = json.loads(base64.b64decode(template["body"]))
        body[0] = args
        template["headers"] |= {"task": task, "id": id_}
        template["body"] = base64.b64encode(json.dumps(body).encode()).decode()
        store.lpush("tools" if task == "turn.tool" else "plan", json.dumps(template))
    here.until(lambda: store.llen("plan") == 0 and store.llen("tools") == 0, "the copies to be taken")
    here.ended(here.submit(f"{name}.after"))
    assert here.turn(turn) == ended and here.frames(turn) == frames
    assert here.ledger.effects(f"{name}.x") == here.ledger.effects(f"{name}.y") == 1
    assert here.ledger.asked(f"{name}.0") == 2


def test_a_broker_connection_cut_in_mid_step_has_one_effect(here: Deployment, name: str) -> None:
    here.worker()
    store = client(here)
    turn = here.submit(name, [("write", {"key": name, "sleep_s": 1.5})], sleep_s=1.0)
    here.until(lambda: here.ledger.asked(name) == 1, "the model to be asked")
    store.client_kill_filter(_type="normal", skipme=True)
    here.until(lambda: here.turn(turn)["calls"], "the tool to be asked for")
    store.client_kill_filter(_type="normal", skipme=True)
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects(name) == 1 and here.ledger.asked(name) == 2


def test_a_step_longer_than_any_visibility_timeout_runs_once(deploy: Deploy) -> None:
    here = deploy(workers=2, TURNMILL_LEASE_S="1")
    turn = here.submit("long", sleep_s=8)
    ended = here.ended(turn)
    assert ended["state"] == "completed" and here.ledger.asked("long") == 1
    store = client(here)
    assert not store.exists("unacked") and not store.exists("unacked_index"), "nothing waits for redelivery"


def test_messages_carry_ids_only(here: Deployment, name: str) -> None:
    store = client(here)
    here.submit(f"{name}-canary", [("write", {"key": f"{name}-secret"})])
    seen = "".join(store.lrange("plan", 0, -1))
    assert seen and name not in seen
    message = json.loads(store.lindex("plan", 0))
    assert len(json.dumps(message)) < 10_000
