"""A step left in a way that none of its handlers expects, in a process that lives on: its lease does not keep the step for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", ["replied:plan", "observing:observe", "committed:observe"])
def test_a_step_that_its_worker_gives_up_is_run_again(here: Deployment, name: str, tmp_path: Path, point: str) -> None:
    worker = here.worker(fault=f"{point}:raise:{tmp_path / 'once'}")
    turn = here.submit(name, [("write", {"key": name})])
    ended = here.ended(turn)
    assert (tmp_path / "once").exists() and worker.running
    assert ended["state"] == "completed" and ended["answer"] == f"done {name}: wrote {name}"
    assert here.ledger.effects(name) == 1
    assert here.ledger.asked(name) == (3 if point == "replied:plan" else 2)


@pytest.mark.parametrize(("tool", "effects", "state"), [("write", 0, "unknown_outcome"), ("note", 1, "completed")])
def test_a_call_that_its_worker_gives_up_goes_on_by_its_tools_rule(
    here: Deployment, name: str, tmp_path: Path, tool: str, effects: int, state: str
) -> None:
    worker = here.worker(fault=f"claimed:tool:raise:{tmp_path / 'once'}")
    turn = here.submit(name, [(tool, {"key": name})])
    ended = here.ended(turn)
    assert (tmp_path / "once").exists() and worker.running
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == state
    assert here.ledger.effects(name) == effects


def test_a_step_that_is_given_up_each_time_ends_its_turn(here: Deployment, name: str) -> None:
    worker = here.worker(fault="replied:plan:raise")
    ended = here.ended(here.submit(name))
    assert ended["state"] == "failed" and ended["error"]["code"] == "step_lost"
    assert worker.running
