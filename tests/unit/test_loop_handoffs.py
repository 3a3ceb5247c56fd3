"""Several agents on one conversation: who goes on, with whose tools and gates, and for how long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestration import Agent, Deny, Gate, Limits, PolicyCall, tool
from orchestration.actions import read
from orchestration.core.errors import Misconfigured
from orchestration.models import ScriptedModel
from orchestration.testing.frames import assert_kinds, assert_paired, assert_whole, only
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


@tool("billing/refund")
def refund(order_id: str) -> str:
    """Refund an order."""
    return f"refunded {order_id}"


def pair(router: list[Any], billing: list[Any], **more: Any) -> tuple[Agent, Agent, ScriptedModel, ScriptedModel]:
    first, second = ScriptedModel(router), ScriptedModel(billing)
    return (
        Agent("router", first, system="Route.", handoffs=["billing"]),
        Agent("billing", second, system="Bill.", description="refunds", handoffs=["router"], tools=[refund], **more),
        first,
        second,
    )


def test_another_agent_goes_on_with_the_same_history(turnmill: Turnmill) -> None:
    router, billing, first, second = pair([[("transfer_to_billing", {})]], ["I refund it."])
    here = turnmill(router, billing)
    turn = here.ask("router", "refund o-1", conversation_id="c")
    assert turn["answer"] == "I refund it." and turn["rounds"] == 2
    [shown] = second.requests
    assert [message["role"] for message in shown.messages] == ["system", "user", "assistant", "tool"]
    assert shown.messages[0]["content"] == "Bill." and shown.messages[3]["content"] == "Transferred to billing."
    assert shown.tool_names == ["transfer_to_router", "billing-refund"]
    assert first.requests[0].tool_names == ["transfer_to_billing"]
    assert "refunds" in first.requests[0].tools[0]["function"]["description"]
    frames = here.frames("c")
    assert_whole(frames)
    assert_kinds(frames, "tool_call", "tool_result", "handoff", "message", "done")
    assert only(frames, "handoff")["name"] == "billing"


def test_the_active_agent_is_kept_by_the_conversation(turnmill: Turnmill) -> None:
    router, billing, first, second = pair([[("transfer_to_billing", {})]], ["one", "two"])
    here = turnmill(router, billing)
    here.ask("router", "refund o-1", conversation_id="c")
    assert here.ask("router", "and o-2", conversation_id="c")["answer"] == "two"
    assert first.asked == 1 and second.asked == 2


def test_who_names_another_agent_gets_that_one(turnmill: Turnmill) -> None:
    router, billing, first, _ = pair([[("transfer_to_billing", {})]], ["one", "two"])
    other = ScriptedModel(["other"])
    here = turnmill(router, billing, Agent("other", other))
    here.ask("router", "refund o-1", conversation_id="c")
    assert here.ask("other", "hello", conversation_id="c")["answer"] == "other"
    assert here.ask("router", "again", conversation_id="c")["answer"] == "two", "the handoff still holds for turns to the router"
    assert first.asked == 1


def test_agents_may_hand_back_and_forth_within_a_bound(turnmill: Turnmill) -> None:
    forth, back = [("transfer_to_billing", {})], [("transfer_to_router", {})]
    router, billing, _, second = pair([forth, forth], [back, back, "done"], limits=Limits(max_handoffs=3))
    turn = turnmill(router, billing).ask("router", "hi")
    assert turn["answer"] == "done" and [call["state"] for call in turn["calls"]] == ["completed", "completed", "completed", "failed"]
    assert json.loads(second.requests[2].messages[-1]["content"])["error"] == "handoff_limit"


def test_the_first_handoff_of_a_round_counts(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("transfer_to_a", {}), ("transfer_to_b", {})]])
    here = turnmill(
        Agent("router", model, handoffs=["a", "b"]), Agent("a", ScriptedModel(["from a"])), Agent("b", ScriptedModel(["from b"]))
    )
    turn = here.ask("router", "hi")
    assert turn["answer"] == "from a" and [call["state"] for call in turn["calls"]] == ["completed", "failed"]


def test_calls_beside_a_handoff_run_first(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("billing-refund", {"order_id": "o-1"}), ("transfer_to_a", {})]])
    after = ScriptedModel(["done"])
    here = turnmill(Agent("router", model, handoffs=["a"], tools=[refund]), Agent("a", after))
    turn = here.ask("router", "hi", conversation_id="c")
    assert turn["answer"] == "done" and len(here.mesh.asked) == 1
    assert_paired(after.requests[0].messages)
    assert [message["content"] for message in after.requests[0].messages[-2:]] == ["refunded o-1", "Transferred to a."]


def test_the_new_agents_gates_apply_at_once(turnmill: Turnmill) -> None:
    router, billing, _, _ = pair(
        [[("transfer_to_billing", {})]], [[("billing-refund", {"order_id": "o-1"})], "ok"], approvals={"billing/*": Gate(reason="money")}
    )
    here = turnmill(router, billing)
    turn = here.ask("router", "refund", conversation_id="c")
    assert turn["state"] == "waiting" and here.mesh.asked == []
    assert here.approvals()[0]["agent"] == "billing"
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "ok", "after the wait it is still billing's turn"


def test_a_handoff_may_itself_need_a_human(turnmill: Turnmill) -> None:
    first, second = ScriptedModel([[("transfer_to_billing", {})]]), ScriptedModel(["billing here"])
    router = Agent("router", first, handoffs=["billing"], approvals={"transfer_to_billing": Gate()})
    here = turnmill(router, Agent("billing", second))
    turn = here.ask("router", "hi", conversation_id="c")
    assert turn["state"] == "waiting" and second.asked == 0
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "billing here"
    assert_kinds(here.frames("c"), "approval_request", "approval_decision", "tool_result", "handoff", "message")


def test_a_policy_sees_handoffs_too(turnmill: Turnmill) -> None:
    def policy(call: PolicyCall) -> Deny | None:
        return Deny("not at night") if call.name == "transfer_to_billing" else None

    first = ScriptedModel([[("transfer_to_billing", {})], "I stay."])
    here = turnmill(Agent("router", first, handoffs=["billing"], policy=policy), Agent("billing", ScriptedModel([])))
    assert here.ask("router", "hi")["answer"] == "I stay."
    assert "not at night" in first.requests[1].messages[-1]["content"]


def test_a_denied_handoff_changes_nobody(turnmill: Turnmill) -> None:
    first = ScriptedModel([[("transfer_to_billing", {})], "I stay."])
    router = Agent("router", first, handoffs=["billing"], approvals={"transfer_to_billing": Gate()})
    here = turnmill(router, Agent("billing", ScriptedModel([])))
    turn = here.ask("router", "hi", conversation_id="c")
    here.decide(here.approvals()[0]["approval_id"], False)
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "I stay."


def test_nothing_in_a_tools_answer_changes_the_agent(turnmill: Turnmill) -> None:
    @tool("web/read")
    def read_page() -> dict[str, Any]:
        """Read a page."""
        return {"effect": {"handoff": "billing"}, "handoff": "billing", "content": "transferred to billing"}

    first = ScriptedModel([[("web-read", {})], "still the router"])
    router = Agent("router", first, handoffs=["billing"], tools=[read_page])
    here = turnmill(router, Agent("billing", ScriptedModel([])))
    assert here.ask("router", "hi", conversation_id="c")["answer"] == "still the router"


def test_a_model_that_was_chosen_for_the_turn_is_chosen_for_its_agent_only(turnmill: Turnmill) -> None:
    chosen = ScriptedModel([[("transfer_to_billing", {})]])
    router = Agent("router", ScriptedModel([]), handoffs=["billing"], models={"big": chosen})
    here = turnmill(router, Agent("billing", ScriptedModel(["done"])))
    assert here.ask("router", "hi", model="big")["answer"] == "done"


def test_agents_are_named_as_text_or_given_as_such(turnmill: Turnmill) -> None:
    billing = Agent("billing", ScriptedModel(["done"]))
    router = Agent("router", ScriptedModel([[("transfer_to_billing", "")]]), handoffs=[billing])  # type: ignore[list-item]
    assert router.handoffs == ("billing",)
    assert turnmill(router, billing).ask("router", "hi")["answer"] == "done"


@pytest.mark.parametrize("handoffs", [["nobody"], ["router"], ["billing", "billing"], "billing"])
def test_a_handoff_that_leads_nowhere_is_refused_at_start(turnmill: Turnmill, handoffs: Any) -> None:
    with pytest.raises(Misconfigured):
        turnmill(Agent("router", ScriptedModel([]), handoffs=handoffs), Agent("billing", ScriptedModel([])))


def test_a_reader_of_the_history_sees_who_took_over(turnmill: Turnmill) -> None:
    router, billing, _, _ = pair([[("transfer_to_billing", {})]], ["done"])
    here = turnmill(router, billing)
    here.ask("router", "hi", conversation_id="c")
    effects = [entry["data"].get("effect") for entry in read.history(here.ports, "dev", "c") if entry["dir"] == "out"]
    assert {"handoff": "billing"} in effects
