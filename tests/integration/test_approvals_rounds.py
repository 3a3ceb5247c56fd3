"""Rounds in which gated calls, agents that are asked, and handoffs stand side by side or one after the other, with real processes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.approvals_stage import Desk, desk, look, wire

pytestmark = pytest.mark.slow

HANDOFF = ("transfer_to_desk", dict[str, Any]())


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk(tmp_path_factory.mktemp("ledger")) as made:
        yield made


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex[:8]


def clerk(*calls: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Another agent is asked to make these calls."""
    return "agent-desk", {"input": json.dumps(calls)}


def states(here: Desk, turn: str) -> list[str]:
    return [call["state"] for call in here.turn(turn)["calls"]]


def of_child(here: Desk, key: str) -> dict[str, Any]:
    """The undecided approval of the agent that was asked, once there is one."""

    def found() -> dict[str, Any] | None:
        listed = here.ask("GET", "/v1/approvals", params={"limit": 1000}).json()["approvals"]
        return next((one for one in listed if one["arguments"]["key"] == key), None)

    approval: dict[str, Any] = here.until(found, "the agent's approval")
    return approval


def effects(here: Desk, key: str) -> list[str]:
    return [line for line in here.ledger.lines("effects") if key in line]


def test_one_after_the_other_each_waits_for_what_stands_before_it(here: Desk, key: str) -> None:
    calls = [look(f"{key}a"), wire(f"{key}b"), clerk(wire(f"{key}c"), look(f"{key}d")), look(f"{key}e"), wire(f"{key}f"), HANDOFF]
    turn = here.submit(*calls, agent="ordered")
    first, last = here.waiting(turn)
    assert states(here, turn) == ["completed", "waiting", "requested", "requested", "waiting", "completed"]
    assert here.decide(last, True).status_code == 200
    here.until(lambda: states(here, turn)[4] == "requested", "the later one to be approved")
    assert effects(here, key) == [f"look {key}a"], "it does not overtake"
    assert here.decide(first, True, arguments={"key": f"{key}b", "amount": 1}).status_code == 200
    inner = of_child(here, f"{key}c")
    here.until(lambda: here.turn(turn)["state"] == "waiting", "the caller to wait with its agent")
    here.until(lambda: f"look {key}d" in effects(here, key), "what the agent may do")
    assert effects(here, key) == [f"look {key}a", f"{key}b 1", f"look {key}d"]
    assert here.decide(inner["approval_id"], True).status_code == 200
    ended = here.ended(turn)
    assert ended["state"] == "completed" and states(here, turn) == ["completed"] * 6
    assert effects(here, key) == [f"look {key}a", f"{key}b 1", f"look {key}d", f"{key}c 5", f"look {key}e", f"{key}f 5"]
    assert ended["answer"] == "looked; wired 1; wired 5; looked; looked; wired 5; Transferred to desk.", "in the order of the calls"
    assert [frame["name"] for frame in here.frames(turn, "handoff")] == ["desk"]


def test_side_by_side_they_are_decided_in_any_order(here: Desk, key: str) -> None:
    turn = here.submit(wire(f"{key}a"), clerk(wire(f"{key}b")), look(f"{key}c"), HANDOFF, wire(f"{key}d"), agent="mixed")
    first, last = here.waiting(turn)
    inner = of_child(here, f"{key}b")
    assert here.decide(last, False, note="not that one").status_code == 200
    assert here.decide(inner["approval_id"], True).status_code == 200
    here.until(lambda: states(here, turn)[1] == "completed", "the agent's answer")
    assert here.turn(turn)["state"] == "waiting" and states(here, turn)[0] == "waiting"
    assert here.decide(first, True).status_code == 200
    ended = here.ended(turn)
    assert states(here, turn) == ["completed", "completed", "completed", "completed", "denied"]
    assert sorted(effects(here, key)) == sorted([f"{key}a 5", f"{key}b 5", f"look {key}c"])
    assert ended["answer"] == "wired 5; wired 5; looked; Transferred to desk.; approval_denied: desk-wire was denied: not that one"


def test_cancelling_the_caller_cancels_what_its_agent_asked_and_a_later_yes_runs_nothing(here: Desk, key: str) -> None:
    turn = here.submit(wire(f"{key}a"), clerk(wire(f"{key}b")), agent="mixed")
    inner = of_child(here, f"{key}b")
    own = here.waiting(turn)[0]
    assert here.ask("POST", f"/v1/turns/{turn}/cancel").status_code == 200
    for id_ in (own, inner["approval_id"]):
        late = here.decide(id_, True)
        assert (late.status_code, late.json()["code"]) == (410, "approval_cancelled")
    here.until(lambda: here.approval(inner["approval_id"])["state"] == "cancelled", "the agent's approval to be cancelled")
    told = here.ask("GET", "/v1/audit", params={"approval_id": inner["approval_id"]}).json()["entries"][-1]
    assert (told["event"], told["by"], told["from"]) == ("cancelled", "sue", "rest:127.0.0.1")
    assert effects(here, key) == []


def test_an_owners_demand_in_its_manifest_binds_who_declares_the_tool_by_hand_or_attaches_it(here: Desk, key: str) -> None:
    attached = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}, "key": "desk/wire"}
    turns = [here.submit(wire(f"{key}a"), agent="trusting")]
    turns.append(here.submit(("mine", {"key": f"{key}b", "amount": 5}), tools=[attached]))
    for turn in turns:
        [id_] = here.waiting(turn)
        assert here.approval(id_)["reason"] == "moves money"
        assert here.decide(id_, False).status_code == 200
        assert here.ended(turn)["calls"][0]["state"] == "denied"
    assert effects(here, key) == []
