"""A message for a conversation whose turn waits for a human: the turn is busy, unless its agent says otherwise of that time."""

from __future__ import annotations

from typing import Any

import pytest

from orchestration.actions import read
from orchestration.core.errors import ApprovalCancelled, ConversationBusy
from orchestration.core.turn import OnBusy
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import REFUND, Script, calls, local, ran, refund, says


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


def waiting(*replies: Any, **agent: Any) -> tuple[LocalTurnmill, Script, str, str]:
    """A turn that waits for one approval: Turnmill, the model, the turn's id, the approval's."""
    model = Script(calls(REFUND), *replies)
    here = local(model, refund, **agent)
    turn = here.ask("support", "refund", conversation_id="c")
    return here, model, turn["turn_id"], here.approvals()[0]["approval_id"]


def test_it_waits_its_turn_by_default() -> None:
    here, model, first, id_ = waiting(says("done"), says("hello"))
    second = here.submit("support", "hi", conversation_id="c")
    assert (second.state, second.position) == ("queued", 1)
    here.run()
    assert len(model.shown) == 1, "nothing of it begins while a human is asked"
    here.decide(id_, True)
    here.run()
    assert here.turn(first)["answer"] == "done" and here.turn(second.turn_id)["answer"] == "hello"


def test_it_can_be_refused() -> None:
    here, _, first, _ = waiting()
    with pytest.raises(ConversationBusy):
        here.submit("support", "hi", conversation_id="c", on_busy=OnBusy.REJECT)
    assert here.turn(first)["state"] == "waiting"


def test_an_interrupt_cancels_what_waits() -> None:
    here, _, first, id_ = waiting(says("hello"))
    second = here.submit("support", "never mind", conversation_id="c", on_busy=OnBusy.INTERRUPT)
    here.run()
    assert here.turn(first)["state"] == "cancelled" and here.turn(second.turn_id)["answer"] == "hello"
    assert read.approval(here.ports, "dev", id_)["state"] == "cancelled"
    with pytest.raises(ApprovalCancelled):
        here.decide(id_, True)
    assert ran == []


@pytest.mark.parametrize("approved", [True, False])
def test_a_steering_message_is_kept_and_read_after_the_decision(approved: bool) -> None:
    here, model, first, id_ = waiting(says("done"))
    joined = here.submit("support", "and be quick", conversation_id="c", on_busy=OnBusy.STEER)
    assert (joined.turn_id, joined.state) == (first, "waiting")
    told = [frame for frame in here.frames("c") if frame["kind"] == "turn"][-1]
    assert told["state"] == "waiting" and told["steered"], "watchers hear of it at once"
    here.run()
    assert len(model.shown) == 1
    here.decide(id_, approved)
    here.run()
    assert [message["role"] for message in model.shown[1]] == ["user", "assistant", "tool", "user"]
    assert model.shown[1][-1]["content"] == "and be quick" and here.turn(first)["answer"] == "done"
    assert ran == ([("o-42", 40)] if approved else [])


def test_an_agent_may_choose_otherwise_for_that_time() -> None:
    here, _, first, id_ = waiting(says("done"), says("hello"), on_busy_waiting="queue")
    second = here.submit("support", "never mind", conversation_id="c", on_busy=OnBusy.INTERRUPT)
    assert second.state == "queued" and here.turn(first)["state"] == "waiting"
    here.decide(id_, True)
    here.run()
    assert ran == [("o-42", 40)] and here.turn(second.turn_id)["answer"] == "hello"
