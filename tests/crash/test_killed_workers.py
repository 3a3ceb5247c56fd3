"""kill -9 of a worker at chosen instants: nothing is lost, and no effect happens twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


@pytest.mark.parametrize("point", ["before_claim", "streaming", "replied", "committed"])
def test_a_worker_killed_in_a_plan_loses_no_turn(deploy: Deploy, tmp_path: Path, point: str) -> None:
    here = deploy()
    doomed = here.worker(fault=f"{point}:plan:kill:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"})], tokens=3)
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"].startswith("done a")
    assert here.ledger.effects("e") == 1
    assert here.ledger.asked("a") == (2 if point in ("before_claim", "committed") else 3), "a committed reply is not asked for again"
    kinds = [frame["kind"] for frame in here.frames(turn)]
    assert kinds.count("done") == 1 and kinds.count("tool_call") == 1


@pytest.mark.parametrize(("point", "effects"), [("before_claim", 1), ("claimed", 0), ("asked", 1), ("committed", 1)])
def test_a_worker_killed_around_a_tool_call_never_acts_twice(deploy: Deploy, tmp_path: Path, point: str, effects: int) -> None:
    here = deploy()
    doomed = here.worker(fault=f"{point}:tool:kill:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed"
    assert here.ledger.effects("e") == effects
    expected = "unknown_outcome" if point in ("claimed", "asked") else "completed"
    assert ended["calls"][0]["state"] == expected
    if expected == "unknown_outcome":
        assert "unknown_outcome" in ended["answer"], "the model was told"


def test_an_idempotent_call_is_asked_again_and_acts_once(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy()
    doomed = here.worker(fault=f"asked:tool:kill:{tmp_path / 'once'}")
    turn = here.submit("a", [("note", {"key": "e"})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects("e") == 1, "the host answers a repeated idempotency key from its record"


@pytest.mark.parametrize("point", ["before_claim", "observing", "committed"])
def test_a_worker_killed_in_an_observe_loses_no_round(deploy: Deploy, tmp_path: Path, point: str) -> None:
    here = deploy()
    doomed = here.worker(fault=f"{point}:observe:kill:{tmp_path / 'once'}")
    turn = here.submit("a", [("write", {"key": "e"}), ("note", {"key": "f"})])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["answer"] == "done a: wrote e; noted f"
    assert here.ledger.effects("e") == here.ledger.effects("f") == 1
    assert here.ledger.asked("a") == 2


@pytest.mark.parametrize("point", ["before_claim", "resumed", "committed"])
def test_a_control_worker_killed_over_a_decision_loses_no_decision(deploy: Deploy, tmp_path: Path, point: str) -> None:
    here = deploy(workers=1)
    turn = here.submit("a", [("pay", {"key": "e"})])
    approval = here.waiting_approval()
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the turn to wait")
    here.stack["control"].stop()
    doomed = here.worker("control", fault=f"{point}:decide:kill:{tmp_path / 'once'}")
    assert here.decide(approval["approval_id"]).status_code == 200
    here.until(lambda: not doomed.running, "the control worker to die")
    here.stack["control"].start().wait_ready()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
    assert here.ledger.effects("e") == 1


def test_parallel_calls_survive_the_death_of_one_worker(deploy: Deploy, tmp_path: Path) -> None:
    here = deploy(workers=1)
    doomed = here.worker(fault=f"asked:tool:kill:{tmp_path / 'once'}")
    turns = [here.submit(f"t{i}", [("write", {"key": f"e{i}.{j}", "sleep_s": 0.2}) for j in range(3)]) for i in range(4)]
    here.until(lambda: not doomed.running, "the worker to die")
    for i, turn in enumerate(turns):
        ended = here.ended(turn)
        assert ended["state"] == "completed"
        for j, call in enumerate(ended["calls"]):
            assert here.ledger.effects(f"e{i}.{j}") == 1
            assert call["state"] in ("completed", "unknown_outcome")
    assert here.ledger.lines("faults") == []
