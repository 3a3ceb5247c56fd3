"""The audit stream, decision links, and what really runs after a wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestration import Agent, AgentTool, Gate, tool
from orchestration.actions import read
from orchestration.actions.cancel import cancel_call, cancel_turn
from orchestration.actions.link import decide_by_link, make_link, open_link
from orchestration.core.errors import AlreadyDecided, ApprovalCancelled, ApprovalExpired, Forbidden, Invalid, NotFound
from orchestration.core.ids import StepId, StepKind
from orchestration.core.loop import unknown_outcome
from orchestration.core.safe_json import dumps
from orchestration.core.turn import OnBusy
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import REFUND, Script, add, calls, local, make_due, person, ran, refund, says, sweep

ANN = person("ann", "ops")


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


def waiting(gate: Gate | None = None, model: Script | None = None, **more: Any) -> tuple[LocalTurnmill, str, str]:
    here = local(model or Script(calls(REFUND), says("done")), refund, approvals={"billing/refund": gate or Gate()}, **more)
    turn = here.ask("support", "refund", conversation_id="c")
    return here, turn["turn_id"], here.approvals()[0]["approval_id"]


def entries(here: LocalTurnmill, **wanted: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read.audit(here.ports, "dev", **wanted)["entries"]
    return found


def test_the_audit_stream_tells_who_was_shown_what_decided_what_and_what_ran() -> None:
    here, turn, id_ = waiting(Gate(roles=["ops"], reason="moves money"))
    edited = {"order_id": "o-42", "amount": 5}
    here.decide(id_, True, by=ANN, arguments=edited, note="less", source="rest:203.0.113.7")
    here.run()
    requested, decided, carried_out = entries(here)
    assert [one["event"] for one in (requested, decided, carried_out)] == ["requested", "decided", "ran"]
    assert all(
        one["approval_id"] == id_ and one["turn_id"] == turn and one["ts"].endswith("Z") for one in (requested, decided, carried_out)
    )
    assert requested["seq"] < decided["seq"] < carried_out["seq"]
    assert requested["by"] == "dev" and requested["from"] == "support"
    assert requested["shown"]["arguments"] == REFUND[1] and requested["shown"]["roles"] == ["ops"]
    assert decided["by"] == "ann" and decided["from"] == "rest:203.0.113.7" and decided["shown"]["arguments"] == REFUND[1]
    assert decided["decided"] == {"approved": True, "arguments": edited, "note": "less", "state": "approved"}
    assert carried_out["ran"] == {"state": "completed", "arguments": edited}


def test_a_denied_call_leaves_no_trace_of_running() -> None:
    here, _, id_ = waiting()
    here.decide(id_, False, by=ANN, note="no")
    here.run()
    assert [one["event"] for one in entries(here)] == ["requested", "decided"]
    assert entries(here)[1]["decided"]["approved"] is False


def test_an_approved_call_whose_worker_died_is_told_as_what_it_is() -> None:
    here, turn, id_ = waiting()
    here.decide(id_, True, by=ANN)
    step = StepId("dev", turn, 1, StepKind.TOOL, 0)
    while step not in here.queue.waiting:
        here.run_one(here.queue.waiting.popleft())
    here.queue.waiting.clear()
    assert isinstance(here.ports.journal.claim(step), tuple)
    dead = here.ports.lease.process
    here.ports.lease.register(instead_of=dead)
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    result = dumps(unknown_outcome("billing-refund").as_json())
    here.queue.waiting.extend(here.ports.leases.reclaim(step, dead, result=result))
    here.run()
    assert entries(here)[-1]["event"] == "ran" and entries(here)[-1]["ran"]["state"] == "unknown_outcome"


def test_a_cancelled_request_says_who_cancelled_it() -> None:
    here, turn, id_ = waiting()
    cancel_call(here.ports, here.principal, turn, here.turn(turn)["calls"][0]["call_id"], "rest:::1")
    assert [(one["event"], one["by"], one["from"]) for one in entries(here)][1:] == [("cancelled", "dev", "rest:::1")]
    here, turn, id_ = waiting()
    here.cancel(turn)
    assert [(one["event"], one["by"]) for one in entries(here)][1:] == [("cancelled", "dev")]
    assert entries(here, approval_id=id_) == entries(here)


def test_what_an_approved_call_was_stopped_by_is_told_with_what_became_of_it() -> None:
    here, turn, id_ = waiting()
    here.decide(id_, True)
    cancel_call(here.ports, here.principal, turn, here.turn(turn)["calls"][0]["call_id"], "rest:::1")
    assert [(one["event"], one["by"], one["from"]) for one in entries(here)][2:] == [("not_run", "dev", "rest:::1")]
    here, turn, id_ = waiting()
    here.decide(id_, True)
    cancel_turn(here.ports, here.principal, turn, "channel:::1")
    last = entries(here)[-1]
    assert (last["event"], last["by"], last["from"], last["ran"]["state"]) == ("not_run", "dev", "channel:::1", "cancelled")
    here.run()
    assert ran == [] and entries(here)[-1] == last


@pytest.mark.parametrize("whole", [True, False], ids=["the turn", "the call"])
def test_an_approval_of_an_agent_that_was_asked_says_who_cancelled_its_caller(whole: bool) -> None:
    boss = Agent("boss", Script(calls(("agent-clerk", {"input": "refund"})), says("ok")), tools=[AgentTool("clerk")])
    here = LocalTurnmill(boss, Agent("clerk", Script(calls(REFUND)), tools=[refund]))
    turn = here.ask("boss", "go")
    [approval] = here.approvals()
    sue = replace(here.principal, sub="sue")
    if whole:
        cancel_turn(here.ports, sue, turn["turn_id"], "rest:::1")
    else:
        cancel_call(here.ports, sue, turn["turn_id"], turn["calls"][0]["call_id"], "rest:::1")
    with pytest.raises(ApprovalCancelled):
        here.decide(approval["approval_id"], True)
    here.run()
    last = entries(here, approval_id=approval["approval_id"])[-1]
    assert (last["event"], last["by"], last["from"]) == ("cancelled", "sue", "rest:::1")
    assert here.approvals() == [] and ran == []


def test_an_approval_that_a_newer_input_interrupts_says_whose_that_was() -> None:
    here, turn, id_ = waiting()
    conversation = here.turn(turn)["conversation_id"]
    here.submit(
        "support", "never mind", conversation_id=conversation, on_busy=OnBusy.INTERRUPT, principal=replace(here.principal, sub="sue")
    )
    last = entries(here, approval_id=id_)[-1]
    assert (last["event"], last["by"], last["from"]) == ("cancelled", "sue", "interrupt")
    with pytest.raises(ApprovalCancelled):
        here.decide(id_, True)


def test_the_audit_stream_is_read_in_pages_and_by_approval_or_turn() -> None:
    here = local(Script(*[calls(REFUND)] * 3, *[says("done")] * 3), refund)
    turns = [here.ask("support", "refund", conversation_id=f"c{i}") for i in range(3)]
    ids = [one["approval_id"] for one in here.approvals()]
    for id_ in ids:
        here.decide(id_, False)
    everything = entries(here, limit=1000)
    assert len(everything) == 6
    paged, after = [], 0
    while True:
        page = read.audit(here.ports, "dev", after=after, limit=2)
        paged += page["entries"]
        after = page["after"]
        if after is None:
            break
    assert paged == everything
    assert [one["event"] for one in entries(here, approval_id=ids[1])] == ["requested", "decided"]
    assert entries(here, turn_id=turns[1]["turn_id"]) == entries(here, approval_id=ids[1])
    assert len(entries(here, turn_id=turns[1]["turn_id"], limit=1)) == 1
    assert entries(here, approval_id=ids[0], turn_id=turns[1]["turn_id"]) == []
    assert read.audit(here.ports, "rival")["entries"] == []


def test_entries_outlive_the_approval_that_they_tell_of() -> None:
    here, turn, id_ = waiting()
    here.decide(id_, False)
    before = entries(here, approval_id=id_)
    here.ports.store.client.delete(f"tm:dev:ap:{id_}", f"tm:dev:turn:{turn}")
    assert entries(here, approval_id=id_) == entries(here, turn_id=turn) == before
    assert entries(here, approval_id="ap_none") == []


def test_old_entries_go_only_when_a_setting_says_so() -> None:
    here, _, _ = waiting(settings={"audit_kept_s": 3600})
    client = here.ports.store.client
    client.delete("tm:dev:audit")
    client.xadd("tm:dev:audit", {"e": "{}"}, id="1000-0")
    here.decide(here.approvals()[0]["approval_id"], False)
    assert "1000-0" not in [id_ for id_, _ in client.xrange("tm:dev:audit")]  # type: ignore[union-attr]


def test_a_link_decides_once_for_whom_it_was_made_and_never_by_being_opened() -> None:
    here, _, id_ = waiting(Gate(roles=["ops"]))
    token, expires_at = make_link(here.ports, ANN, id_)
    assert expires_at is not None
    for _ in range(3):
        link = open_link(here.ports, id_, token)
        assert link.principal.sub == "ann" and link.approval.state == "pending"
    settled = decide_by_link(here.ports, id_, token, True, "yes")
    assert settled["state"] == "approved" and settled["decided_by"] == "ann"
    assert decide_by_link(here.ports, id_, token, True) == settled, "a double click"
    with pytest.raises(AlreadyDecided):
        decide_by_link(here.ports, id_, token, False)
    here.run()
    assert ran == [("o-42", 40)]
    assert [one["event"] for one in entries(here)] == ["requested", "linked", "decided", "ran"]


def test_a_link_is_good_for_one_decision_even_below_a_quorum() -> None:
    here, _, id_ = waiting(Gate(quorum=2))
    token, _ = make_link(here.ports, ANN, id_)
    assert decide_by_link(here.ports, id_, token, True)["state"] == "pending"
    with pytest.raises(AlreadyDecided, match="link"):
        decide_by_link(here.ports, id_, token, False)


@pytest.mark.parametrize("gate", [Gate(quorum=2), Gate(four_eyes=True)])
def test_nobody_is_two_people_by_a_link_for_somebody_else(gate: Gate) -> None:
    here, _, id_ = waiting(gate)
    admin = person("root", "ops", scopes=("approvals:decide", "admin"))
    with pytest.raises(Forbidden, match="for himself"):
        make_link(here.ports, admin, id_, sub="bob")
    if gate.four_eyes:
        with pytest.raises(Forbidden):
            make_link(here.ports, person("dev", "ops"), id_)
    token, _ = make_link(here.ports, admin, id_)
    assert decide_by_link(here.ports, id_, token, False)["decided_by"] == "root"


def test_a_link_that_was_tampered_with_or_is_for_another_approval_is_none() -> None:
    here = local(Script(*[calls(REFUND)] * 2), refund)
    for i in range(2):
        here.ask("support", "refund", conversation_id=f"c{i}")
    first, second = (one["approval_id"] for one in here.approvals())
    token, _ = make_link(here.ports, ANN, first)
    head, body, signature = token.split(".")
    for wrong in (f"{head}.{body}.{signature[:-2]}AA", f"{head}.{body}", "", "x", "ü" * 10, "a" * 10_000):
        with pytest.raises(NotFound):
            open_link(here.ports, first, wrong)
    with pytest.raises(NotFound):
        open_link(here.ports, second, token)
    with pytest.raises(NotFound):
        decide_by_link(here.ports, second, token, True)


def test_a_link_ends_with_its_time_and_with_the_approvals() -> None:
    here, _, id_ = waiting(Gate(timeout_s=60))
    token, expires_at = make_link(here.ports, ANN, id_, timeout_s=3600)
    assert expires_at == read.approval(here.ports, "dev", id_)["expires_at"]
    short, _ = make_link(here.ports, ANN, id_, timeout_s=0.001)
    before = here.ports.approvals.now_ms()
    while here.ports.approvals.now_ms() <= before + 1:
        pass
    with pytest.raises(NotFound):
        open_link(here.ports, id_, short)
    make_due(here, "expire", id_)
    sweep(here)
    with pytest.raises(ApprovalExpired):
        decide_by_link(here.ports, id_, token, True)
    with pytest.raises(ApprovalExpired):
        make_link(here.ports, ANN, id_)


def test_only_who_may_decide_gets_a_link_and_only_an_admin_one_for_others() -> None:
    here, _, id_ = waiting(Gate(roles=["ops"]))
    for nobody in (person("bob", "sales"), person("bob", "ops", scopes=["approvals:read"])):
        with pytest.raises(Forbidden):
            make_link(here.ports, nobody, id_)
    with pytest.raises(Forbidden):
        make_link(here.ports, ANN, id_, sub="bob")
    with pytest.raises(NotFound):
        make_link(here.ports, person("ann", "ops", tenant="rival"), id_)
    admin = person("root", "ops", scopes=["approvals:decide", "admin"])
    for wrong in (0.0, -1.0, 1e9):
        with pytest.raises(Invalid):
            make_link(here.ports, admin, id_, timeout_s=wrong)
    token, _ = make_link(here.ports, admin, id_, sub="bob")
    assert decide_by_link(here.ports, id_, token, False)["decided_by"] == "bob"


def test_an_owner_that_changed_its_schema_meanwhile_is_not_asked_what_does_not_fit() -> None:
    @tool("billing/refund", approval=True)
    def stricter(order_id: str, amount: float, iban: str) -> None:
        """Refund an order to an account."""
        ran.append((order_id, amount))

    model = Script(calls(REFUND), says("I see"))
    here, turn, id_ = waiting(model=model)
    here.mesh.serve([stricter])
    here.decide(id_, True)
    here.run()
    [call] = here.turn(turn)["calls"]
    assert call["state"] == "failed" and call["error"]["code"] == "invalid_arguments" and ran == []
    assert "changed while the call waited" in model.shown[1][-1]["content"] and "iban" in model.shown[1][-1]["content"]
    assert entries(here)[-1]["event"] == "not_run"


def test_a_tool_that_is_gone_when_the_approval_comes_is_told_as_not_found() -> None:
    model = Script(calls(REFUND), says("I see"))
    here, turn, id_ = waiting(model=model)
    del here.mesh.tools["billing/refund"]
    here.decide(id_, True)
    here.run()
    [call] = here.turn(turn)["calls"]
    assert call["state"] == "failed" and call["error"]["code"] == "not_found"
    assert here.turn(turn)["state"] == "completed" and entries(here)[-1]["event"] == "not_run"


def test_ungated_calls_leave_no_audit_trace() -> None:
    here = local(Script(calls(("math-add", {"a": 1, "b": 1})), says("2")), add)
    here.ask("support", "sum")
    assert entries(here) == []
