"""kill -9 of a worker at chosen instants: nothing is lost, and no effect happens twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", ["before_claim", "streaming", "replied", "committed"])
def test_a_worker_killed_in_a_plan_loses_no_turn(here: Deployment, name: str, tmp_path: Path, point: str) -> None:
    # of plan steps alone: the commit rings for the tool step, and the worker that dies must not have taken that too by then
    doomed = here.worker(fault=f"{point}:plan:kill:{tmp_path / 'once'}", queues="plan")
    turn = here.submit(name, [("write", {"key": name})], tokens=3)
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"].startswith(f"done {name}")
    assert here.ledger.effects(name) == 1
    assert here.ledger.asked(name) == (2 if point in ("before_claim", "committed") else 3), "a committed reply is not asked for again"
    kinds = [frame["kind"] for frame in here.frames(turn)]
    assert kinds.count("done") == 1 and kinds.count("tool_call") == 1


@pytest.mark.parametrize(("point", "effects"), [("before_claim", 1), ("claimed", 0), ("asked", 1), ("committed", 1)])
def test_a_worker_killed_around_a_tool_call_never_acts_twice(here: Deployment, name: str, tmp_path: Path, point: str, effects: int) -> None:
    doomed = here.worker(fault=f"{point}:tool:kill:{tmp_path / 'once'}")
    turn = here.submit(name, [("write", {"key": name})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed"
    assert here.ledger.effects(name) == effects
    expected = "unknown_outcome" if point in ("claimed", "asked") else "completed"
    assert ended["calls"][0]["state"] == expected
    if expected == "unknown_outcome":
        assert "unknown_outcome" in ended["answer"], "the model was told"


def test_an_idempotent_call_is_asked_again_and_acts_once(here: Deployment, name: str, tmp_path: Path) -> None:
    doomed = here.worker(fault=f"asked:tool:kill:{tmp_path / 'once'}")
    turn = here.submit(name, [("note", {"key": name})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects(name) == 1, "the host answers a repeated idempotency key from its record"


@pytest.mark.parametrize("point", ["before_claim", "observing", "committed"])
def test_a_worker_killed_in_an_observe_loses_no_round(here: Deployment, name: str, tmp_path: Path, point: str) -> None:
    doomed = here.worker(fault=f"{point}:observe:kill:{tmp_path / 'once'}")
    turn = here.submit(name, [("write", {"key": name}), ("note", {"key": f"{name}f"})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"] == f"done {name}: wrote {name}; noted {name}f"
    assert here.ledger.effects(name) == here.ledger.effects(f"{name}f") == 1
    assert here.ledger.asked(name) == 2


@pytest.mark.parametrize("point", ["before_claim", "resumed", "committed"])
def test_a_control_worker_killed_over_a_decision_loses_no_decision(here: Deployment, name: str, tmp_path: Path, point: str) -> None:
    here.worker()
    turn = here.submit(name, [("pay", {"key": name})])
    approval = here.waiting_approval(turn)
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    here.stack["control"].stop()
    doomed = here.worker("control", fault=f"{point}:decide:kill:{tmp_path / 'once'}")
    assert here.decide(approval["approval_id"]).status_code == 200
    here.until(lambda: not doomed.running, "the control worker to die")
    here.stack["control"].start().wait_ready()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects(name) == 1


def test_parallel_calls_survive_the_death_of_one_worker(here: Deployment, name: str, tmp_path: Path) -> None:
    here.worker()
    doomed = here.worker(fault=f"asked:tool:kill:{tmp_path / 'once'}")
    turns = [here.submit(f"{name}.{i}", [("write", {"key": f"{name}.{i}.{j}", "sleep_s": 0.2}) for j in range(3)]) for i in range(4)]
    here.until(lambda: not doomed.running, "the worker to die")
    for i, turn in enumerate(turns):
        ended = here.ended(turn)
        assert ended["state"] == "completed"
        for j, call in enumerate(ended["calls"]):
            assert here.ledger.effects(f"{name}.{i}.{j}") == 1
            assert call["state"] in ("completed", "unknown_outcome")
    assert here.ledger.lines("faults") == []
