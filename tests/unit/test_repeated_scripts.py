"""Every script runs twice, as when the first answer got lost on its way: what comes of a turn is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestration import Agent, AgentTool, Limits, Message, tool
from orchestration.actions import read
from orchestration.actions.cancel import cancel_call
from orchestration.core.turn import OnBusy
from orchestration.models import ScriptedModel, Step, call_model
from orchestration.testing.frames import assert_paired, assert_whole
from orchestration.testing.local import LocalTurnmill

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


def calls(*asked: tuple[str, dict[str, Any]]) -> Step:
    return Step(tool_calls=list(asked))


def doubled(*declared: Any) -> LocalTurnmill:
    """A Turnmill whose every script runs twice; the second answer is the one that arrives."""
    here = LocalTurnmill(*declared)
    run = here.ports.store.run

    def twice(script: str, *args: str | int) -> Any:
        run(script, *args)
        return run(script, *args)

    here.ports.store.run = twice  # type: ignore[method-assign]
    return here


def run(here: LocalTurnmill) -> None:
    """Run until nothing is left, with the sweep that sends what nobody has sent."""
    while True:
        here.run()
        unsent = here.ports.outbox.sweep(unsent_after_ms=-1).unsent
        if not unsent:
            return
        here.queue.send(unsent)
        here.ports.outbox.sent(unsent)
        here.ports.lease.renew()


def counts(here: LocalTurnmill) -> tuple[Any, ...]:
    client = here.ports.store.client
    return (client.get("tm:dev:waiting") or "0", client.zcard("tm:due"), client.keys("tm:run:*"))


def test_a_turn_with_tools_is_the_same() -> None:
    model = ScriptedModel([calls(("web-search", {"q": "a"}), ("web-search", {"q": "b"})), "done"])
    here = doubled(Agent("support", model, tools=[search]), search)
    turn = here.submit("support", "go", conversation_id="c", deadline_s=60)
    run(here)
    assert here.turn(turn.turn_id)["answer"] == "done" and sorted(ran) == ["a", "b"]
    history = read.history(here.ports, "dev", "c")
    assert [entry["dir"] for entry in history].count("in") == 1
    assert counts(here) == ("0", 0, [])
    assert_whole(here.frames("c", turn.turn_id))


def test_an_input_joins_a_turn_once() -> None:
    model = ScriptedModel([calls(("web-search", {"q": "a"})), "done"])
    here = doubled(Agent("support", model, tools=[search]), search)
    first = here.submit("support", "one", conversation_id="c")
    joined = here.submit("support", "and hurry", conversation_id="c", on_busy=OnBusy.STEER)
    assert joined.turn_id == first.turn_id
    assert here.ports.store.client.llen(f"tm:dev:turn:{first.turn_id}:steer") == 1
    run(here)
    said = [message["content"] for message in model.requests[-1].messages if message["role"] == "user"]
    assert said == ["one", "and hurry"]
    kept = [key for key in here.ports.store.client.keys("tm:dev:turn:*") if here.ports.store.client.ttl(key) < 0]
    assert kept == [], "what is remembered of the input that joined goes by itself"


def test_an_input_that_joined_a_turn_that_has_ended_since_starts_none() -> None:
    here = LocalTurnmill(Agent("support", ScriptedModel(["done", "again"])))
    run_once = here.ports.store.run
    sent: list[tuple[Any, ...]] = []
    here.ports.store.run = lambda *args: sent.append(args) or run_once(*args)  # type: ignore[method-assign, func-returns-value]
    first = here.submit("support", "one", conversation_id="c")
    here.submit("support", "and hurry", conversation_id="c", on_busy=OnBusy.STEER)
    joining = sent[-1]
    here.run()
    assert here.turn(first.turn_id)["state"] == "completed"
    length = here.ports.store.client.llen("tm:dev:conv:c:log")
    why, turn, state = run_once(*joining)
    assert (why, turn, state) == ("steered", first.turn_id, "completed")
    assert here.ports.store.client.llen("tm:dev:conv:c:log") == length and not here.queue.waiting


def test_mailbox_and_its_bounds_count_each_turn_once() -> None:
    here = doubled(Agent("support", ScriptedModel(["a", "b", "c"])))
    turns = [here.submit("support", f"message {i}", conversation_id="c") for i in range(3)]
    assert counts(here)[0] == "2"
    run(here)
    assert [here.turn(turn.turn_id)["answer"] for turn in turns] == ["a", "b", "c"]
    assert counts(here) == ("0", 0, [])


@pytest.mark.parametrize("approved", [True, False])
def test_a_decision_counts_once(approved: bool) -> None:
    model = ScriptedModel([calls(("web-buy", {"what": "x"}), ("web-search", {"q": "a"})), "done"])
    here = doubled(Agent("support", model, tools=[search, buy]), search, buy)
    turn = here.submit("support", "go", conversation_id="c")
    run(here)
    [approval] = here.approvals()
    here.decide(approval["approval_id"], approved)
    run(here)
    assert here.turn(turn.turn_id)["answer"] == "done"
    assert sorted(ran) == (["a", "x"] if approved else ["a"])
    events = [json.loads(entry["e"])["event"] for _, entry in here.ports.store.client.xrange("tm:dev:audit")]
    assert len(events) == len(set(events)) == (3 if approved else 2), events
    assert counts(here) == ("0", 0, [])
    assert_paired(model.requests[-1].messages)


def test_an_interrupt_and_a_cancel_end_each_turn_once() -> None:
    model = ScriptedModel([calls(("web-buy", {"what": "x"})), "second"])
    here = doubled(Agent("support", model, tools=[buy]), buy)
    first = here.submit("support", "one", conversation_id="c")
    run(here)
    second = here.submit("support", "two", conversation_id="c", on_busy=OnBusy.INTERRUPT)
    third = here.submit("support", "three", conversation_id="c")
    here.cancel(third.turn_id)
    run(here)
    states = [here.turn(turn.turn_id)["state"] for turn in (first, second, third)]
    assert states == ["cancelled", "completed", "cancelled"]
    assert counts(here) == ("0", 0, []) and ran == []


def test_a_call_is_cancelled_once() -> None:
    model = ScriptedModel([calls(("web-search", {"q": "a"}), ("web-search", {"q": "b"})), "done"])
    here = doubled(Agent("support", model, tools=[search]), search)
    turn = here.submit("support", "go", conversation_id="c")
    here.run_one(here.ports.outbox.sweep(unsent_after_ms=-1).unsent[0])
    cancel_call(here.ports, here.principal, turn.turn_id, here.turn(turn.turn_id)["calls"][0]["call_id"])
    run(here)
    ended = here.turn(turn.turn_id)
    assert [call["state"] for call in ended["calls"]] == ["cancelled", "completed"] and ran == ["b"]
    assert ended["answer"] == "done"


def test_an_agent_asked_by_another_starts_and_answers_once() -> None:
    boss = Agent("boss", ScriptedModel([calls(("agent-research", {"input": "x"})), "done"]), tools=[AgentTool("research")])
    research = Agent("research", ScriptedModel([calls(("web-buy", {"what": "x"})), "found"]), description="looks things up", tools=[buy])
    here = doubled(boss, research, buy)
    turn = here.submit("boss", "go", conversation_id="c")
    run(here)
    here.decide(here.approvals()[0]["approval_id"], True)
    run(here)
    ended = here.turn(turn.turn_id)
    assert ended["answer"] == "done" and ran == ["x"]
    assert ended["usage"] == here.turn(turn.turn_id)["usage"]
    assert counts(here) == ("0", 0, [])


def test_what_was_used_counts_once_at_every_level_and_a_round_is_told_of_once() -> None:
    told: list[tuple[int, str | None]] = []
    boss = ScriptedModel([calls(("agent-research", {"input": "x"}), ("agent-research", {"input": "y"})), "done"])
    research = ScriptedModel(
        [calls(("web-search", {"q": "a"})), calls(("web-search", {"q": "b"})), calls(("web-search", {"q": "c"})), "x", "y", "z"]
    )

    def compact(messages: Any) -> list[Message]:
        return [{"role": "user", "content": call_model(summary, messages).content}]

    summary = ScriptedModel(["short"] * 9)
    here = doubled(
        Agent(
            "boss",
            boss,
            tools=[AgentTool("research")],
            limits=Limits(max_tool_calls=5),
            on_round=lambda c: told.append((c["round"], c["stop_reason"])),
        ),
        Agent("research", research, tools=[search], compact_after=1, keep_recent_rounds=0, compactor=compact),
    )
    turn = here.submit("boss", "go", conversation_id="c")
    run(here)
    ended = here.turn(turn.turn_id)
    due = [str(entry) for entry in here.ports.store.client.zrange("tm:due", 0, -1)]
    assert told == [(1, None)] and due == [f"out:dev/round.turn_ended.{turn.turn_id}.1"], "a send whose answer got lost comes again"
    asked = boss.asked + research.asked + summary.asked
    assert summary.asked > 0 and ended["usage"] == {"input_tokens": 7 * asked, "output_tokens": 3 * asked}
    kept = here.ports.conversations.conversation("dev", "c")
    assert (kept["in"], kept["tools"]) == (str(7 * asked), str(2 + len(ran)))
