"""The decision: first one wins, a quorum, four eyes, edited arguments, and what every misuse is answered."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestration import Gate
from orchestration.actions import read
from orchestration.core.approval import FOLLOWS, OPEN, ApprovalState, same_json
from orchestration.core.errors import (
    AlreadyDecided,
    ApprovalCancelled,
    ApprovalExpired,
    ArgumentsDiffer,
    ArgumentsInvalid,
    Forbidden,
    Invalid,
    NotFound,
)
from orchestration.core.safe_json import dumps
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import REFUND, Script, add, calls, credit, local, make_due, person, ran, refund, says, sweep

ANN, BOB, CEM = person("ann", "ops"), person("bob", "ops"), person("cem", "ops")


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


def waiting(*, gate: Gate | None = None, model: Script | None = None, **more: Any) -> tuple[LocalTurnmill, str]:
    """A turn that waits for one approval."""
    here = local(model or Script(calls(REFUND), says("done")), refund, approvals={"billing/refund": gate} if gate else {}, **more)
    here.ask("support", "refund", conversation_id="c")
    [approval] = here.approvals()
    return here, approval["approval_id"]


def kinds(here: LocalTurnmill, kind: str) -> list[dict[str, Any]]:
    return [frame for frame in here.frames("c") if frame["kind"] == kind]


def test_twenty_deciders_at_once_one_decision_holds() -> None:
    here, id_ = waiting()
    answers: list[str] = []
    barrier = threading.Barrier(20)

    def decide(number: int) -> None:
        barrier.wait()
        yes = number % 2 == 0
        try:
            here.decide(id_, yes, by=ANN if yes else BOB)
            answers.append(f"200 {yes}")
        except AlreadyDecided as error:
            answers.append(f"409 {yes}")
            assert error.approval["state"] in ("approved", "denied")

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = read.approval(here.ports, "dev", id_)["state"] == "approved"
    assert sorted(answers) == sorted([f"200 {won}"] * 10 + [f"409 {not won}"] * 10)
    assert len(kinds(here, "approval_decision")) == 1
    here.run()
    assert len(ran) == (1 if won else 0)


def test_the_same_decision_again_is_the_same_answer_and_one_frame() -> None:
    here, id_ = waiting()
    first = here.decide(id_, True, by=ANN, note="fine")
    assert here.decide(id_, True, by=ANN, note="fine") == first
    assert here.decide(id_, True, by=ANN, arguments=dict(REFUND[1])) == first, "the arguments in full are the same decision"
    with pytest.raises(AlreadyDecided):
        here.decide(id_, True, by=ANN, arguments={"order_id": "o-42", "amount": 1})
    with pytest.raises(AlreadyDecided):
        here.decide(id_, False, by=ANN)
    with pytest.raises(AlreadyDecided):
        here.decide(id_, True, by=BOB)
    assert len(kinds(here, "approval_decision")) == 1


@pytest.mark.parametrize("id_", ["nope", "pending", "ap_", "ap_x", "x" * 200, "", "ap:1", "ap_ü"])
def test_an_id_that_nothing_has_is_not_found_and_never_a_fault(id_: str) -> None:
    here, _ = waiting()
    with pytest.raises(NotFound):
        here.decide(id_, True)
    with pytest.raises(NotFound):
        read.approval(here.ports, "dev", id_)


def test_another_tenants_approval_looks_like_none() -> None:
    here, id_ = waiting()
    with pytest.raises(NotFound) as foreign:
        here.decide(id_, True, by=person("eve", tenant="rival"))
    with pytest.raises(NotFound) as unknown:
        here.decide("ap_none", True, by=person("eve", tenant="rival"))
    assert str(foreign.value) == str(unknown.value)
    assert read.approvals(here.ports, "rival")["approvals"] == []


def test_who_lacks_the_scope_or_every_role_decides_nothing() -> None:
    here, id_ = waiting(gate=Gate(roles=["ops", "lead"]))
    for nobody in (person("ann", "sales"), person("ann"), person("ann", "ops", scopes=["approvals:read"])):
        with pytest.raises(Forbidden):
            here.decide(id_, True, by=nobody)
    assert here.decide(id_, True, by=person("ann", "lead"))["state"] == "approved"


def test_four_eyes_keep_the_submitter_from_deciding_either_way() -> None:
    here, id_ = waiting(gate=Gate(four_eyes=True))
    for answer in (True, False):
        with pytest.raises(Forbidden, match="another principal"):
            here.decide(id_, answer)
    assert here.decide(id_, True, by=ANN)["decided_by"] == "ann"


def test_a_quorum_of_two_needs_two_people() -> None:
    here, id_ = waiting(gate=Gate(quorum=2))
    first = here.decide(id_, True, by=ANN, note="looks right")
    assert first["state"] == "pending" and first["decided_by"] is None
    assert [(one["by"], one["approved"], one["note"]) for one in first["decisions"]] == [("ann", True, "looks right")]
    assert first["decisions"][0]["at"] is not None
    assert here.decide(id_, True, by=ANN)["state"] == "pending", "the same person counts once"
    here.run()
    assert ran == [] and kinds(here, "approval_decision") == []
    settled = here.decide(id_, True, by=BOB)
    assert settled["state"] == "approved" and settled["decided_by"] == "bob" and len(settled["decisions"]) == 2
    assert here.decide(id_, True, by=ANN) == settled, "the first of them may ask again"
    here.run()
    assert ran == [("o-42", 40)] and len(kinds(here, "approval_decision")) == 1


def test_one_denial_settles_a_quorum_even_by_who_approved_before() -> None:
    for denier in (ANN, BOB):
        here, id_ = waiting(gate=Gate(quorum=3))
        here.decide(id_, True, by=ANN)
        assert here.decide(id_, False, by=denier, note="no")["state"] == "denied"
        with pytest.raises(AlreadyDecided):
            here.decide(id_, True, by=CEM)
        here.run()
    assert ran == []


def test_a_quorum_approves_the_same_arguments_or_nothing() -> None:
    here, id_ = waiting(gate=Gate(quorum=2))
    edited = {"order_id": "o-42", "amount": 5}
    shown = here.decide(id_, True, by=ANN, arguments=edited)
    assert shown["arguments"] == REFUND[1] and shown["decisions"][0]["arguments"] == edited
    for other in ({"order_id": "o-42", "amount": 6}, None):
        with pytest.raises(ArgumentsDiffer):
            here.decide(id_, True, by=BOB, arguments=other)
    assert len(read.approval(here.ports, "dev", id_)["decisions"]) == 1, "a decision that differs is not counted"
    assert here.decide(id_, True, by=BOB, arguments={"order_id": "o-42", "amount": 5.0})["state"] == "approved"
    here.run()
    assert ran == [("o-42", 5)]


def test_edited_arguments_that_break_the_schema_use_nothing_up() -> None:
    here, id_ = waiting()
    for wrong in ({"order_id": "o-42", "amount": "a lot"}, {"amount": 1}, {}):
        with pytest.raises(ArgumentsInvalid) as refused:
            here.decide(id_, True, arguments=wrong)
        assert refused.value.errors
    assert read.approval(here.ports, "dev", id_)["state"] == "pending"
    settled = here.decide(id_, True, arguments={"order_id": "o-42", "amount": 5})
    here.run()
    assert ran == [("o-42", 5.0)] and settled["arguments"] == {"order_id": "o-42", "amount": 5}


def test_a_late_decision_is_refused_although_nobody_swept() -> None:
    here, id_ = waiting(gate=Gate(timeout_s=3600))
    make_due(here, "expire", id_)
    with pytest.raises(ApprovalExpired):
        here.decide(id_, True)
    here.run()
    assert ran == [] and here.ports.approvals.get("dev", id_).state is ApprovalState.EXPIRED
    sweep(here)
    assert len(kinds(here, "approval_decision")) == 1


def test_three_gated_calls_are_decided_one_by_one_in_any_order() -> None:
    asked = [("billing-refund", {"order_id": f"o-{i}", "amount": i}) for i in (1, 2, 3)]
    model = Script(calls(*asked, ("math-add", {"a": 1, "b": 1})), says("done"))
    here = local(model, refund, add)
    turn = here.ask("support", "refund")
    ids = [call["approval_id"] for call in turn["calls"][:3]]
    assert [call["state"] for call in turn["calls"]] == ["waiting"] * 3 + ["completed"], "the ungated one runs meanwhile"
    here.decide(ids[2], True)
    here.run()
    here.decide(ids[0], True)
    here.run()
    assert here.turn(turn["turn_id"])["state"] == "waiting" and ran == [("o-3", 3), ("o-1", 1)]
    here.decide(ids[1], False, note="not this one")
    here.run()
    ended = here.turn(turn["turn_id"])
    assert ended["state"] == "completed" and ran == [("o-3", 3), ("o-1", 1)]
    told = [message for message in model.shown[1] if message["role"] == "tool"]
    assert len(told) == 4 and "denied" in told[1]["content"] and "not this one" in told[1]["content"]
    assert [call["id"] for call in model.shown[1][1]["tool_calls"]] == [message["tool_call_id"] for message in told]


def test_cancelling_the_turn_cancels_every_approval_and_a_later_yes_runs_nothing() -> None:
    here = local(Script(calls(REFUND, ("billing-credit", {"order_id": "o", "amount": 1}))), refund, credit, approvals={"billing/*": Gate()})
    turn = here.ask("support", "both", conversation_id="c")
    ids = [one["approval_id"] for one in here.approvals()]
    here.cancel(turn["turn_id"])
    for id_ in ids:
        assert read.approval(here.ports, "dev", id_)["state"] == "cancelled"
        with pytest.raises(ApprovalCancelled):
            here.decide(id_, True)
    here.run()
    assert ran == [] and kinds(here, "done")
    assert here.ports.store.client.zrange("tm:due", 0, -1) == []


def test_a_model_that_asks_again_after_each_no_gets_a_new_approval_each_time() -> None:
    from orchestration import Limits

    here = local(Script(*(calls(REFUND) for _ in range(4))), refund, limits=Limits(max_rounds=3))
    turn = here.ask("support", "refund")
    seen = []
    while here.approvals():
        [approval] = here.approvals()
        seen.append(approval["approval_id"])
        here.decide(approval["approval_id"], False)
        here.run()
    ended = here.turn(turn["turn_id"])
    assert ended["stop_reason"] == "round_limit" and ran == []
    assert len(seen) == len(set(seen)) == 2


def test_a_change_whose_answer_got_lost_can_be_asked_again() -> None:
    here, id_ = waiting(gate=Gate(quorum=2))
    run = here.ports.store.run

    def twice(script: str, *args: str | int) -> Any:
        if script == "decide":
            run(script, *args)
        return run(script, *args)

    here.ports.store.run = twice  # type: ignore[method-assign]
    assert here.decide(id_, True, by=ANN)["state"] == "pending"
    assert here.decide(id_, True, by=BOB)["state"] == "approved"
    here.queue.waiting.extend(here.ports.outbox.sweep(unsent_after_ms=-1000).unsent)
    here.run()
    assert ran == [("o-42", 40)] and len(kinds(here, "approval_decision")) == 1
    assert [one["by"] for one in read.approval(here.ports, "dev", id_)["decisions"]] == ["ann", "bob"]
    decided = [one for one in read.audit(here.ports, "dev")["entries"] if one["event"] == "decided"]
    assert len(decided) == 2


def test_lists_are_in_order_complete_and_stable_while_approvals_are_decided() -> None:
    replies = [calls(("billing-refund", {"order_id": f"o-{i}", "amount": i})) for i in range(7)]
    here = local(Script(*replies, *[says("done")] * 7), refund)
    for i in range(7):
        here.ask("support", "refund", conversation_id=f"c{i}")
    seen, cursor = [], None
    while True:
        page = read.approvals(here.ports, "dev", limit=3, cursor=cursor)
        seen += [one["arguments"]["order_id"] for one in page["approvals"]]
        cursor = page["cursor"]
        if cursor is None:
            break
        here.decide(page["approvals"][-1]["approval_id"], False)  # what the cursor was taken from goes away
    assert seen == [f"o-{i}" for i in range(7)]
    assert [one["arguments"]["order_id"] for one in read.approvals(here.ports, "dev", "denied")["approvals"]] == ["o-2", "o-5"]
    assert len(read.approvals(here.ports, "dev", agent="support")["approvals"]) == 5
    assert read.approvals(here.ports, "dev", agent="other")["approvals"] == []
    for wrong in ("x", "-1", "1" * 30, "1.5"):
        with pytest.raises(Invalid):
            read.approvals(here.ports, "dev", cursor=wrong)
    with pytest.raises(Invalid):
        read.approvals(here.ports, "dev", state="lost")


def test_the_states_of_an_approval_are_those_of_the_api() -> None:
    assert {str(state) for state in FOLLOWS} == {"pending", "held", "approved", "denied", "expired", "cancelled"}
    assert {ApprovalState.PENDING, ApprovalState.HELD} == OPEN


def test_json_values_are_the_same_when_json_says_so() -> None:
    assert same_json({"a": [1, 2.0, None]}, {"a": [1.0, 2, None]})
    for one, other in ((1, True), (0, False), (None, False), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1)):
        assert not same_json(one, other)


def test_the_arguments_that_ran_are_those_of_the_record_whatever_they_hold() -> None:
    odd = {"order_id": 'ü "x" \\ \u2028 %0', "amount": 1e-7}
    here, id_ = waiting(model=Script(calls(("billing-refund", odd)), says("done")))
    here.decide(id_, True)
    here.run()
    assert ran == [(odd["order_id"], odd["amount"])]
    [entry] = [one for one in read.audit(here.ports, "dev")["entries"] if one["event"] == "ran"]
    assert entry["ran"]["arguments"] == odd


@pytest.mark.parametrize("beside", [(), (("math-add", {"a": 1, "b": 2}),)], ids=["alone", "beside another"])
def test_the_model_reads_of_the_call_that_ran_and_not_of_the_one_that_it_asked_for(beside: tuple[Any, ...]) -> None:
    model = Script(calls(REFUND, *beside), says("done"))
    here = local(model, refund, add)
    here.ask("support", "refund", conversation_id="c")
    [id_] = [approval["approval_id"] for approval in here.approvals()]
    edited = {"order_id": "o-42", "amount": 5}
    here.decide(id_, True, arguments=edited)
    here.run()
    [asked] = [message for message in model.shown[1] if message["role"] == "assistant"]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == edited and ran == [("o-42", 5)]
    turn = here.turn(read.approval(here.ports, "dev", id_)["turn_id"])
    assert turn["calls"][0]["arguments"] == edited
    assert read.history(here.ports, "dev", turn["conversation_id"])[1]["data"]["calls"][0]["arguments"] == dumps(edited)
    requested = read.audit(here.ports, "dev", approval_id=id_)["entries"][0]
    assert requested["shown"]["arguments"] == REFUND[1], "what was asked for is on record too"


def test_the_drawing_of_an_approval_is_the_table_of_the_code() -> None:
    section = (Path(__file__).parents[2] / "docs/states.md").read_text(encoding="utf-8").split("## An approval")[1].split("```")[1]
    drawn: dict[str, set[str]] = {}
    for source, target in re.findall(r"(\w+) --> (\w+)", section):
        drawn.setdefault(source, set()).add(target)
    assert drawn == {str(state): {str(after) for after in following} for state, following in FOLLOWS.items() if following}
