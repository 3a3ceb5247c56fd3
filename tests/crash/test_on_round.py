"""kill -9 while `on_round` runs: no round goes untold, and the turn goes on."""

from __future__ import annotations

import json

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def submit(here: Deployment, name: str, **script: object) -> str:
    body = {"name": name, "rounds": [[["note", {"key": name}]]], **script}
    answer = here.http.post("/v1/agents/watched/turns", json={"input": json.dumps(body)})
    answer.raise_for_status()
    return str(answer.json()["turn_id"])


def told(here: Deployment, turn: str) -> list[str]:
    return [line.removeprefix(f"{turn} ") for line in here.ledger.lines("rounds") if line.startswith(turn)]


def test_each_round_is_told_of_by_the_processes_of_a_deployment(here: Deployment, name: str) -> None:
    here.worker()
    turn = submit(here, name)
    assert here.ended(turn)["state"] == "completed"
    here.until(lambda: "2 answer" in told(here, turn), "the end to be told of")
    assert told(here, turn) == ["1 None", "2 answer"]
    assert here.ledger.lines("faults") == []


def test_a_round_that_a_killed_worker_was_told_of_is_told_of_again(here: Deployment, name: str) -> None:
    doomed = here.worker()
    turn = submit(here, name, dies_after=1)
    here.until(lambda: not doomed.running, "the worker to die in the hook")
    here.worker()
    assert here.ended(turn)["state"] == "completed"
    here.until(lambda: "2 answer" in told(here, turn), "the end to be told of")
    assert told(here, turn) == ["1 None", "1 None", "2 answer"]
    assert here.ledger.effects(name) == 1
