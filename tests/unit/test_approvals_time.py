"""Time: what happens when nobody decides, reminders, reopening, and the turn's own deadline while a human is asked."""

from __future__ import annotations

from typing import Any

import pytest

from orchestration import Agent, AgentTool, Gate, Limits
from orchestration.actions import read
from orchestration.actions.reopen import reopen
from orchestration.core.errors import ApprovalExpired, Forbidden, Invalid, NotHeld
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import REFUND, Script, add, calls, due_entries, local, make_due, person, ran, refund, says, sweep

OPS, LEAD = person("ann", "ops"), person("lea", "lead")


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


def waiting(gate: Gate, *more_calls: Any, model: Script | None = None, **agent: Any) -> tuple[LocalTurnmill, str, str]:
    """A turn that waits for one approval under this gate: Turnmill, the turn's id, the approval's."""
    here = local(model or Script(calls(REFUND, *more_calls), says("done")), refund, add, approvals={"billing/refund": gate}, **agent)
    turn = here.ask("support", "refund", conversation_id="c")
    approval, *_ = here.approvals()
    return here, turn["turn_id"], approval["approval_id"]


def frames(here: LocalTurnmill, kind: str) -> list[dict[str, Any]]:
    return [frame for frame in here.frames("c") if frame["kind"] == kind]


def events(here: LocalTurnmill) -> list[str]:
    return [entry["event"] for entry in read.audit(here.ports, "dev", limit=1000)["entries"]]


def test_by_default_an_expired_call_is_refused_and_the_turn_goes_on() -> None:
    model = Script(calls(REFUND), says("nobody was there"))
    here, turn, id_ = waiting(Gate(timeout_s=60), model=model)
    sweep(here)
    assert read.approval(here.ports, "dev", id_)["state"] == "pending", "only its own deadline expires an approval"
    make_due(here, "expire", id_)
    sweep(here)
    here.run()
    ended = here.turn(turn)
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "expired" and ran == []
    assert "in time" in model.shown[1][-1]["content"] and "did not run" in model.shown[1][-1]["content"]
    settled = read.approval(here.ports, "dev", id_)
    assert settled["state"] == "expired" and settled["decided_by"] is None and settled["decided_at"]
    with pytest.raises(ApprovalExpired):
        here.decide(id_, True)
    assert [frame["error"] for frame in frames(here, "approval_decision")] == [True]
    assert events(here) == ["requested", "expired"]


def test_a_gate_can_end_the_turn_when_nobody_decides() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=60, on_expiry="end_turn"), ("billing-refund", {"order_id": "o-2", "amount": 1}))
    other = next(one["approval_id"] for one in here.approvals() if one["approval_id"] != id_)
    make_due(here, "expire", id_)
    sweep(here)
    here.run()
    ended = here.turn(turn)
    assert (ended["state"], ended["stop_reason"]) == ("failed", "approval_expired")
    assert ended["error"]["code"] == "approval_expired" and id_ in ended["error"]["detail"]
    assert [call["state"] for call in ended["calls"]] == ["expired", "cancelled"]
    assert read.approval(here.ports, "dev", id_)["state"] == "expired"
    assert read.approval(here.ports, "dev", other)["state"] == "cancelled"
    with pytest.raises(ApprovalExpired):
        here.decide(id_, True)
    assert frames(here, "done")[0]["stop_reason"] == "approval_expired" and ran == []


def test_a_late_yes_ends_the_turn_too_where_the_gate_says_so() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=60, on_expiry="end_turn"))
    make_due(here, "expire", id_)
    with pytest.raises(ApprovalExpired):
        here.decide(id_, True)
    assert here.turn(turn)["stop_reason"] == "approval_expired"


