"""The verdict on a chaos run finds what is wrong: an account in order has no fault, and each thing that may be wrong with it is one."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.evidence import Evidence
from tests.chaos.receiver import Call
from tests.chaos.record import Accepted, Decided, Record, Seen, Watch
from tests.chaos.verdict import faults
from tests.chaos.workload import AGENT, HELD, KEY, Submission

CONVERSATION = "chaos-c0"
INNER = {"name": "c0-0.0.1", "rounds": [[["note", {KEY: "c0-0.0.1.0.0"}]]]}
OUTER: dict[str, Any] = {"name": "c0-0", "rounds": [[(HELD, {KEY: "c0-0.0.0"}), (AGENT, {"input": json.dumps(INNER)})]], "tokens": 2}


def call(call_id: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"call_id": call_id, "name": "any", "arguments": arguments, "state": "completed", "error": None, **more}


def turn(turn_id: str, conversation_id: str, answer: str, tokens: int, *calls: dict[str, Any]) -> dict[str, Any]:
    return {
        "turn_id": turn_id,
        "conversation_id": conversation_id,
        "state": "completed",
        "stop_reason": "answer",
        "error": None,
        "answer": answer,
        "started_at": "2026-01-01T00:00:00Z",
        "rounds": 2,
        "usage": {"input_tokens": tokens, "output_tokens": 0},
        "calls": list(calls),
    }


def history(turn_id: str, script: dict[str, Any], answer: str, *call_ids: str) -> list[dict[str, Any]]:
    said = [{"kind": "tool_calls", "content": "working", "calls": [{"id": call_id} for call_id in call_ids]}]
    said += [{"kind": "tool_result", "tool_call_id": call_id} for call_id in call_ids]
    said += [{"kind": "message", "content": answer}]
    entries = [{"dir": "in", "turn_id": turn_id, "n": 1, "data": json.dumps(script)}]
    return entries + [{"dir": "out", "turn_id": turn_id, "n": place, "data": data} for place, data in enumerate(said, 2)]


def frames(turn_id: str, first: int, *told: dict[str, Any]) -> list[tuple[int, str, dict[str, Any]]]:
    return [(number, turn_id, {"turn_id": turn_id, **frame}) for number, frame in enumerate((*told, DONE), first)]


DONE = {"kind": "done", "stop_reason": "answer"}
REQUEST = {"kind": "approval_request", "approval_id": "ap_1"}


def in_order() -> Evidence:
    """A turn whose first call was held, reopened and approved, and whose second one an agent answered."""
    record = Record()
    submission = Submission("c0-0", OUTER, called_back=True, watched=True)
    record.sent.append((CONVERSATION, submission))
    record.accepted["c0-0"] = Accepted(submission, CONVERSATION, "tn_1")
    record.decided["ap_1"] = [Decided(True, {KEY: "c0-0.0.0"})]
    record.reopened["ap_1"] += 1
    signed = call("tc_1", {KEY: "c0-0.0.0"}, approval_id="ap_1")
    asked = call("tc_2", {"input": json.dumps(INNER)}, child_turn_id="tn_2")
    stored = frames(
        "tn_1",
        1,
        *({"kind": "token", "round": 1, "text": f"{number} "} for number in range(2)),
        *({"kind": "tool_call", "tool_call_id": call_id} for call_id in ("tc_1", "tc_2")),
        REQUEST,
        REQUEST | {"state": "held"},
        REQUEST | {"reopened": True},
        {"kind": "approval_decision", "approval_id": "ap_1"},
        *({"kind": "tool_result", "tool_call_id": call_id} for call_id in ("tc_2", "tc_1")),
    )
    said = [{"kind": kind, "approval_id": "ap_2"} for kind in ("approval_request", "approval_decision")]
    nested = frames("tn_2", 1, *said, *({"kind": kind, "tool_call_id": "tc_3"} for kind in ("tool_call", "tool_result")))
    for watch in (Watch(CONVERSATION, "tn_1"), Watch(CONVERSATION, agent="ledger")):
        watch.frames = [Seen(number, frame["kind"], frame | {"seq": number}) for number, _, frame in stored]
        record.watches.append(watch)
    outer = turn("tn_1", CONVERSATION, "done", 40, signed, asked)
    return Evidence(
        record=record,
        turns={"tn_1": outer, "tn_2": turn("tn_2", "cv_2", "inner", 20, call("tc_3", {KEY: "c0-0.0.1.0.0"}, approval_id="ap_2"))},
        names={"tn_1": "c0-0", "tn_2": "c0-0.0.1"},
        parents={"tn_2": "tn_1"},
        histories={CONVERSATION: history("tn_1", OUTER, "done", "tc_1", "tc_2"), "cv_2": history("tn_2", INNER, "inner", "tc_3")},
        frames={CONVERSATION: stored, "cv_2": nested},
        effects=Counter({"c0-0.0.0": 1, "c0-0.0.1.0.0": 1}),
        model_faults=[],
        open_turns=[],
        calls=[
            Call("callback-turn_ended-tn_1-1", "turn.ended", outer, True),
            Call("callback-approval_requested-ap_1-1", "approval.requested", {"approval_id": "ap_1"}, True),
            Call("callback-approval_requested-ap_2-1", "approval.requested", {"approval_id": "ap_2"}, True),
            Call("callback-approval_requested-ap_1-2", "approval.requested", {"approval_id": "ap_1"}, False),
        ],
    )


def test_an_account_in_order_has_no_fault() -> None:
    assert faults(in_order()) == []


def lose_a_frame(evidence: Evidence) -> None:
    del evidence.record.watches[1].frames[3]


def repeat_a_frame(evidence: Evidence) -> None:
    evidence.record.watches[0].frames.append(evidence.record.watches[0].frames[-1])


def deny(evidence: Evidence) -> None:
    evidence.record.decided["ap_1"] = [Decided(False, {KEY: "c0-0.0.0"})]


def both(evidence: Evidence) -> None:
    evidence.record.decided["ap_1"].append(Decided(False, {KEY: "c0-0.0.0"}))


def another_turn(evidence: Evidence) -> None:
    evidence.turns["tn_3"] = {**evidence.turns["tn_1"], "turn_id": "tn_3"}
    evidence.names["tn_3"] = "c0-0"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda it: it.effects.update(["c0-0.0.0"]), "happened 2 times"),
        (lambda it: it.effects.update(["nobody's"]), "no turn knows"),
        (lambda it: it.effects.pop("c0-0.0.1.0.0"), "happened 0 times"),
        (lambda it: it.turns["tn_1"]["calls"][0].update(state="denied"), "is denied"),
        (lambda it: it.turns["tn_1"]["calls"][0].update(state="running"), "of an ended turn is running"),
        (lambda it: it.turns["tn_1"]["usage"].update(input_tokens=50), "usage"),
        (lambda it: it.turns["tn_1"].update(state="cancelled", stop_reason="cancelled"), "nobody wished it"),
        (lambda it: it.turns["tn_2"].update(state="cancelled", stop_reason="cancelled"), "its agent's turn cancelled"),
        (lambda it: it.turns["tn_2"].update(state="failed", stop_reason="error"), "nested agent ended failed"),
        (lambda it: it.parents.clear(), "nobody submitted"),
        (another_turn, "became 2 turns"),
        (lambda it: it.record.accepted.update({"c0-0": Accepted(it.submissions["c0-0"], CONVERSATION, "tn_9")}), "not there"),
        (lambda it: it.open_turns.append("tn_1"), "does not end"),
        (lambda it: it.model_faults.append("a call without its result"), "the model was shown"),
        (deny, "was denied, and its call is completed"),
        (both, "both a yes and a no"),
        (lambda it: it.histories[CONVERSATION].pop(2), "without its call"),
        (lambda it: it.histories[CONVERSATION].pop(), "the history ends with"),
        (lambda it: it.frames[CONVERSATION].pop(), "last frame"),
        (lambda it: it.frames[CONVERSATION].pop(0), "the tokens of round"),
        (lambda it: it.frames[CONVERSATION].pop(2), "tool_call frames"),
        (lambda it: it.frames[CONVERSATION].pop(5), "asked for again"),
        (lambda it: it.record.reopened.clear(), "asked for again"),
        (lose_a_frame, "missed 1 of"),
        (repeat_a_frame, "saw twice"),
        (lambda it: it.calls.pop(0), "the receiver was told as []"),
        (lambda it: it.calls.pop(2), "of ap_2 the receiver was told as []"),
        (lambda it: it.calls.append(Call("callback-turn_ended-tn_2-1", "turn.ended", it.turns["tn_2"], True)), "nobody had wished"),
        (lambda it: it.calls[0].data.update(state="failed"), "another end"),
    ],
)
def test_whatever_is_wrong_is_a_fault(spoil: Callable[[Evidence], Any], says: str) -> None:
    evidence = in_order()
    evidence.calls[:] = copy.deepcopy(evidence.calls)
    spoil(evidence)
    assert any(says in fault.what for fault in faults(evidence)), [fault.what for fault in faults(evidence)]
