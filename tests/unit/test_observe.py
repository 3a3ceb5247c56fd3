"""What observe puts into the log is the same whether the journal does it at the claim or the step does, and nothing of it is kept twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestration import Agent, tool
from orchestration.core.ids import StepKind
from orchestration.core.turn import OnBusy
from orchestration.models import ScriptedModel, Step
from orchestration.state.journal import Journal
from orchestration.testing.frames import assert_paired
from orchestration.testing.local import LocalTurnmill


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@tool("shop/buy", approval="costs money")
def buy(what: str) -> str:
    """Buy something."""
    return f"bought {what} \u00fc"


def calls(*asked: tuple[str, dict[str, Any]], text: str = "") -> Step:
    return Step(text=text, tool_calls=list(asked))


def here_with(*steps: Step | str) -> LocalTurnmill:
    return LocalTurnmill(Agent("support", ScriptedModel(list(steps)), tools=[add, buy]), add, buy)


def log_of(here: LocalTurnmill) -> list[dict[str, Any]]:
    entries = [json.loads(entry) for entry in here.ports.store.client.lrange("tm:dev:conv:c:log", 0, -1)]
    for entry in entries:
        assert entry.pop("ms") > 0
    return entries


def kept_entries(here: LocalTurnmill, turn_id: str) -> list[str]:
    return [name for name in here.ports.store.client.hkeys(f"tm:dev:turn:{turn_id}") if name.startswith(("le:", "lr:"))]


ROUND = calls(("math-add", {"a": 1, "b": 2}), ("math-add", {"a": "x", "b": 4}), ("math-add", {"a": 3, "b": 4}), text="let me see")
PLAIN = calls(("math-add", {"a": 1, "b": 2}), ("math-add", {"a": 3, "b": 4}), text="let me see")


@pytest.mark.parametrize("asked", [ROUND, PLAIN], ids=["one that never ran", "all ran"])
def test_the_log_reads_alike_however_the_round_was_closed(asked: Step) -> None:
    logs = []
    for apart in (False, True):
        here = here_with(asked, "done")
        turn = here.submit("support", "sums", conversation_id="c")
        here.run_one(here.queue.waiting.popleft())
        if apart:
            here.ports.store.client.hdel(f"tm:dev:turn:{turn.turn_id}", "le:1")
        here.run()
        assert here.turn(turn.turn_id)["answer"] == "done" and here.turn(turn.turn_id)["rounds"] == 2
        assert kept_entries(here, turn.turn_id) == []
        logs.append(json.dumps(log_of(here)).replace(turn.turn_id[3:], "…"))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("approved", [True, False])
def test_a_round_with_a_decided_call_leaves_no_entry_behind(approved: bool) -> None:
    here = here_with(calls(("shop-buy", {"what": "a"}), ("math-add", {"a": 1, "b": 2})), "done")
    turn = here.submit("support", "buy", conversation_id="c")
    here.run()
    assert kept_entries(here, turn.turn_id)
    here.decide(here.approvals()[0]["approval_id"], approved)
    here.run()
    assert here.turn(turn.turn_id)["answer"] == "done" and kept_entries(here, turn.turn_id) == []
    results = [entry["data"]["content"] for entry in log_of(here) if entry["dir"] == "out" and entry["data"]["kind"] == "tool_result"]
    assert results[1] == "3" and ("bought a ü" in results[0]) is approved


def test_an_observe_whose_answer_got_lost_is_the_same_claim_and_nobody_elses() -> None:
    here = here_with(PLAIN, "done")
    turn = here.submit("support", "sums", conversation_id="c")
    for _ in range(3):
        here.run_one(here.queue.waiting.popleft())
    observe = here.queue.waiting.popleft()
    assert observe.kind is StepKind.OBSERVE
    owner = here.ports.lease.next_owner()
    first = here.ports.store.run("claim", str(observe), owner, "[]")
    again = here.ports.store.run("claim", str(observe), owner, "[]")
    assert first[0] == again[0] == "observed" and first[5:] == again[5:]
    assert here.ports.store.run("claim", str(observe), here.ports.lease.next_owner(), "[]")[0] == "done"
    assert len(log_of(here)) == 4
    assert Journal.turn_so_far(first[5:])[0].request.turn_id == turn.turn_id


def test_an_input_that_joined_stands_behind_the_round_that_it_came_in() -> None:
    here = here_with(PLAIN, "done")
    here.submit("support", "sums", conversation_id="c")
    here.run_one(here.queue.waiting.popleft())
    here.submit("support", "and hurry", conversation_id="c", on_busy=OnBusy.STEER)
    here.run()
    model = here.project.agents["support"].model
    assert isinstance(model, ScriptedModel)
    assert_paired(model.requests[-1].messages)
    assert [message["role"] for message in model.requests[-1].messages] == ["user", "assistant", "tool", "tool", "user"]


def test_a_round_whose_call_was_edited_tells_of_the_call_that_ran_and_leaves_no_entry_behind() -> None:
    here = here_with(calls(("math-add", {"a": 1, "b": 2}), ("shop-buy", {"what": "a"})), "done")
    turn = here.submit("support", "buy", conversation_id="c")
    here.run()
    here.decide(here.approvals()[0]["approval_id"], True, arguments={"what": "b"})
    assert kept_entries(here, turn.turn_id) == []
    here.run()
    asked = next(entry["data"] for entry in log_of(here) if entry["dir"] == "out")
    assert [json.loads(call["arguments"]) for call in asked["calls"]] == [{"a": 1, "b": 2}, {"what": "b"}]
    assert kept_entries(here, turn.turn_id) == []
