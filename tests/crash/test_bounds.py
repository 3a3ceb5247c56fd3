"""What must go on whatever else happens: recovery without a single process that it depends on, and decisions and ends
while every worker is busy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import redis

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def test_the_hub_restarting_under_running_model_calls_repeats_none(deploy: Deploy) -> None:
    here = deploy()
    here.stack.threads = 64
    here.worker()
    turns = [here.submit(f"t{i}", [("note", {"key": f"e{i}"})], sleep_s=5) for i in range(64)]
    here.until(lambda: len(here.ledger.lines("model")) == 64, "all model calls to run")
    here.stack["mesh"].kill()
    here.stack["mesh"].start().wait_ready()
    for i, turn in enumerate(turns):
        assert here.ended(turn)["state"] == "completed"
        assert here.ledger.asked(f"t{i}") == 2 and here.ledger.effects(f"e{i}") == 1


def test_recovery_survives_the_death_of_its_leader(here: Deployment, name: str) -> None:
    here.worker("control")
    doomed = here.worker()
    turn = here.submit(name, sleep_s=4)
    here.until(lambda: here.ledger.asked(name) == 1, "the model to be asked")
    here.stack["control"].kill()
    doomed.kill()
    here.worker()
    assert here.ended(turn)["state"] == "completed"


def test_without_a_mesh_the_lease_tells_a_dead_worker(deploy: Deploy) -> None:
    here = deploy(TURNMILL_LEASE_S="2")
    here.stack["mesh"].stop()
    doomed = here.worker()
    turn = here.submit("a", sleep_s=3)
    here.until(lambda: here.ledger.asked("a") == 1, "the model to be asked")
    doomed.kill()
    here.worker()
    assert here.ended(turn)["state"] == "completed" and here.ledger.asked("a") == 2


def test_decisions_expiry_and_cancel_go_on_while_every_worker_is_busy(deploy: Deploy) -> None:
    here = deploy(GATE_TIMEOUT_S="4")
    here.worker()
    gated = [here.submit(f"g{i}", [("pay", {"key": f"p{i}"})]) for i in range(2)]
    here.until(lambda: all(here.turn(turn)["state"] == "waiting" for turn in gated), "the approvals")
    busy = [here.submit(f"b{i}", sleep_s=15) for i in range(8)]
    here.until(lambda: all(here.ledger.asked(f"b{i}") == 1 for i in range(8)), "the worker to be full")
    assert here.http.post(f"/v1/turns/{busy[0]}/cancel").json()["state"] == "cancelled"
    here.until(lambda: here.turn(gated[0])["calls"][0]["state"] == "expired", "the approval to expire")
    assert here.decide(here.turn(gated[1])["calls"][0]["approval_id"]).status_code == 410
    assert here.turn(busy[1])["state"] == "running", "all that happened while the worker was full"
    assert here.ledger.lines("effects") == []


def test_recovery_decisions_expiry_and_cancel_go_on_beside_64_model_calls(deploy: Deploy) -> None:
    here = deploy(GATE_TIMEOUT_S="20")
    doomed = here.worker()
    gated = [here.submit(f"g{i}", [("pay", {"key": f"p{i}"})]) for i in range(2)]
    here.until(lambda: all(here.turn(turn)["state"] == "waiting" for turn in gated), "the approvals")
    orphan = here.submit("orphan", sleep_s=300)
    here.until(lambda: here.ledger.asked("orphan") == 1, "the model to be asked")
    here.stack.threads = 64
    here.worker()
    busy = [here.submit(f"b{i}", sleep_s=300) for i in range(70)]
    asked = [f"b{i}" for i in range(70)]
    here.until(lambda: sum(here.ledger.asked(name) for name in asked) == 70, "every thread to be at a model")
    store = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    # of the 8 threads of the first worker one has the orphan and the others took some of the 70
    held = {turn for turn in [orphan, *busy] if any(f"/{turn}/" in step for step in steps_on(store, doomed.pid))}
    assert orphan in held
    doomed.kill()
    here.until(lambda: store.llen("plan") + len(waiting_for_a_worker(store, held)) >= 1, "its steps to be sent again")
    approval = here.turn(gated[1])["calls"][0]["approval_id"]
    assert here.decide(approval).status_code == 200
    here.until(lambda: store.llen("tools") == 1, "the decided call to wait for a worker")
    assert here.http.post(f"/v1/turns/{busy[0]}/cancel").json()["state"] == "cancelled"
    here.until(lambda: here.turn(gated[0])["calls"][0]["state"] == "expired", "the approval to expire")
    assert here.ledger.effects("p0") == here.ledger.effects("p1") == 0, "all that happened while no worker was free"
    here.stack.threads = 8
    here.worker()
    here.until(lambda: here.ledger.asked("orphan") == 2, "a free worker to take what the dead one had")
    assert here.ended(gated[1])["state"] == "completed" and here.ledger.effects("p1") == 1


def steps_on(store: redis.Redis, pid: int) -> list[str]:
    """The steps that the worker process of this id has claimed."""
    return [step for key in store.keys(f"tm:run:*.{pid}.*") for step in store.smembers(key)]


def waiting_for_a_worker(store: redis.Redis, turns: set[str]) -> list[str]:
    """Steps of these turns that were sent and that nobody has claimed yet."""
    return [step for step in store.zrange("tm:sent:plan", 0, -1) if step.split("/")[1] in turns]


def test_a_deaf_worker_ends_so_that_its_supervisor_restarts_it(here: Deployment, name: str, tmp_path: Path) -> None:
    deaf = here.worker(CELERY_FAULT=f"deaf:{tmp_path / 'deaf'}", TURNMILL_DEAF_AFTER_S="3")
    assert here.ended(here.submit(f"{name}.0"))["state"] == "completed"
    (tmp_path / "deaf").touch()
    turns = [here.submit(f"{name}.{i}") for i in range(1, 4)]
    here.until(lambda: not deaf.running, "the deaf worker to end")
    assert "lives but takes nothing" in deaf.log()
    here.worker()
    for turn in turns:
        assert here.ended(turn)["state"] == "completed"


def test_two_hundred_submissions_at_once_run_one_by_one_in_order(deploy: Deploy) -> None:
    here = deploy(workers=2, TURNMILL_MAX_WAITING_TURNS="500")
    second = here.stack.add_replica("gateway").env["TURNMILL_PUBLIC_URL"]
    placed: list[tuple[int, str]] = []

    def submit(url: str, numbers: range) -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            for i in numbers:
                body = {"input": json.dumps({"name": f"t{i}"}), "conversation_id": "busy"}
                answer = http.post("/v1/agents/ledger/turns", json=body, headers={"Idempotency-Key": f"k{i}"})
                placed.append((i, answer.json()["turn_id"]))

    threads = [threading.Thread(target=submit, args=((here.stack.url, second)[n % 2], range(n * 25, n * 25 + 25))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({turn for _, turn in placed}) == 200
    for _, turn in placed:
        assert here.ended(turn)["state"] == "completed"
    history = here.http.get("/v1/conversations/busy/history").json()["history"]
    inputs = [entry["turn_id"] for entry in history if entry["dir"] == "in"]
    assert len(inputs) == 200
    assert [entry["dir"] for entry in history] == ["in", "out"] * 200, "one turn at a time"
    assert here.ledger.lines("faults") == []
