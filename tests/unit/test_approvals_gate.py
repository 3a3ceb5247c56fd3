"""Who asks for an approval: the owner, the agent, or the agent's policy; and gates that cannot work."""

from __future__ import annotations

import json
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest

from orchestration import Agent, Allow, Ask, Deny, Gate, MeshTool, PolicyCall, discover
from orchestration.actions.read import agent as agent_shown
from orchestration.core.errors import ArgumentsInvalid, Misconfigured
from orchestration.core.gate import OnExpiry, gate_for
from orchestration.core.keys import matches
from orchestration.core.tool import ToolSpec
from orchestration.steps import policy as policy_steps
from tests.fixtures.approvals import REFUND, Script, add, calls, credit, local, ran, refund, says

OWNED = ToolSpec("billing/refund", approval="moves real money")


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": True},
        {"roles": "ops"},
        {"roles": [""]},
        {"on_expiry": "retry"},
        {"on_expiry": "escalate"},
        {"escalate_to": ["lead"]},
        {"quorum": 0},
        {"quorum": 1.5},
        {"quorum": True},
        {"timeout_s": None, "on_expiry": "hold"},
        {"timeout_s": 10, "remind_before_s": 10},
        {"timeout_s": None, "remind_before_s": 1},
        {"reason": None},
        {"four_eyes": "no"},
        {"deadline_runs": 1},
    ],
)
def test_a_gate_that_cannot_work_is_refused_when_it_is_declared(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured, match="Gate"):
        Gate(**wrong)


def test_a_gate_survives_the_journal() -> None:
    gate = Gate(60, ["ops"], "why", "escalate", ["lead"], 30, 10, 2, True, True)
    assert Gate(**json.loads(json.dumps(gate.as_json()))) == gate
    assert Gate().as_json() == {}
    assert Gate(timeout_s=None).as_json() == {"timeout_s": None}


def test_an_escalated_gate_asks_others_and_escalates_no_further() -> None:
    gate = Gate(60, ["ops"], "why", on_expiry="escalate", escalate_to=["lead"], escalate_timeout_s=20, remind_before_s=30, quorum=2)
    after = gate.escalated()
    assert (after.roles, after.timeout_s, after.on_expiry, after.quorum) == (("lead",), 20, OnExpiry.REFUSE, 2)
    assert after.remind_before_s is None, "a reminder that would come before the request is none"


def test_the_most_specific_refinement_wins_and_keeps_the_owners_reason() -> None:
    gates = {"billing/*": Gate(roles=["ops"]), "billing/refund": Gate(roles=["lead"]), "**": Gate(reason="all of them")}
    assert gate_for(OWNED, gates) == Gate(roles=["lead"], reason="moves real money")
    assert gate_for(ToolSpec("billing/credit"), gates) == Gate(roles=["ops"])
    assert gate_for(ToolSpec("math/add"), gates) == Gate(reason="all of them")


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("billing/refund", "billing/refund", True),
        ("billing/*", "billing/refund", True),
        ("billing/*", "billing/a/b", False),
        ("**", "billing/a/b", True),
        ("billing/**", "billing", True),
        ("**/refund", "billing/eu/refund", True),
        ("*/refund", "billing/eu/refund", False),
        ("billing/**/refund", "billing/refund", True),
        ("billing/re$*", "billing/refund", True),
        ("billing/re*", "billing/refund", True),
        ("billing/$*fund", "billing/refunds", False),
        ("billing/[r]efund", "billing/refund", False),
        ("billing/[r]efund", "billing/[r]efund", True),
        ("billing/re.und", "billing/refund", False),
        ("Billing/refund", "billing/refund", False),
    ],
)
def test_key_expressions_mean_what_they_mean_on_the_mesh(pattern: str, key: str, fits: bool) -> None:
    assert matches(pattern, key) is fits


def test_of_several_expressions_the_most_specific_one_counts() -> None:
    order = ["billing/eu/refund", "billing/eu/re$*", "billing/eu/*", "*/eu/refund", "billing/*/*", "*/*/refund"]
    order += ["billing/**", "*/*/*", "*/**", "**"]
    gates = {pattern: Gate(reason=pattern) for pattern in reversed(order)}
    spec, won = ToolSpec("billing/eu/refund"), []
    while gates:
        gate = gate_for(spec, gates)
        assert gate is not None
        won.append(gate.reason)
        del gates[gate.reason]
    assert won == order


def test_a_gate_for_the_name_that_the_model_uses_is_a_gate_for_the_tool() -> None:
    here, _, turn = ask_credit(5, approvals={"billing-credit": Gate(roles=["ops"])})
    assert turn["state"] == "waiting" and here.approvals()[0]["roles"] == ["ops"] and ran == []


