"""The chord of a suspended round, broken at each point where it can break: one round, one body, every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def keys(here: Deployment, pattern: str) -> list[str]:
    return sorted(redis.Redis.from_url(here.stack.redis.url, decode_responses=True).keys(pattern))


@pytest.mark.parametrize("fault", ["chord_claimed", "chord_before_body", "chord_after_body"])
def test_a_worker_killed_while_it_dispatches_the_body(here: Deployment, name: str, tmp_path: Path, fault: str) -> None:
    doomed = here.worker(CELERY_FAULT=f"{fault}:{tmp_path / 'once'}")
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    assert here.decide(approval["approval_id"]).status_code == 200
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and [call["state"] for call in ended["calls"]] == ["completed", "completed"]
    assert here.ledger.effects(name) == here.ledger.effects(f"{name}w") == 1
    assert here.ledger.asked(name) == 2, "one round, one body"
    assert [frame["kind"] for frame in here.frames(turn)].count("done") == 1


def test_a_chord_of_which_half_was_published(here: Deployment, name: str, tmp_path: Path) -> None:
    doomed = here.worker(CELERY_FAULT=f"half_a_chord:{tmp_path / 'once'}")
    turn = here.submit(name, [("write", {"key": f"{name}w"}), ("pay", {"key": name})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    assert here.decide(here.waiting_approval(turn)["approval_id"]).status_code == 200
    ended = here.ended(turn)
    assert ended["state"] == "completed"
    assert here.ledger.effects(name) == here.ledger.effects(f"{name}w") == 1 and here.ledger.asked(name) == 2


def test_celerys_own_bookkeeping_is_lost_while_an_approval_waits(here: Deployment, name: str) -> None:
    here.worker()
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    store = redis.Redis.from_url(here.stack.redis.url, decode_responses=True)
    parked = store.keys("celery-taskset-meta-*")
    assert parked and all(store.ttl(key) == -1 for key in parked if not key.endswith(".c")), "a parked chord never expires"
    store.delete(*store.keys("celery-*"))
    assert here.decide(approval["approval_id"]).status_code == 200
    ended = here.ended(turn)
    assert ended["state"] == "completed" and here.ledger.effects(name) == 1 and here.ledger.asked(name) == 2


def test_a_turns_end_leaves_no_chord_behind(here: Deployment, name: str) -> None:
    here.worker()
    turn = here.submit(name, [("pay", {"key": name}), ("pay", {"key": f"{name}2"})])
    for _ in range(2):
        here.decide(here.waiting_approval(turn)["approval_id"])
    here.ended(turn)
    cancelled = here.submit(f"{name}c", [("pay", {"key": f"{name}c"})])
    here.until(lambda: here.turn(cancelled)["state"] == "waiting", "the turn to wait")
    assert here.http.post(f"/v1/turns/{cancelled}/cancel").status_code == 200
    assert [key for key in keys(here, "celery-taskset-meta-*") if not key.endswith(".c")] == []


def test_a_denied_call_completes_its_chord_too(here: Deployment, name: str) -> None:
    here.worker()
    turn = here.submit(name, [("pay", {"key": name}), ("write", {"key": f"{name}w"})])
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    here.decide(approval["approval_id"], False, note="not today")
    ended = here.ended(turn)
    assert [call["state"] for call in ended["calls"]] == ["denied", "completed"]
    assert "not today" in ended["answer"] and here.ledger.effects(name) == 0
