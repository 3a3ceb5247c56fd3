"""A turn on the real journal (fakeredis), one process, no services: what is committed, in which order, and what a repeated step does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestration import Agent, Gate, Limits, ModelReply, RequestedCall, Usage, tool
from orchestration.actions import read
from orchestration.actions.cancel import cancel_call
from orchestration.core.errors import (
    AlreadyDecided,
    ApprovalCancelled,
    ApprovalExpired,
    ArgumentsInvalid,
    ConversationBusy,
    Forbidden,
    IdempotencyMismatch,
    MailboxFull,
    NotFound,
    TurnEnded,
)
from orchestration.core.ids import StepId, StepKind
from orchestration.core.principal import Principal
from orchestration.core.turn import OnBusy
from orchestration.testing.local import LocalTurnmill
from workers.sweeps.dead_processes import DeadProcesses
from workers.sweeps.due import handle_due

ran: list[tuple[str, float]] = []


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@tool("billing/refund", approval="moves real money")
def refund(order_id: str, amount: float) -> dict[str, Any]:
    """Refund an order."""
    ran.append((order_id, amount))
    return {"refunded": amount}


class Script:
    """A model that answers with one reply after the other and keeps what it was shown."""

    model = "script"

    def __init__(self, *replies: ModelReply | Callable[[Sequence[dict[str, Any]]], ModelReply]) -> None:
        self.replies = list(replies)
        self.shown: list[list[dict[str, Any]]] = []

    def complete(self, messages: Sequence[dict[str, Any]], *, tools: Any = None) -> ModelReply:
        self.shown.append(json.loads(json.dumps(messages)))
        reply = self.replies.pop(0)
        return reply if isinstance(reply, ModelReply) else reply(messages)


def calls(*asked: tuple[str, dict[str, Any] | str], text: str = "") -> ModelReply:
    made = tuple(
        RequestedCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments), f"call_{i}")
        for i, (name, arguments) in enumerate(asked)
    )
    return ModelReply(text, made, usage=Usage(10, 5))


def says(text: str) -> ModelReply:
    return ModelReply(text, usage=Usage(7, 3))


def local(model: Script, *tools: Any, **more: Any) -> LocalTurnmill:
    settings = more.pop("settings", {})
    return LocalTurnmill(Agent("support", model, tools=tools, **more), **settings)


REFUND = ("billing-refund", {"order_id": "o-42", "amount": 40})


def test_a_message_becomes_an_answer() -> None:
    turn = local(Script(says("hello"))).ask("support", "hi")
    assert (turn["state"], turn["stop_reason"], turn["answer"]) == ("completed", "answer", "hello")
    assert turn["usage"] == {"input_tokens": 7, "output_tokens": 3}
    assert turn["rounds"] == 1


def test_results_reach_the_model_in_the_order_of_the_calls() -> None:
    model = Script(calls(("math-add", {"a": 1, "b": 2}), ("math-add", {"a": 3, "b": 4})), says("done"))
    here = local(model, add)
    here.submit("support", "sums")
    here.run_one(here.queue.waiting.popleft())
    here.queue.waiting.reverse()
    here.run()
    assert [message["content"] for message in model.shown[1][-2:]] == ["3", "7"]
    assert [message["role"] for message in model.shown[1]] == ["user", "assistant", "tool", "tool"]


def test_a_gated_call_waits_and_runs_with_what_was_approved() -> None:
    model = Script(calls(REFUND, ("math-add", {"a": 1, "b": 1})), says("refunded"))
    here = local(model, refund, add)
    turn = here.ask("support", "refund o-42")
    assert turn["state"] == "waiting"
    assert [call["state"] for call in turn["calls"]] == ["waiting", "completed"]
    assert ran == [] and len(model.shown) == 1
    [approval] = here.approvals()
    settled = here.decide(approval["approval_id"], True, arguments={"order_id": "o-42", "amount": 12.5})
    assert settled["state"] == "approved" and settled["arguments"]["amount"] == 12.5
    here.run()
    assert ran == [("o-42", 12.5)]
    assert here.turn(turn["turn_id"])["state"] == "completed"
    assert len(model.shown) == 2, "resuming asks no model"


def test_a_decision_before_the_header_ever_ran_is_carried_out() -> None:
    here = local(Script(calls(REFUND), says("ok")), refund)
    turn = here.submit("support", "refund")
    here.run_one(here.queue.waiting.popleft())
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert ran == [("o-42", 40.0)]
    assert here.turn(turn.turn_id)["state"] == "completed"


def test_a_denied_call_never_runs_and_the_model_reads_why() -> None:
    model = Script(calls(REFUND), says("sorry"))
    here = local(model, refund)
    turn = here.ask("support", "refund")
    here.decide(here.approvals()[0]["approval_id"], False, note="wrong order")
    here.run()
    assert ran == []
    assert "denied" in model.shown[1][-1]["content"] and "wrong order" in model.shown[1][-1]["content"]
    ended = here.turn(turn["turn_id"])
    assert ended["state"] == "completed" and ended["calls"][0]["state"] == "denied"


def test_the_first_decision_wins() -> None:
    here = local(Script(calls(REFUND), says("ok")), refund)
    here.ask("support", "refund")
    id_ = here.approvals()[0]["approval_id"]
    first = here.decide(id_, True)
    assert here.decide(id_, True) == first, "the same decision again changes nothing"
    other = Principal("eve", "dev", ("*",), ("approvals:decide",))
    with pytest.raises(AlreadyDecided) as refused:
        here.decide(id_, False, by=other)
    assert refused.value.approval["decided_by"] == "dev"
    here.run()
    assert ran == [("o-42", 40.0)]


def test_edited_arguments_that_break_the_schema_decide_nothing() -> None:
    here = local(Script(calls(REFUND), says("ok")), refund)
    here.ask("support", "refund")
    id_ = here.approvals()[0]["approval_id"]
    with pytest.raises(ArgumentsInvalid) as refused:
        here.decide(id_, True, arguments={"order_id": "o-42", "amount": "a lot"})
    assert refused.value.errors[0]["loc"] == ["amount"]
    assert here.approvals()[0]["state"] == "pending"
    here.decide(id_, True, arguments={"order_id": "o-42", "amount": 5})
    here.run()
    assert ran == [("o-42", 5.0)]


def test_who_lacks_the_gates_role_decides_nothing() -> None:
    here = local(Script(calls(REFUND), says("ok")), refund, approvals={"billing/*": Gate(roles=["ops"])})
    here.ask("support", "refund")
    approval = here.approvals()[0]
    assert approval["roles"] == ["ops"] and approval["reason"] == "moves real money"
    with pytest.raises(Forbidden):
        here.decide(approval["approval_id"], True, by=Principal("bob", "dev", ("sales",), ("approvals:decide",)))
    with pytest.raises(NotFound):
        here.decide(approval["approval_id"], True, by=Principal("bob", "other", ("ops",), ("approvals:decide",)))


def test_an_approval_that_nobody_decides_expires() -> None:
    model = Script(calls(REFUND), says("no one was there"))
    here = local(model, refund, approvals={"billing/refund": Gate(timeout_s=0.001)})
    turn = here.ask("support", "refund")
    id_ = here.approvals()[0]["approval_id"]
    handle_due(here.ports, here.ports.outbox.sweep().due)
    with pytest.raises(ApprovalExpired):
        here.decide(id_, True)
    here.run()
    assert ran == [] and "approval_expired" in model.shown[1][-1]["content"]
    assert here.turn(turn["turn_id"])["calls"][0]["state"] == "expired"


def test_cancel_ends_a_waiting_turn_and_its_approvals() -> None:
    here = local(Script(calls(REFUND)), refund)
    turn = here.ask("support", "refund", conversation_id="c")
    id_ = here.approvals()[0]["approval_id"]
    ended = here.cancel(turn["turn_id"])
    assert (ended["state"], ended["stop_reason"]) == ("cancelled", "cancelled")
    assert here.frames("c")[-1]["kind"] == "done"
    with pytest.raises(ApprovalCancelled):
        here.decide(id_, True)
    with pytest.raises(TurnEnded):
        here.cancel(turn["turn_id"])
    here.run()
    assert ran == [] and here.approvals() == []


def test_the_conversation_goes_on_after_a_cancel_in_mid_call() -> None:
    model = Script(calls(REFUND), says("hello again"))
    here = local(model, refund)
    turn = here.ask("support", "refund", conversation_id="c")
    here.cancel(turn["turn_id"])
    here.ask("support", "hi", conversation_id="c")
    roles = [message["role"] for message in model.shown[1]]
    assert roles == ["user", "assistant", "tool", "user"]
    assert model.shown[1][2]["tool_call_id"] == model.shown[1][1]["tool_calls"][0]["id"]


def test_one_call_can_be_cancelled_and_the_turn_goes_on() -> None:
    model = Script(calls(("math-add", {"a": 1, "b": 2}), ("math-add", {"a": 3, "b": 4})), says("ok"))
    here = local(model, add)
    turn = here.submit("support", "sums")
    here.run_one(here.queue.waiting.popleft())
    first = here.turn(turn.turn_id)["calls"][0]["call_id"]
    cancel_call(here.ports, here.principal, turn.turn_id, first)
    here.run()
    ended = here.turn(turn.turn_id)
    assert [call["state"] for call in ended["calls"]] == ["cancelled", "completed"]
    assert "cancelled" in model.shown[1][-2]["content"] and model.shown[1][-1]["content"] == "7"
    assert len(here.mesh.asked) == 1


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (("weather", {}), "unknown_tool"),
        (("math-add", "{'a': 1}"), "invalid_arguments"),
        (("math-add", "[1, 2]"), "invalid_arguments"),
        (("math-add", '"s"'), "invalid_arguments"),
        (("math-add", "null"), "invalid_arguments"),
        (("math-add", {"a": 1}), "invalid_arguments"),
        (("billing-refund", "[1]"), "invalid_arguments"),
        (("billing-refund", {"order_id": "x", "amount": "much"}), "invalid_arguments"),
    ],
)
def test_a_call_that_cannot_run_is_told_to_the_model_and_asks_no_gate(asked: tuple[str, Any], code: str) -> None:
    model = Script(calls(asked), says("I see"))
    here = local(model, add, refund)
    turn = here.ask("support", "go")
    assert turn["state"] == "completed" and here.approvals() == [] and here.mesh.asked == []
    assert turn["calls"][0]["state"] == "failed" and turn["calls"][0]["error"]["code"] == code
    told = json.loads(model.shown[1][-1]["content"])
    assert told["error"] == code
    sent_back = model.shown[1][-2]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(sent_back), dict)


def test_no_arguments_at_all_are_an_empty_object() -> None:
    @tool("ping")
    def ping() -> str:
        """Ping."""
        return "pong"

    model = Script(calls(("ping", "")), says("ok"))
    assert local(model, ping).ask("support", "ping")["calls"][0]["state"] == "completed"


def test_the_round_limit_runs_no_calls_that_nobody_will_read() -> None:
    model = Script(calls(("math-add", {"a": 1, "b": 1})), calls(("math-add", {"a": 2, "b": 2}), text="still"))
    here = local(model, add, limits=Limits(max_rounds=2))
    turn = here.ask("support", "go", conversation_id="c")
    assert (turn["state"], turn["stop_reason"], turn["rounds"]) == ("completed", "round_limit", 2)
    assert "reached tool call limit of 2 rounds" in turn["answer"]
    assert len(here.mesh.asked) == 1
    assert "limit" in read.history(here.ports, "dev", "c")[-1]["data"]["content"], "the limit leaves its trace"


def test_an_empty_answer_says_so() -> None:
    turn = local(Script(says(""))).ask("support", "hi")
    assert (turn["state"], turn["stop_reason"], turn["answer"]) == ("completed", "empty", "(no response)")


def test_every_message_delivered_again_changes_nothing() -> None:
    model = Script(calls(REFUND, ("math-add", {"a": 1, "b": 1})), says("done"))
    here = local(model, refund, add)
    turn = here.ask("support", "go", conversation_id="c")
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    frames, ended = here.frames("c"), here.turn(turn["turn_id"])
    for step in [*here.queue.sent, StepId("dev", turn["turn_id"], 1, StepKind.OBSERVE), StepId("dev", turn["turn_id"], 2, StepKind.PLAN)]:
        here.run_one(step)
    here.run()
    assert here.frames("c") == frames and here.turn(turn["turn_id"]) == ended
    assert ran == [("o-42", 40.0)] and len(model.shown) == 2


def test_messages_delivered_twice_at_once_open_one_round() -> None:
    model = Script(calls(("math-add", {"a": 1, "b": 1})), says("done"))
    here = local(model, add)
    turn = here.submit("support", "go")
    while here.queue.waiting:
        step = here.queue.waiting.popleft()
        here.run_one(step)
        here.run_one(step)
    assert here.turn(turn.turn_id)["state"] == "completed"
    assert len(model.shown) == 2 and len(here.mesh.asked) == 1


def test_turns_of_one_conversation_run_in_order_of_arrival() -> None:
    model = Script(*(says(f"answer {i}") for i in range(3)))
    here = local(model)
    turns = [here.submit("support", f"message {i}", conversation_id="c") for i in range(3)]
    assert [(turn.state, turn.position) for turn in turns] == [("running", 0), ("queued", 1), ("queued", 2)]
    here.run()
    assert [here.turn(turn.turn_id)["answer"] for turn in turns] == ["answer 0", "answer 1", "answer 2"]
    assert [message["content"] for message in model.shown[2]] == ["message 0", "answer 0", "message 1", "answer 1", "message 2"]


def test_a_busy_conversation_can_reject_a_submission() -> None:
    here = local(Script(says("a")))
    here.submit("support", "one", conversation_id="c")
    with pytest.raises(ConversationBusy):
        here.submit("support", "two", conversation_id="c", on_busy=OnBusy.REJECT)
    here.run()
    assert len(read.history(here.ports, "dev", "c")) == 2


def test_an_interrupt_ends_the_turn_under_way_and_starts() -> None:
    model = Script(calls(REFUND), says("second"))
    here = local(model, refund)
    first = here.ask("support", "one", conversation_id="c")
    second = here.submit("support", "two", conversation_id="c", on_busy=OnBusy.INTERRUPT)
    assert here.turn(first["turn_id"])["state"] == "cancelled"
    here.run()
    assert here.turn(second.turn_id)["answer"] == "second"
    assert ran == []


def test_a_steered_message_is_seen_by_the_next_plan() -> None:
    model = Script(calls(("math-add", {"a": 1, "b": 1})), says("done"))
    here = local(model, add)
    first = here.submit("support", "one", conversation_id="c")
    here.run_one(here.queue.waiting.popleft())
    steered = here.submit("support", "and hurry", conversation_id="c", on_busy=OnBusy.STEER)
    assert steered.turn_id == first.turn_id
    here.run()
    assert [message["role"] for message in model.shown[1]] == ["user", "assistant", "tool", "user"]
    assert model.shown[1][-1]["content"] == "and hurry"


def test_a_message_that_joins_during_the_last_answer_is_answered_too() -> None:
    here: LocalTurnmill

    def while_asked(messages: Sequence[dict[str, Any]]) -> ModelReply:
        here.submit("support", "one more thing", conversation_id="c", on_busy=OnBusy.STEER)
        return says("first answer")

    model = Script(while_asked, says("second answer"))
    here = local(model)
    turn = here.ask("support", "hi", conversation_id="c")
    assert turn["answer"] == "second answer" and turn["rounds"] == 2
    assert [message["content"] for message in model.shown[1]] == ["hi", "first answer", "one more thing"]


def test_the_same_idempotency_key_is_the_same_turn() -> None:
    here = local(Script(says("once")))
    first = here.submit("support", "pay", conversation_id="c", idempotency_key="k")
    here.run()
    again = here.submit("support", "pay", conversation_id="c", idempotency_key="k")
    assert again == first and not here.queue.waiting
    with pytest.raises(IdempotencyMismatch):
        here.submit("support", "pay twice", conversation_id="c", idempotency_key="k")
    elsewhere = here.submit("support", "pay", idempotency_key="k", principal=Principal("x", "other"))
    assert elsewhere.turn_id != first.turn_id, "keys are each tenant's own"


def test_a_full_mailbox_takes_no_more() -> None:
    here = local(Script(says("a"), says("b")), settings={"max_waiting_turns": 1})
    here.submit("support", "1", conversation_id="c")
    here.submit("support", "2", conversation_id="c")
    with pytest.raises(MailboxFull):
        here.submit("support", "3", conversation_id="c")


def test_frame_numbers_only_grow_and_every_turn_ends_with_done() -> None:
    here = local(Script(says("a"), says("b")))
    here.ask("support", "1", conversation_id="c")
    here.ask("support", "2", conversation_id="c")
    numbers = [frame["seq"] for frame in here.frames("c")]
    assert numbers == sorted(set(numbers))
    assert [frame["kind"] for frame in here.frames("c")].count("done") == 2


def test_another_tenant_sees_nothing() -> None:
    here = local(Script(says("secret")))
    turn = here.ask("support", "hi", conversation_id="c")
    for look in (
        lambda: read.turn(here.ports, "other", turn["turn_id"]),
        lambda: read.conversation(here.ports, "other", "c"),
        lambda: read.history(here.ports, "other", "c"),
        lambda: read.turn_place(here.ports, "other", turn["turn_id"]),
    ):
        with pytest.raises(NotFound):
            look()


def test_a_step_of_a_dead_process_runs_again() -> None:
    model = Script(says("lost"), says("kept"))
    here = local(model)
    turn = here.submit("support", "hi")
    step = here.queue.waiting.popleft()
    here.ports.journal.claim(step)
    dead = here.ports.lease.process
    here.ports.lease.register(instead_of=dead)
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    [again] = here.ports.leases.reclaim(step, dead, result=None)
    assert again == step
    here.run_one(step)
    assert here.turn(turn.turn_id)["state"] == "completed"


def test_a_deposed_process_commits_nothing() -> None:
    model = Script(says("from the zombie"), says("from the living"))
    here = local(model)
    turn = here.submit("support", "hi")
    step = here.queue.waiting.popleft()
    zombie = here.ports.journal.claim(step)
    assert isinstance(zombie, tuple)
    dead = here.ports.lease.process
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    refused = here.ports.journal.commit("dev", turn.turn_id, {"frames": [], "fin": {"state": "completed", "stop": "answer"}}, zombie[0])
    assert refused.why == "fenced"
    assert not here.ports.journal.emit(zombie[0], 1, ['{"kind":"token"}'])
    assert here.turn(turn.turn_id)["state"] == "running"


def test_a_claim_or_commit_whose_answer_got_lost_can_be_asked_again() -> None:
    here = local(Script(calls(("math-add", {"a": 1, "b": 1})), says("ok")), add)
    turn = here.submit("support", "hi")
    run, doubled = here.ports.store.run, []

    def twice(script: str, *args: str | int) -> Any:
        first = run(script, *args)
        if script in ("claim", "commit", "emit"):
            doubled.append(script)
            return run(script, *args)
        return first

    here.ports.store.run = twice  # type: ignore[method-assign]
    while here.turn(turn.turn_id)["state"] == "running":
        here.run()
        unsent = here.ports.outbox.sweep(unsent_after_ms=-1000).unsent
        here.queue.waiting.extend(unsent)
    assert here.turn(turn.turn_id)["answer"] == "ok" and len(here.mesh.asked) == 1
    assert {"claim", "commit"} <= set(doubled)


def test_what_a_deposed_process_still_commits_hides_no_step_from_whoever_passes_it_on() -> None:
    here = local(Script(says("kept")))
    turn = here.submit("support", "hi")
    step = here.queue.waiting.popleft()
    claimed = here.ports.journal.claim(step)
    assert isinstance(claimed, tuple)
    dead = here.ports.lease.process
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    assert here.ports.journal.commit("dev", turn.turn_id, {"retry_in_ms": 0, "frames": []}, claimed[0]).why == "fenced"
    assert here.ports.leases.steps_of(dead) == [step]
    here.ports.lease.register(instead_of=dead)
    DeadProcesses(here.ports).pass_on_steps(dead)
    here.run()
    assert here.turn(turn.turn_id)["answer"] == "kept"