def test_a_gate_can_ask_others_when_nobody_decides() -> None:
    gate = Gate(timeout_s=60, roles=["ops"], on_expiry="escalate", escalate_to=["lead"], escalate_timeout_s=600)
    here, turn, first = waiting(gate)
    make_due(here, "expire", first)
    sweep(here)
    [asked] = here.approvals()
    assert asked["approval_id"] != first and asked["escalated_from"] == first and asked["roles"] == ["lead"]
    assert asked["arguments"] == REFUND[1] and asked["expires_at"] > asked["requested_at"]
    old = read.approval(here.ports, "dev", first)
    assert old["state"] == "expired" and old["escalated_to"] == asked["approval_id"]
    assert here.turn(turn)["state"] == "waiting" and here.turn(turn)["calls"][0]["approval_id"] == asked["approval_id"]
    with pytest.raises(ApprovalExpired, match=asked["approval_id"]):
        here.decide(first, True, by=OPS)
    with pytest.raises(Forbidden):
        here.decide(asked["approval_id"], True, by=OPS)
    here.decide(asked["approval_id"], True, by=LEAD)
    here.run()
    assert ran == [("o-42", 40)] and here.turn(turn)["state"] == "completed"
    assert [frame["approval_id"] for frame in frames(here, "approval_request")] == [first, asked["approval_id"]]
    assert events(here) == ["requested", "escalated", "requested", "decided", "ran"]


def test_when_the_others_do_not_decide_either_it_is_refused() -> None:
    here, turn, first = waiting(Gate(timeout_s=60, on_expiry="escalate", escalate_to=["lead"]))
    make_due(here, "expire", first)
    sweep(here)
    make_due(here, "expire", here.approvals()[0]["approval_id"])
    sweep(here)
    here.run()
    assert here.approvals() == [] and ran == []
    assert here.turn(turn)["calls"][0]["state"] == "expired" and here.turn(turn)["state"] == "completed"


def test_cancelling_one_escalated_call_cancels_the_request_that_is_open() -> None:
    from orchestration.actions.cancel import cancel_call

    here, turn, first = waiting(Gate(timeout_s=60, on_expiry="escalate", escalate_to=["lead"]))
    make_due(here, "expire", first)
    sweep(here)
    second = here.approvals()[0]["approval_id"]
    cancel_call(here.ports, here.principal, turn, here.turn(turn)["calls"][0]["call_id"])
    here.run()
    assert read.approval(here.ports, "dev", second)["state"] == "cancelled"
    assert here.turn(turn)["state"] == "completed" and ran == []


def test_a_gate_can_hold_what_nobody_decided_until_it_is_reopened() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=60, roles=["ops"], on_expiry="hold"))
    with pytest.raises(NotHeld):
        reopen(here.ports, OPS, id_)
    make_due(here, "expire", id_)
    sweep(here)
    here.run()
    held = read.approval(here.ports, "dev", id_)
    assert held["state"] == "held" and held["expires_at"] is None and here.turn(turn)["state"] == "waiting"
    assert here.approvals() == [] and [one["approval_id"] for one in read.approvals(here.ports, "dev", "held")["approvals"]] == [id_]
    with pytest.raises(ApprovalExpired, match="reopen"):
        here.decide(id_, True, by=OPS)
    with pytest.raises(Forbidden):
        reopen(here.ports, LEAD, id_)
    for wrong in (0, -5, 1e12, float("nan")):
        with pytest.raises(Invalid):
            reopen(here.ports, OPS, id_, wrong)
    again = reopen(here.ports, OPS, id_, 30)
    assert again["state"] == "pending" and again["expires_at"]
    with pytest.raises(NotHeld):
        reopen(here.ports, OPS, id_)
    here.decide(id_, True, by=OPS)
    here.run()
    assert ran == [("o-42", 40)] and events(here) == ["requested", "held", "reopened", "decided", "ran"]


def test_a_reopened_request_can_be_held_again_and_cancelled_with_its_turn() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=60, on_expiry="hold"))
    for _ in range(2):
        make_due(here, "expire", id_)
        sweep(here)
        assert read.approval(here.ports, "dev", id_)["state"] == "held"
        reopen(here.ports, OPS, id_)
    make_due(here, "expire", id_)
    sweep(here)
    here.cancel(turn)
    assert read.approval(here.ports, "dev", id_)["state"] == "cancelled" and read.approvals(here.ports, "dev", "held")["approvals"] == []


