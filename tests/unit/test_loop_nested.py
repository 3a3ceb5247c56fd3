"""An agent as a tool of another: a turn of its own, waited for by nobody, whose end is the call's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from orchestration import Agent, AgentTool, Budget, Gate, Limits, tool
from orchestration.actions import read
from orchestration.actions.cancel import cancel_call
from orchestration.core.agent_tool import MAX_DEPTH
from orchestration.core.errors import ApprovalCancelled, Misconfigured, NotFound
from orchestration.core.ids import StepId, StepKind
from orchestration.core.model import Usage
from orchestration.models import FunctionModel, ScriptedModel, Step
from orchestration.testing.frames import assert_kinds, assert_paired, assert_whole, only
from orchestration.testing.local import LocalTurnmill
from tests.fixtures.approvals import due_entries, make_due, sweep

Turnmill = Callable[..., LocalTurnmill]

ran: list[str] = []


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


@tool("web/search")
def search(q: str) -> str:
    """Search the web."""
    ran.append(q)
    return f"found {q}"


@tool("web/buy", approval="costs money")
def buy(what: str) -> str:
    """Buy something."""
    ran.append(what)
    return f"bought {what}"


ASK = ("agent-research", {"input": "find x"})


def pair(boss: list[Any], research: list[Any], **more: Any) -> tuple[Agent, Agent, ScriptedModel, ScriptedModel]:
    first, second = ScriptedModel(boss), ScriptedModel(research)
    declared = Agent("boss", first, tools=[AgentTool("research"), search], **more)
    return declared, Agent("research", second, system="Dig.", description="looks things up", tools=[search, buy]), first, second


def child_of(here: LocalTurnmill, conversation_id: str = "c") -> str:
    return str(next(frame["frame"]["turn_id"] for frame in here.frames(conversation_id) if frame["kind"] == "child"))


def test_the_answer_of_the_other_agent_is_the_calls_result(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK], "So it is x."], [[("web-search", {"q": "x"})], "x was found"])
    here = turnmill(boss, research)
    turn = here.ask("boss", "what is x?", conversation_id="c")
    assert turn["answer"] == "So it is x." and turn["calls"][0]["state"] == "completed"
    assert first.requests[1].messages[-1]["content"] == "x was found"
    assert [message["role"] for message in second.requests[0].messages] == ["system", "user"], "a conversation of its own"
    assert second.requests[0].messages[1]["content"] == "find x"
    assert first.requests[0].tool_names == ["agent-research", "web-search"]
    assert first.requests[0].tools[0]["function"]["description"] == "looks things up"
    child = here.turn(child_of(here))
    assert turn["calls"][0]["child_turn_id"] == child["turn_id"]
    assert (child["agent"], child["state"], child["answer"]) == ("research", "completed", "x was found")
    assert child["conversation_id"] != "c"


def test_its_frames_are_seen_inside_those_of_the_caller(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK], "done"], [[("web-search", {"q": "x"})], Step("x was found", chunks=2)])
    here = turnmill(boss, research)
    turn = here.ask("boss", "what is x?", conversation_id="c")
    frames = here.frames("c", turn["turn_id"])
    assert_whole(frames)
    inner = [frame["frame"] for frame in frames if frame["kind"] == "child"]
    assert_kinds(inner, "turn", "tool_call", "tool_result", "message", "done")
    call = only(frames, "tool_call")
    assert {frame["tool_call_id"] for frame in frames if frame["kind"] == "child"} == {call["tool_call_id"]}
    assert {frame["agent"] for frame in frames if frame["kind"] == "child"} == {"research"}
    assert only(frames, "message")["content"] == "done", "its message is not mistaken for the caller's"
    assert_whole(here.frames(here.turn(child_of(here))["conversation_id"]))


def test_no_step_runs_while_the_other_agent_works(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK], "done"], ["x"])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go")
    here.run_one(here.queue.waiting.popleft())
    assert here.run_one(here.queue.waiting.popleft()) == "started"
    assert [step.kind for step in here.queue.waiting] == [StepKind.PLAN] and here.queue.waiting[0].turn_id != turn.turn_id
    running = here.ports.store.client.smembers(f"tm:run:{here.ports.lease.process}")
    assert not running
    assert here.turn(turn.turn_id)["calls"][0]["state"] == "running"


def test_its_approvals_suspend_both(turnmill: Turnmill) -> None:
    boss, research, first, _ = pair([[ASK, ("web-search", {"q": "y"})], "done"], [[("web-buy", {"what": "x"})], "bought it"])
    here = turnmill(boss, research)
    turn = here.ask("boss", "buy x", conversation_id="c")
    child = child_of(here)
    assert turn["state"] == "waiting" and here.turn(child)["state"] == "waiting" and ran == ["y"]
    states = [frame["state"] for frame in here.frames("c", turn["turn_id"]) if frame["kind"] == "turn"]
    assert states == ["running", "waiting"]
    inner = [frame["frame"] for frame in here.frames("c") if frame["kind"] == "child"]
    assert only(inner, "approval_request")["approval_id"] == here.approvals()[0]["approval_id"]
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert ran == ["y", "x"] and here.turn(turn["turn_id"])["answer"] == "done"
    assert [message["content"] for message in first.requests[1].messages[-2:]] == ["bought it", "found y"]
    states = [frame["state"] for frame in here.frames("c", turn["turn_id"]) if frame["kind"] == "turn"]
    assert states == ["running", "waiting", "running"]


def test_asking_the_agent_may_itself_need_a_human(turnmill: Turnmill) -> None:
    boss, research, _, second = pair([[ASK, ("web-search", {"q": "y"})], "done"], ["x"], approvals={"agent/research": Gate(reason="slow")})
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    assert turn["state"] == "waiting" and second.asked == 0
    here.decide(here.approvals()[0]["approval_id"], True, arguments={"input": "find z"})
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "done" and second.requests[0].messages[1]["content"] == "find z"
    assert_whole(here.frames("c", turn["turn_id"]))


def test_a_denied_agent_is_never_asked(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK], "then not"], [], approvals={"agent/*": Gate()})
    here = turnmill(boss, research)
    turn = here.ask("boss", "go")
    here.decide(here.approvals()[0]["approval_id"], False, note="too dear")
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "then not" and second.asked == 0
    assert "too dear" in first.requests[1].messages[-1]["content"]


def test_several_agents_at_once_and_results_in_the_order_of_the_calls(turnmill: Turnmill) -> None:
    first = ScriptedModel([[("agent-a", {"input": "1"}), ("agent-b", {"input": "2"}), ("agent-a", {"input": "3"})], "done"])
    a = ScriptedModel([f"a{number}" for number in range(2)])
    here = turnmill(Agent("boss", first, tools=[AgentTool("a"), AgentTool("b")]), Agent("a", a), Agent("b", ScriptedModel(["b"])))
    here.ask("boss", "go")
    assert [message["content"] for message in first.requests[1].messages[-3:]] == ["a0", "b", "a1"]
    assert [request.messages[0]["content"] for request in a.requests] == ["1", "3"], "each call is a conversation of its own"


def test_agents_asked_in_order_wait_for_one_another(turnmill: Turnmill) -> None:
    first = ScriptedModel([[("agent-a", {"input": "1"}), ("agent-b", {"input": "2"})], "done"])
    order: list[str] = []

    class Noting:
        model = "noting"

        def __init__(self, name: str) -> None:
            self.name = name

        def complete(self, messages: Any, *, tools: Any = None) -> str:
            order.append(self.name)
            return self.name

    here = turnmill(
        Agent("boss", first, tools=[AgentTool("a"), AgentTool("b")], execution="sequential"),
        Agent("a", Noting("a")),
        Agent("b", Noting("b")),
    )
    turn = here.submit("boss", "go")
    here.run_one(here.queue.waiting.popleft())
    here.queue.waiting.reverse()
    here.run()
    assert order == ["a", "b"] and here.turn(turn.turn_id)["answer"] == "done"


def test_a_typed_answer_is_handed_up_as_json(turnmill: Turnmill) -> None:
    class Found(BaseModel):
        where: str

    first, second = ScriptedModel([[ASK], "done"]), ScriptedModel([[("submit", {"where": "here"})]])
    here = turnmill(Agent("boss", first, tools=[AgentTool("research")]), Agent("research", second, output=Found))  # type: ignore[arg-type]
    here.ask("boss", "go")
    assert json.loads(first.requests[1].messages[-1]["content"]) == {"where": "here"}


def test_a_failing_agent_is_an_error_that_the_caller_reads(turnmill: Turnmill) -> None:
    boss, research, first, _ = pair([[ASK], "I see."], [Step(error="auth")])
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    assert turn["answer"] == "I see." and turn["calls"][0]["state"] == "failed"
    assert turn["calls"][0]["error"]["code"] == "agent_error"
    assert json.loads(first.requests[1].messages[-1]["content"])["code"] == "model_auth"
    assert_whole(here.frames("c", turn["turn_id"]))


def test_cancelling_the_caller_cancels_whom_it_asked(turnmill: Turnmill) -> None:
    boss, research, first, _ = pair([[ASK], "next"], [[("web-buy", {"what": "x"})]])
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    child = child_of(here)
    here.cancel(turn["turn_id"])
    here.run()
    assert here.turn(child)["state"] == "cancelled" and here.approvals() == [] and ran == []
    assert_whole(here.frames("c", turn["turn_id"]))
    here.ask("boss", "again", conversation_id="c")
    assert_paired(first.requests[1].messages)


def test_nothing_of_an_agent_begins_once_its_caller_has_ended(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK]], [[("web-search", {"q": "x"}), ("web-buy", {"what": "y"})]])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go", conversation_id="c")
    for _ in range(3):
        here.run_one(here.queue.waiting.popleft())
    [approval] = here.approvals()
    here.cancel(turn.turn_id)
    with pytest.raises(ApprovalCancelled):
        here.decide(approval["approval_id"], True)
    while here.queue.waiting:
        assert here.run_one(here.queue.waiting.popleft()) in ("ended", "parked")
    assert ran == []
    here.run()
    assert here.turn(child_of(here))["state"] == "cancelled"


def test_cancelling_one_call_cancels_its_agent_and_the_caller_goes_on(turnmill: Turnmill) -> None:
    boss, research, first, _ = pair([[ASK], "without it"], [[("web-buy", {"what": "x"})]])
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    child = child_of(here)
    cancel_call(here.ports, here.principal, turn["turn_id"], turn["calls"][0]["call_id"])
    here.run()
    assert here.turn(turn["turn_id"])["answer"] == "without it" and here.turn(child)["state"] == "cancelled"
    assert_whole(here.frames("c", turn["turn_id"]))
    assert len(first.requests) == 2


def test_what_a_cancelled_agent_used_counts_too(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK, ("web-buy", {"what": "y"})]], [Step(tool_calls=[("web-buy", {"what": "x"})], usage=Usage(50, 5))])
    boss = replace(boss, tools=[*boss.tools, buy])
    here = turnmill(boss, research)
    turn = here.ask("boss", "go")
    cancel_call(here.ports, here.principal, turn["turn_id"], turn["calls"][0]["call_id"])
    here.run()
    assert here.turn(turn["turn_id"])["usage"]["input_tokens"] == 57


def test_an_agent_that_is_cancelled_alone_is_an_error_for_its_caller(turnmill: Turnmill) -> None:
    boss, research, first, _ = pair([[ASK], "I see."], [[("web-buy", {"what": "x"})]])
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    here.cancel(child_of(here))
    here.run()
    ended = here.turn(turn["turn_id"])
    assert ended["answer"] == "I see." and ended["calls"][0]["error"]["code"] == "agent_cancelled"
    assert "agent_cancelled" in first.requests[1].messages[-1]["content"]


def test_the_callers_deadline_is_its_agents_too(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK]], [])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go", deadline_s=100, conversation_id="c")
    here.run_one(here.queue.waiting.popleft())
    here.run_one(here.queue.waiting.popleft())
    child = here.turn(turn.turn_id)["calls"][0]["child_turn_id"]
    assert set(due_entries(here, "deadline")) == {f"deadline:dev/{turn.turn_id}"}
    make_due(here, "deadline", turn.turn_id)
    sweep(here)
    assert here.turn(turn.turn_id)["stop_reason"] == "deadline"
    here.run()
    assert (here.turn(child)["state"], here.turn(child)["rounds"]) == ("cancelled", 0), "nothing of it begins any more"


def test_agents_may_ask_one_another_to_a_bounded_depth(turnmill: Turnmill) -> None:
    class Deeper:
        model = "deeper"
        asked = 0

        def complete(self, messages: Any, *, tools: Any = None) -> Any:
            Deeper.asked += 1
            if messages[-1]["role"] == "tool":
                return messages[-1]["content"]
            from orchestration import ModelReply, RequestedCall

            return ModelReply("", (RequestedCall("agent-self", '{"input": "deeper"}'),))

    here = turnmill(Agent("self", Deeper(), tools=[AgentTool("self")]))
    turn = here.ask("self", "go")
    assert json.loads(turn["answer"])["error"] == "too_deep"
    assert Deeper.asked == 2 * (MAX_DEPTH + 1)


def test_what_an_agent_uses_counts_for_its_caller(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair(
        [Step(tool_calls=[ASK], usage=Usage(10, 1)), Step("done", usage=Usage(10, 1))],
        [Step(tool_calls=[("web-search", {"q": "x"})], usage=Usage(100, 5)), Step("x", usage=Usage(100, 5))],
    )
    here = turnmill(boss, research)
    turn = here.ask("boss", "go")
    assert turn["usage"]["input_tokens"] == 220 and turn["usage"]["output_tokens"] == 12


def test_an_agent_works_within_what_is_left_to_its_caller(turnmill: Turnmill) -> None:
    boss, research, first, second = pair(
        [Step(tool_calls=[ASK], usage=Usage(60, 1)), "never"],
        [Step(tool_calls=[("web-search", {"q": "x"})], usage=Usage(50, 5)), "never"],
        limits=Limits(max_input_tokens=100),
    )
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    assert here.turn(child_of(here))["stop_reason"] == "budget" and ran == []
    assert turn["stop_reason"] == "budget" and first.asked == 1 and second.asked == 1


def three(tokens: int, *research: Any, **more: Any) -> tuple[Agent, Agent, ScriptedModel]:
    """An agent that asks three others at once; each of these plays `research`."""
    model = ScriptedModel(list(research) * 3)
    boss = ScriptedModel([Step(tool_calls=[ASK] * 3, usage=Usage(tokens, 1)), "done"])
    return Agent("boss", boss, tools=[AgentTool("research")], **more), Agent("research", model, tools=[search]), model


def test_agents_asked_at_once_share_what_is_left_to_their_caller(turnmill: Turnmill) -> None:
    look = Step(tool_calls=[("web-search", {"q": "x"})], usage=Usage(50, 1))
    boss, research, model = three(40, look, look, look, limits=Limits(max_input_tokens=200))
    here = turnmill(boss, research)
    turn = here.ask("boss", "go", conversation_id="c")
    assert turn["stop_reason"] == "budget" and "max_input_tokens=200" in turn["error"]["detail"]
    assert turn["usage"]["input_tokens"] == 40 + 50 * model.asked == 240, "the three together, not each of them"
    children = [here.turn(call["child_turn_id"]) for call in turn["calls"]]
    assert {child["stop_reason"] for child in children} == {"budget"}
    assert "the asking turn's budget" in children[0]["error"]["detail"]


def test_a_conversations_budget_is_shared_at_every_depth(turnmill: Turnmill) -> None:
    leaf = ScriptedModel([Step("x", usage=Usage(50, 1))] * 8)
    middle = ScriptedModel([Step(tool_calls=[("agent-leaf", {"input": "x"})] * 2, usage=Usage(10, 1))] * 2)
    boss = ScriptedModel([Step(tool_calls=[("agent-middle", {"input": "x"})] * 2, usage=Usage(10, 1))])
    here = turnmill(
        Agent("boss", boss, tools=[AgentTool("middle")], limits=Limits(conversation=Budget(max_input_tokens=100))),
        Agent("middle", middle, tools=[AgentTool("leaf")]),
        Agent("leaf", leaf),
    )
    turn = here.ask("boss", "go", conversation_id="c")
    assert turn["stop_reason"] == "budget" and leaf.asked == 2 and turn["usage"]["input_tokens"] == 10 + 2 * 10 + 2 * 50
    assert here.ports.conversations.conversation("dev", "c")["in"] == "130"


def test_no_tool_runs_beyond_a_shared_bound_however_the_agents_race(turnmill: Turnmill) -> None:
    steps: list[StepId] = []

    def reply(messages: Any, tools: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return "x"
        if steps:  # the other agent is faster: asked, answered and committed while this one's model still thinks
            here.run_one(steps.pop())
        return [("web-search", {"q": "x"})]

    boss = ScriptedModel([[ASK] * 2, "done"])
    here = turnmill(
        Agent("boss", boss, tools=[AgentTool("research")], limits=Limits(max_tool_calls=3)),
        Agent("research", FunctionModel(reply), tools=[search]),
    )
    turn = here.submit("boss", "go", conversation_id="c")
    for _ in range(3):
        here.run_one(here.queue.waiting.popleft())
    first, second = here.queue.waiting
    steps.append(second)
    here.queue.waiting.remove(second)
    here.run()
    ended = here.turn(turn.turn_id)
    assert ran == ["x"] and ended["answer"] == "done"
    assert sorted(here.turn(call["child_turn_id"])["stop_reason"] for call in ended["calls"]) == ["answer", "budget"]
    late = here.turn(first.turn_id)
    assert late["stop_reason"] == "budget" and "max_tool_calls=3" in late["error"]["detail"] and late["calls"] == []
    assert_whole(here.frames(late["conversation_id"]))


def test_a_cost_that_somebody_above_bounds_needs_a_price(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK], "I see."], ["never"], limits=Limits(max_cost=1.0))
    here = turnmill(boss, research, prices='{"other": {"input": 1, "output": 1}}')
    assert here.ask("boss", "go")["error"]["code"] == "misconfigured" and (first.asked, second.asked) == (0, 0)


def test_messages_delivered_twice_start_one_turn(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK], "done"], [[("web-search", {"q": "x"})], "x"])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go", conversation_id="c")
    while here.queue.waiting:
        step = here.queue.waiting.popleft()
        here.run_one(step)
        here.run_one(step)
    assert here.turn(turn.turn_id)["answer"] == "done" and ran == ["x"]
    assert (first.asked, second.asked) == (2, 2)
    frames = here.frames("c")
    for step in list(here.queue.sent):
        here.run_one(step)
    here.run()
    assert here.frames("c") == frames


def test_commits_whose_answers_got_lost_start_and_settle_once(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK, ("web-search", {"q": "y"})], "done"], [[("web-buy", {"what": "x"})], "x"])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go", conversation_id="c")
    run = here.ports.store.run

    def twice(script: str, *args: str | int) -> Any:
        first_answer = run(script, *args)
        return run(script, *args) if script in ("claim", "commit", "emit", "compact", "decide") else first_answer

    here.ports.store.run = twice  # type: ignore[method-assign]

    def settle(wanted: str) -> None:
        for _ in range(20):
            here.run()
            here.queue.waiting.extend(here.ports.outbox.sweep(unsent_after_ms=-1000).unsent)
            if here.turn(turn.turn_id)["state"] == wanted and not here.queue.waiting:
                return
        raise AssertionError(here.turn(turn.turn_id))

    settle("waiting")
    here.decide(here.approvals()[0]["approval_id"], True)
    settle("completed")
    assert ran == ["y", "x"] and (first.asked, second.asked) == (2, 2)
    assert_whole(here.frames("c", turn.turn_id))


def test_a_process_that_dies_after_starting_the_agent_starts_no_other(turnmill: Turnmill) -> None:
    boss, research, first, second = pair([[ASK], "done"], ["x"])
    here = turnmill(boss, research)
    turn = here.submit("boss", "go")
    here.run_one(here.queue.waiting.popleft())
    step = here.queue.waiting.popleft()
    here.ports.journal.claim(step)
    dead = here.ports.lease.process
    here.ports.lease.register(instead_of=dead)
    end = here.ports.leases.end_of(dead)
    assert end is not None and here.ports.leases.depose(dead, end)
    for again in here.ports.leases.reclaim(step, dead, result=None):
        here.run_one(again)
        here.run_one(again)
    here.run()
    assert here.turn(turn.turn_id)["answer"] == "done" and (first.asked, second.asked) == (2, 1)


def test_forgetting_a_conversation_forgets_what_its_agents_said(turnmill: Turnmill) -> None:
    boss, research, _, _ = pair([[ASK], "done"], ["x"])
    here = turnmill(boss, research)
    here.ask("boss", "go", conversation_id="c")
    child = here.turn(child_of(here))
    read.delete_conversation(here.ports, "dev", "c")
    for look in (lambda: read.conversation(here.ports, "dev", child["conversation_id"]), lambda: here.turn(child["turn_id"])):
        with pytest.raises(NotFound):
            look()


def test_an_agent_that_nobody_declared_is_refused_at_start(turnmill: Turnmill) -> None:
    with pytest.raises(Misconfigured, match="nobody"):
        turnmill(Agent("boss", ScriptedModel([]), tools=[AgentTool("nobody")]))
    for wrong in ({"agent": "no such name"}, {"agent": "a", "name": "no such name"}):
        with pytest.raises(Misconfigured):
            AgentTool(**wrong)