@pytest.mark.parametrize(
    "pattern", ["", "/billing/refund", "billing/refund/", "billing//refund", "billing/refund ", "billing/$", "a?b", 5, None]
)
def test_a_pattern_that_matches_nothing_is_refused_and_gates_nothing_by_accident(pattern: Any) -> None:
    with pytest.raises(Misconfigured, match="matches nothing"):
        Agent("a", Script(), approvals={pattern: Gate()})
    with pytest.raises(Misconfigured, match="matches nothing"):
        discover("billing/*", approval=[pattern])


def test_one_text_where_a_list_is_meant_is_refused() -> None:
    with pytest.raises(Misconfigured, match="a list of texts"):
        discover("billing/*", approval="billing/refund")


def test_an_owners_demand_is_a_gate_of_a_day_for_anybody_who_may_decide() -> None:
    gate = gate_for(OWNED, {"search/*": Gate(roles=["x"])})
    assert gate == Gate(timeout_s=86_400, roles=(), reason="moves real money")
    assert gate_for(ToolSpec("math/add"), {}) is None


def test_an_agent_without_anywhere_to_ask_is_refused_if_a_known_tool_is_gated() -> None:
    for gated in (refund, MeshTool("other/refund", approval=True)):
        with pytest.raises(Misconfigured, match="need one"):
            Agent("a", Script(), tools=[add, gated], approvals=None)
    Agent("a", Script(), tools=[add], approvals=None)


