"""`on_round`: an agent's module is told of each round that has ended, with the conversation as plain data."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestration import Agent, AgentTool, Checkpoint, Limits, ModelReply, RequestedCall, tool
from orchestration.core.errors import Misconfigured, ModelBusy
from orchestration.core.ids import StepId, StepKind
from orchestration.core.model import ModelFault, Usage
from orchestration.models import ScriptedModel, Step
from orchestration.testing.frames import assert_paired
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


ADD = ("math-add", {"a": 1, "b": 2})


class Kept:
    """A hook that keeps what it is given; `also` is done with it."""

    def __init__(self, also: Callable[[Checkpoint], None] = lambda _: None) -> None:
        self.all: list[Checkpoint] = []
        self.also = also

    def __call__(self, checkpoint: Checkpoint) -> None:
        self.all.append(checkpoint)
        self.also(checkpoint)


def agent(kept: Any, *steps: Any, **more: Any) -> Agent:
    return Agent("adder", ScriptedModel(steps), tools=[add], system="Add.", on_round=kept, **more)


def test_each_round_is_told_of_and_then_the_end(turnmill: Turnmill) -> None:
    kept = Kept()
    here = turnmill(agent(kept, Step("hm", tool_calls=[ADD], usage=Usage(10, 2)), Step("3", usage=Usage(20, 1))))
    turn = here.ask("adder", "1+2", conversation_id="c", brief="Be short.")
    first, last = kept.all
    assert json.loads(json.dumps(first)) == first
    assert (first["version"], first["conversation_id"], first["turn_id"], first["agent"]) == (1, "c", turn["turn_id"], "adder")
    assert (first["round"], first["stop_reason"], last["round"], last["stop_reason"]) == (1, None, 2, "answer")
    assert first["system"] == "Add.\n\nBe short." and first["messages"][0] == {"role": "system", "content": first["system"]}
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "tool"]
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["total_usage"] == {"input": 10, "output": 2, "total": 12} and last["total_usage"]["total"] == 33
    assert first["compacted"] is last["compacted"] is None


def test_the_model_is_asked_after_the_hook_has_returned(turnmill: Turnmill) -> None:
    model = ScriptedModel([[ADD], [ADD], "3"])
    asked_then: list[int] = []

    async def on_round(checkpoint: Checkpoint) -> None:
        asked_then.append(model.asked)

    turnmill(Agent("adder", model, tools=[add], on_round=on_round)).ask("adder", "1+2")
    assert asked_then == [1, 2, 3]


def test_results_are_whole_and_what_is_sent_instead_stands_beside_them(turnmill: Turnmill) -> None:
    @tool("log/read")
    def read() -> str:
        """Read."""
        return "x" * 5_000

    kept = Kept()
    look = Step(tool_calls=[("log-read", {})], usage=Usage(500, 1))
    model = ScriptedModel([look, look, look, "done"])
    here = turnmill(Agent("ops", model, tools=[read], compact_after=100, limits=Limits(max_tool_result_chars=1_000), on_round=kept))
    here.ask("ops", "read")
    last = kept.all[-1]
    assert_paired(last["messages"])
    assert [len(message["content"]) for message in last["messages"] if message["role"] == "tool"] == [5_000] * 3
    assert last["compacted"] is not None and "[elided: " in last["compacted"][-1]["content"]


@pytest.mark.parametrize("wrong", ["raises", "exits"])
def test_a_hook_that_fails_costs_no_turn(turnmill: Turnmill, wrong: str) -> None:
    def fail(_: Checkpoint) -> None:
        raise SystemExit(1) if wrong == "exits" else RuntimeError("the disk is full")

    kept = Kept(fail)
    turn = turnmill(agent(kept, [ADD], "3")).ask("adder", "1+2")
    assert turn["answer"] == "3" and len(kept.all) == 2


def test_a_step_that_is_tried_again_tells_of_its_round_again(turnmill: Turnmill) -> None:
    kept = Kept()
    here = turnmill(agent(kept, [ADD], Step(error="unavailable"), "3"))
    assert here.ask("adder", "1+2")["answer"] == "3"
    assert [one["round"] for one in kept.all] == [1, 1, 2], "nobody knows whether the first one was heard to its end"


def test_a_step_that_waited_for_its_model_does_not(turnmill: Turnmill) -> None:
    kept = Kept()

    class Busy:
        model = "busy"

        def __init__(self) -> None:
            self.answers: list[Any] = [[ADD], None, None, "3"]

        def complete(self, messages: Any, *, tools: Any = None) -> Any:
            answer = self.answers.pop(0)
            if answer is None:
                raise ModelBusy(ModelFault.RATE_LIMITED, "busy", retryable=True, retry_after_s=0.01)
            calls = tuple(RequestedCall(name, json.dumps(arguments)) for name, arguments in answer) if isinstance(answer, list) else ()
            return ModelReply("" if calls else answer, calls)

    here = turnmill(Agent("adder", Busy(), tools=[add], on_round=kept))
    assert here.ask("adder", "1+2")["answer"] == "3"
    assert [one["round"] for one in kept.all] == [1, 2]


def test_messages_delivered_twice_tell_once(turnmill: Turnmill) -> None:
    kept = Kept()
    here = turnmill(agent(kept, [ADD], "3"))
    turn = here.submit("adder", "1+2")
    here.run()
    for step in list(here.queue.sent):
        here.run_one(step)
    here.run_one(StepId("dev", turn.turn_id, 2, StepKind.PLAN))
    here.run()
    assert [one["round"] for one in kept.all] == [1, 2]


def test_a_turn_that_ends_at_a_bound_is_told_of_too(turnmill: Turnmill) -> None:
    kept = Kept()
    turnmill(agent(kept, [ADD], [ADD], limits=Limits(max_rounds=2))).ask("adder", "1+2")
    last = kept.all[-1]
    assert last["stop_reason"] == "round_limit" and "tool call limit of 2 rounds" in last["messages"][-1]["content"]
    assert_paired(last["messages"])


def test_the_agent_that_goes_on_is_the_one_that_is_told(turnmill: Turnmill) -> None:
    first, second, third = Kept(), Kept(), Kept()
    router = Agent("router", ScriptedModel([[("transfer_to_billing", {})]]), handoffs=["billing"], on_round=first)
    billing = Agent(
        "billing", ScriptedModel([[("agent-clerk", {"input": "x"})], "done", "again"]), tools=[AgentTool("clerk")], on_round=second
    )
    here = turnmill(router, billing, Agent("clerk", ScriptedModel(["y"]), on_round=third))
    here.ask("router", "refund", conversation_id="c")
    assert first.all == [] and [one["round"] for one in second.all] == [1, 2, 3]
    assert [(one["agent"], one["round"], one["stop_reason"]) for one in third.all] == [("clerk", 1, "answer")]
    here.ask("router", "more", conversation_id="c")
    assert (second.all[-1]["agent"], second.all[-1]["round"]) == ("billing", 1), "the one that keeps the conversation"


def test_many_rounds_at_once_are_all_told_of(turnmill: Turnmill) -> None:
    together = threading.Barrier(20)

    def meet(checkpoint: Checkpoint) -> None:
        if checkpoint["stop_reason"] is None:
            together.wait(30)

    kept = Kept(meet)
    here = turnmill(Agent("adder", ScriptedModel([[ADD]] * 20 + ["3"] * 20), tools=[add], on_round=kept))
    for _ in range(20):
        here.submit("adder", "1+2")
    while any(step.kind is not StepKind.OBSERVE for step in here.queue.waiting):
        step = here.queue.waiting.popleft()
        if step.kind is StepKind.OBSERVE:
            here.queue.waiting.append(step)
        else:
            here.run_one(step)
    observes = list(here.queue.waiting)
    here.queue.waiting.clear()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(here.run_one, observes))
    here.run()
    assert [one["round"] for one in kept.all].count(1) == 20 and not together.broken


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(Misconfigured, match="on_round"):
        agent("checkpoint")