def test_a_gate_without_a_time_waits_for_ever() -> None:
    here, _, id_ = waiting(Gate(timeout_s=None))
    assert read.approval(here.ports, "dev", id_)["expires_at"] is None and due_entries(here, "expire") == {}


def test_a_reminder_comes_once_and_only_while_nobody_decided() -> None:
    here, _, id_ = waiting(Gate(timeout_s=60, remind_before_s=20))
    [remind_at], [expire_at] = due_entries(here, "remind").values(), due_entries(here, "expire").values()
    assert expire_at - remind_at == 20_000
    sweep(here)
    assert len(frames(here, "approval_request")) == 1
    make_due(here, "remind", id_)
    sweep(here)
    sweep(here)
    assert [frame.get("reminder") for frame in frames(here, "approval_request")] == [None, True]
    assert due_entries(here, "remind") == {} and len(due_entries(here, "expire")) == 1
    here, _, id_ = waiting(Gate(timeout_s=60, remind_before_s=20))
    here.decide(id_, True)
    assert due_entries(here, "remind") == due_entries(here, "expire") == {}


def test_a_due_entry_that_is_handled_late_or_twice_changes_nothing() -> None:
    from workers.sweeps.due import handle_due

    here, turn, id_ = waiting(Gate(timeout_s=60, remind_before_s=20))
    stale = [
        f"expire:dev/{id_}",
        f"remind:dev/{id_}",
        f"deadline:dev/{turn}",
        "expire:dev/ap_gone",
        "remind:dev/ap_gone",
        "out:dev/callback.x",
    ]
    handle_due(here.ports, stale)
    assert read.approval(here.ports, "dev", id_)["state"] == "pending" and here.turn(turn)["state"] == "waiting"
    assert len(due_entries(here, "expire")) == len(due_entries(here, "remind")) == 1, "what has time left stays"


def test_one_broken_due_entry_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    here, _, id_ = waiting(Gate(timeout_s=60))
    client = here.ports.store.client
    client.zadd("tm:due", {"step:nonsense": 0, "out:dev/no.such.delivery": 0, "later:dev/what": 0})
    client.hset("tm:dev:out:no.such.delivery", mapping={"state": "due", "attempt": "0", "created": "1"})
    make_due(here, "expire", id_)
    sweep(here)
    assert read.approval(here.ports, "dev", id_)["state"] == "expired"
    left: Any = client.zrange("tm:due", 0, -1, withscores=True)
    assert {name for name, _ in left} == {"step:nonsense", "out:dev/no.such.delivery", "later:dev/what"}
    assert all(at > 1000 for _, at in left), "they are looked at again later"


def test_a_turns_deadline_stands_still_while_a_human_is_asked() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=3600), limits=Limits(deadline_s=60))
    entry = f"deadline:dev/{turn}"
    assert due_entries(here, "deadline") == {}
    left = int(here.ports.store.client.hget(f"tm:dev:turn:{turn}", "clock") or 0)  # type: ignore[arg-type]
    assert 0 < left <= 60_000
    here.decide(id_, True)
    [at] = due_entries(here, "deadline").values()
    assert at - here.ports.approvals.now_ms() <= left and at > here.ports.approvals.now_ms()
    make_due(here, "deadline", turn)
    sweep(here)
    assert here.turn(turn)["stop_reason"] == "deadline" and ran == []
    assert entry not in due_entries(here, "deadline")


def test_a_deadline_stands_still_as_long_as_a_human_is_asked_whatever_else_the_round_does() -> None:
    model = Script(calls(REFUND, ("math-add", {"a": 1, "b": 1})), says("done"))
    here = local(model, refund, add, limits=Limits(deadline_s=60))
    turn = here.submit("support", "go")
    here.run_one(here.queue.waiting.popleft())
    assert due_entries(here, "deadline") == {} and here.turn(turn.turn_id)["state"] == "running"
    here.decide(here.turn(turn.turn_id)["calls"][0]["approval_id"], True)
    assert len(due_entries(here, "deadline")) == 1, "nobody is asked any more"
    here.run()
    assert here.turn(turn.turn_id)["state"] == "completed" and due_entries(here, "deadline") == {}