def test_a_gated_tool_that_appears_later_is_refused_at_the_call_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Script(calls(REFUND), says("I could not"))
    here = local(model, discover("billing/*"), approvals=None)
    here.mesh.serve([refund])
    turn = here.ask("support", "refund")
    assert turn["state"] == "completed" and turn["calls"][0]["error"]["code"] == "approval_unavailable"
    assert "nowhere to ask" in model.shown[1][-1]["content"] and ran == []
    assert any("billing/refund" in record.getMessage() and "approval_unavailable" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("approvals", [{"billing/*": "ops"}, {"billing/*": None}])
def test_a_refinement_that_is_no_gate_is_refused(approvals: Any) -> None:
    with pytest.raises(Misconfigured, match="no Gate"):
        Agent("a", Script(), approvals=approvals)


def big(call: PolicyCall) -> Allow | Ask | Deny | None:
    """More than 100 is asked, more than 1000 never allowed."""
    amount = call.arguments.get("amount", 0)
    if amount > 1000:
        return Deny("nobody may move that much")
    return Ask(Gate(roles=["ops"]), reason=f"{amount} is a lot") if amount > 100 else None


def ask_credit(amount: float, **agent: Any) -> tuple[Any, Script, dict[str, Any]]:
    model = Script(calls(("billing-credit", {"order_id": "o", "amount": amount})), says("done"))
    here = local(model, credit, **agent)
    return here, model, here.ask("support", "credit")


def test_a_policy_decides_by_the_arguments_whether_a_human_is_asked() -> None:
    _, _, turn = ask_credit(50, policy=big)
    assert turn["state"] == "completed" and ran == [("o", 50)]
    here, _, turn = ask_credit(500, policy=big)
    assert turn["state"] == "waiting"
    [approval] = here.approvals()
    assert approval["roles"] == ["ops"] and approval["reason"] == "500 is a lot"
    here.decide(approval["approval_id"], True)
    here.run()
    assert ran == [("o", 50), ("o", 500)]


def test_what_a_policy_denies_never_runs_and_the_model_reads_why() -> None:
    here, model, turn = ask_credit(5000, policy=big)
    assert turn["state"] == "completed" and here.approvals() == [] and ran == []
    assert turn["calls"][0]["state"] == "denied" and turn["calls"][0]["error"]["code"] == "policy_denied"
    assert "nobody may move that much" in model.shown[1][-1]["content"]


def test_a_policy_sees_the_call_and_changes_nothing_of_it() -> None:
    seen: list[PolicyCall] = []

    def meddling(call: PolicyCall) -> Allow:
        seen.append(call)
        call.arguments["amount"] = 1_000_000
        return Allow()

    ask_credit(5, policy=meddling)
    assert ran == [("o", 5)]
    [call] = seen
    assert (call.name, call.prefix, call.agent) == ("billing-credit", "billing/credit", "support")
    assert call.principal is not None and call.principal.sub == "dev" and call.turn_id.startswith("tn_")


@pytest.mark.parametrize("said", [Allow(), None])
def test_a_policy_waives_neither_the_owners_gate_nor_the_agents(said: Allow | None) -> None:
    model = Script(calls(REFUND), says("done"))
    here = local(model, refund, policy=lambda _: said)
    assert here.ask("support", "refund")["state"] == "waiting"
    here, _, turn = ask_credit(5, policy=lambda _: said, approvals={"billing/credit": Gate(roles=["ops"])})
    assert turn["state"] == "waiting" and here.approvals()[0]["roles"] == ["ops"]


def test_a_policy_that_asks_without_a_gate_asks_by_the_one_that_is_there() -> None:
    here, _, _ = ask_credit(5, policy=lambda _: Ask(reason="because"), approvals={"billing/credit": Gate(roles=["ops"])})
    assert (here.approvals()[0]["roles"], here.approvals()[0]["reason"]) == (["ops"], "because")


NONSENSE: list[Any] = ["yes", True, Allow, Ask(gate={"roles": ["ops"]}), Ask(reason=5), Deny(reason=["no"])]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [lambda _: 1 / 0, lambda _: exit(), *(lambda _, said=said: said for said in NONSENSE)])
def test_a_policy_that_gives_no_verdict_lets_nothing_run(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, model, turn = ask_credit(5, policy=policy)
    assert turn["calls"][0]["error"]["code"] == "policy_failed" and ran == []
    assert "gave no verdict" in model.shown[1][-1]["content"]
    told = [record.getMessage() for record in caplog.records]
    assert any("policy_failed" in text for text in told) and any(
        "agent support gave no verdict about billing/credit" in text for text in told
    )


def test_a_policy_that_hangs_lets_nothing_run_and_holds_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestration.steps.policy.LIMIT_S", 0.05)
    monkeypatch.setattr("orchestration.steps.policy.MAX_HANGING", 2)
    released, asked = threading.Event(), []

    def hangs(call: PolicyCall) -> None:
        asked.append(call)
        released.wait(60)

    try:
        for _ in range(4):
            _, _, turn = ask_credit(5, policy=hangs)
            assert turn["state"] == "completed" and turn["calls"][0]["error"]["code"] == "policy_failed" and ran == []
        assert len(asked) == 2, "while two hang no further one is asked"
    finally:
        released.set()
    until_free = time.monotonic() + 30
    while policy_steps._hanging and time.monotonic() < until_free:
        time.sleep(0.01)
    ask_credit(5, policy=lambda _: None)
    assert ran == [("o", 5)]


def test_a_policy_sees_the_context_of_its_step() -> None:
    name = ContextVar("name", default="")
    name.set("here")
    heard: list[str] = []
    ask_credit(5, policy=lambda _: heard.append(name.get()))
    assert heard == ["here"]


def test_a_policy_that_asks_where_there_is_nowhere_to_ask_lets_nothing_run() -> None:
    _, _, turn = ask_credit(500, policy=big, approvals=None)
    assert turn["calls"][0]["error"]["code"] == "approval_unavailable" and ran == []


def test_a_policy_that_must_be_awaited_is_refused() -> None:
    async def policy(call: PolicyCall) -> Allow:
        return Allow()

    with pytest.raises(Misconfigured, match="policy"):
        Agent("a", Script(), policy=policy)  # type: ignore[arg-type]


def declared_by_hand(**more: Any) -> MeshTool:
    return MeshTool("billing/refund", "Refund.", refund.spec.parameters, **more)


@pytest.mark.parametrize("beside", [(), (discover("billing/*"),)], ids=["alone", "beside its discovery"])
def test_an_agent_that_declares_the_tool_by_hand_does_not_waive_its_owners_demand(beside: tuple[Any, ...]) -> None:
    here = local(Script(calls(REFUND), says("done")), declared_by_hand(), *beside)
    here.mesh.serve([refund])
    assert here.ask("support", "refund")["state"] == "waiting"
    assert here.approvals()[0]["reason"] == "moves real money"
    [shown] = agent_shown(here.ports, "support")["tools"]
    assert shown["approval"]["reason"] == "moves real money"
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert ran == [("o-42", 40)]


def test_what_a_human_is_asked_about_and_answers_fits_the_owners_schema_whoever_declared_another() -> None:
    lax = MeshTool("billing/refund", "Refund.", {"type": "object"})
    broken = ("billing-refund", {"order_id": "o-42", "amount": "a lot"})
    model = Script(calls(broken), calls(REFUND), says("done"))
    here = local(model, lax)
    here.mesh.serve([refund])
    turn = here.ask("support", "refund")
    assert "what the tool's owner takes" in model.shown[1][-1]["content"] and turn["state"] == "waiting"
    [approval] = here.approvals()
    assert approval["schema"] == refund.spec.parameters
    with pytest.raises(ArgumentsInvalid):
        here.decide(approval["approval_id"], True, arguments={"order_id": "o-42", "amount": "a lot"})
    here.decide(approval["approval_id"], True, arguments={"order_id": "o-42", "amount": 5})
    here.run()
    assert ran == [("o-42", 5)]


def test_an_owners_demand_that_turns_up_later_is_refused_where_there_is_nowhere_to_ask() -> None:
    here = local(Script(calls(REFUND), says("I could not")), declared_by_hand(), approvals=None)
    here.mesh.serve([refund])
    assert here.ask("support", "refund")["calls"][0]["error"]["code"] == "approval_unavailable" and ran == []


def test_what_a_hand_declared_tool_says_of_approvals_stands_beside_its_owners_word() -> None:
    here = local(Script(calls(("billing-credit", {"order_id": "o", "amount": 1}))), MeshTool("billing/credit", approval="ask me"))
    here.mesh.serve([credit])
    here.ask("support", "credit")
    assert here.approvals()[0]["reason"] == "ask me"
