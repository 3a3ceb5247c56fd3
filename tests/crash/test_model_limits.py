"""A limited model is limited for all workers together, and a dead worker's calls hold no place."""

from __future__ import annotations

import json

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def submit(here: Deployment, name: str, **script: object) -> str:
    answer = here.http.post("/v1/agents/limited/turns", json={"input": json.dumps({"name": name, **script})})
    answer.raise_for_status()
    return str(answer.json()["turn_id"])


def most_at_once(lines: list[str]) -> int:
    under_way = most = 0
    for line in lines:
        under_way += 1 if line.startswith("begin") else -1
        most = max(most, under_way)
    return most


def test_no_more_calls_are_under_way_in_all_workers_than_allowed(here: Deployment, name: str) -> None:
    here.worker()
    here.worker()
    turns = [submit(here, f"{name}.{number}", sleep_s=0.3) for number in range(10)]
    for turn in turns:
        ended = here.ended(turn)
        assert ended["state"] == "completed", ended
    lines = here.ledger.lines("places")
    assert len(lines) == 20 and most_at_once(lines) <= 2


def test_the_places_of_a_killed_worker_are_free(here: Deployment, name: str) -> None:
    doomed = here.worker()
    turns = [submit(here, f"{name}.{number}", sleep_s=1.5) for number in range(4)]
    here.until(lambda: len([line for line in here.ledger.lines("places") if line.startswith("begin")]) >= 2, "two calls to be under way")
    doomed.kill()
    here.worker()
    for turn in turns:
        assert here.ended(turn)["state"] == "completed"