@pytest.mark.parametrize("answer", ["yes", "no", "cancelled"])
def test_the_deadlines_of_all_who_wait_for_an_agent_stand_still_while_it_has_a_human_asked(answer: str) -> None:
    """Also while the agent, or its caller, has something else to do."""
    model = Script(calls(("agent-clerk", {"input": "refund"}), ("math-add", {"a": 1, "b": 1})), says("done"))
    clerk = Agent("clerk", Script(calls(REFUND, ("math-add", {"a": 1, "b": 1})), says("refunded")), tools=[refund, add])
    boss = Agent("boss", model, tools=[AgentTool("clerk"), add], limits=Limits(deadline_s=60))
    here = LocalTurnmill(boss, clerk)
    turn = here.submit("boss", "go").turn_id
    while not here.approvals():
        here.run_one(here.queue.waiting.popleft())
    child = here.approvals()[0]["turn_id"]
    assert due_entries(here, "deadline") == {}, "neither of the two"
    if answer == "cancelled":
        here.cancel(child)
    else:
        here.decide(here.approvals()[0]["approval_id"], answer == "yes")
    assert f"deadline:dev/{turn}" in due_entries(here, "deadline")
    here.run()
    assert here.turn(turn)["state"] == "completed" and due_entries(here, "deadline") == {}


def test_an_agent_that_is_asked_while_its_callers_deadline_stands_still_has_that_time_too() -> None:
    model = Script(calls(REFUND, ("agent-clerk", {"input": "think"})), says("done"))
    boss = Agent("boss", model, tools=[refund, AgentTool("clerk")], limits=Limits(deadline_s=60))
    here = LocalTurnmill(boss, Agent("clerk", Script(says("thought"))))
    turn = here.submit("boss", "go").turn_id
    here.run_one(here.queue.waiting.popleft())
    while here.turn(turn)["calls"][1]["state"] != "running":
        here.run_one(here.queue.waiting.popleft())
    assert due_entries(here, "deadline") == {}, "a human may take his time, and the agent meanwhile"
    here.decide(here.approvals()[0]["approval_id"], True)
    assert set(due_entries(here, "deadline")) == {f"deadline:dev/{turn}"}
    here.run()
    assert here.turn(turn)["state"] == "completed" and due_entries(here, "deadline") == {}


def test_a_gate_can_let_the_deadline_run() -> None:
    here, turn, id_ = waiting(Gate(timeout_s=3600, deadline_runs=True), limits=Limits(deadline_s=60))
    assert len(due_entries(here, "deadline")) == 1
    make_due(here, "deadline", turn)
    sweep(here)
    assert here.turn(turn)["stop_reason"] == "deadline"
    assert read.approval(here.ports, "dev", id_)["state"] == "cancelled"


def test_the_deadline_stands_still_again_once_the_gate_that_let_it_run_is_decided() -> None:
    gates = {"billing/refund": Gate(deadline_runs=True), "math/add": Gate()}
    here = local(
        Script(calls(REFUND, ("math-add", {"a": 1, "b": 1})), says("ok")), refund, add, approvals=gates, limits=Limits(deadline_s=60)
    )
    turn = here.ask("support", "go")
    assert len(due_entries(here, "deadline")) == 1
    here.decide(turn["calls"][0]["approval_id"], False)
    here.run()
    assert here.turn(turn["turn_id"])["state"] == "waiting" and due_entries(here, "deadline") == {}
    here.decide(turn["calls"][1]["approval_id"], True)
    here.run()
    assert here.turn(turn["turn_id"])["state"] == "completed" and due_entries(here, "deadline") == {}


def test_an_escalated_request_keeps_the_deadline_as_it_was() -> None:
    gate = Gate(timeout_s=60, on_expiry="escalate", escalate_to=["lead"], deadline_runs=True)
    here, turn, first = waiting(gate, limits=Limits(deadline_s=600))
    make_due(here, "expire", first)
    sweep(here)
    assert len(due_entries(here, "deadline")) == 1
    here.decide(here.approvals()[0]["approval_id"], False, by=LEAD)
    here.run()
    assert here.turn(turn)["state"] == "completed" and due_entries(here, "deadline") == {}
