"""kill -9 around an agent that another one asks: its turn starts once, its answer arrives once, and a cancel reaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.crash.conftest import Deployment

pytestmark = pytest.mark.slow


def submit(here: Deployment, name: str, inner: list[list[Any]], **script: Any) -> str:
    """A turn whose agent asks another to do `inner`; both note under `name` how often they were asked."""
    child = json.dumps({"name": f"{name}.child", "rounds": inner, **script})
    body = {"name": name, "rounds": [[("agent", {"input": child})]]}
    answer = here.http.post("/v1/agents/boss/turns", json={"input": json.dumps(body)})
    answer.raise_for_status()
    return str(answer.json()["turn_id"])


def child_of(here: Deployment, turn: str) -> str:
    """The turn that the agent's call has started."""
    conversation = here.turn(turn)["conversation_id"]

    def look() -> str:
        with here.http.stream("GET", f"/v1/turns/{turn}/frames") as stream:
            for line in stream.iter_lines():
                frame = json.loads(line[5:]) if line.startswith("data:") else {}
                if frame.get("kind") == "child":
                    return str(frame["frame"]["turn_id"])
        return ""

    found: str = here.until(look, f"a child of {turn} in {conversation}")
    return found


@pytest.mark.parametrize("fault", ["claimed:tool", "committed:tool"])
def test_a_worker_killed_on_the_way_to_a_nested_answer_loses_nothing(here: Deployment, name: str, tmp_path: Path, fault: str) -> None:
    doomed = here.worker(fault=f"{fault}:kill:{tmp_path / 'once'}")
    turn = submit(here, name, [[("note", {"key": name})]])
    here.until(lambda: not doomed.running, "the worker to die")
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "completed"
    assert ended["answer"] == f"done {name}: done {name}.child: noted {name}"
    assert here.ledger.effects(name) == 1
    assert here.ledger.lines("faults") == []


def test_an_approval_of_the_nested_agent_outlives_every_worker(here: Deployment, name: str) -> None:
    first = here.worker()
    turn = submit(here, name, [[("pay", {"key": name})]])
    here.until(lambda: here.turn(turn)["state"] == "waiting", "both turns to wait")
    approval = here.waiting_approval(child_of(here, turn))
    first.kill()
    here.stack["control"].kill()
    assert here.decide(approval["approval_id"]).status_code == 200
    here.stack["control"].start().wait_ready()
    here.worker()
    ended = here.ended(turn)
    assert ended["state"] == "completed" and f"paid {name}" in ended["answer"]
    assert here.ledger.effects(name) == 1


def test_a_cancel_reaches_the_nested_agent(here: Deployment, name: str) -> None:
    here.worker()
    turn = submit(here, name, [[("pay", {"key": name})]])
    here.until(lambda: here.turn(turn)["state"] == "waiting", "both turns to wait")
    child = child_of(here, turn)
    here.http.post(f"/v1/turns/{turn}/cancel").raise_for_status()
    assert here.ended(child)["state"] == "cancelled"
    assert here.ledger.effects(name) == 0
