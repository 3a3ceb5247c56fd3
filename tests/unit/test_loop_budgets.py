"""Budgets: a turn ends where one is used up and says which; prices make tokens a cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestration import Agent, Budget, Limits, tool
from orchestration.actions import read
from orchestration.core.errors import Misconfigured
from orchestration.core.limits import Price
from orchestration.core.model import Usage
from orchestration.models import ScriptedModel, Step
from orchestration.settings import load_settings
from orchestration.testing.frames import assert_paired, assert_whole, only
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def call(tokens_in: int = 10, tokens_out: int = 5, calls: int = 1) -> Step:
    return Step("hm", tool_calls=[("math-add", {"a": 1, "b": 2})] * calls, usage=Usage(tokens_in, tokens_out))


def says(text: str, tokens_in: int = 10, tokens_out: int = 5) -> Step:
    return Step(text, usage=Usage(tokens_in, tokens_out))


PRICES = json.dumps({"scripted": {"input": 2, "output": 10, "cached": 0.5}})


@pytest.mark.parametrize(
    ("limits", "named", "asked"),
    [
        (Limits(max_input_tokens=25), "max_input_tokens=25 (30 used)", 3),
        (Limits(max_output_tokens=10), "max_output_tokens=10 (10 used)", 2),
        (Limits(max_tool_calls=2), "max_tool_calls=2 (2 used, 1 more asked for)", 3),
        (Limits(max_cost=0.0002), "max_cost=0.0002 (0.00021 used)", 3),
        (Limits(max_input_tokens=0), "max_input_tokens=0 (0 used)", 0),
    ],
)
def test_a_turn_ends_where_its_budget_does_and_says_which(turnmill: Turnmill, limits: Limits, named: str, asked: int) -> None:
    model = ScriptedModel([call()], repeat_last=True)
    here = turnmill(Agent("a", model, tools=[add], limits=limits), prices=PRICES)
    turn = here.ask("a", "go", conversation_id="c")
    assert (turn["state"], turn["stop_reason"]) == ("failed", "budget")
    assert turn["error"] == {"code": "budget", "detail": f"the turn's budget {named} is used up"}
    assert model.asked == asked
    assert_whole(here.frames("c"))
    assert only(here.frames("c"), "error")["code"] == "budget"
    assert named in read.history(here.ports, "dev", "c")[-1]["data"]["content"], "it leaves its trace in the history"


def test_readers_and_watchers_see_what_a_turn_cost(turnmill: Turnmill) -> None:
    here = turnmill(Agent("a", ScriptedModel([call(), says("done")]), tools=[add]), prices=PRICES)
    turn = here.ask("a", "go", conversation_id="c")
    assert turn["usage"] == {"input_tokens": 20, "output_tokens": 10, "cost": 0.00014} == only(here.frames("c"), "done")["usage"]


def test_an_answer_counts_even_when_it_used_the_rest(turnmill: Turnmill) -> None:
    model = ScriptedModel([says("expensive", 1000)])
    assert turnmill(Agent("a", model, limits=Limits(max_input_tokens=100))).ask("a", "go")["answer"] == "expensive"


def test_no_call_runs_that_the_budget_has_no_room_for(turnmill: Turnmill) -> None:
    model = ScriptedModel([call(calls=3)])
    here = turnmill(Agent("a", model, tools=[add], limits=Limits(max_tool_calls=2)))
    assert here.ask("a", "go")["stop_reason"] == "budget" and here.mesh.asked == []


def test_calls_that_the_loop_answers_do_not_count(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("nope", {}), ("math-add", "{")], [("math-add", {"a": 1, "b": 1})], "done"])
    assert turnmill(Agent("a", model, tools=[add], limits=Limits(max_tool_calls=1))).ask("a", "go")["answer"] == "done"


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (Budget(max_input_tokens=15), "max_input_tokens=15 (20 used)"),
        (Budget(max_rounds=2), "max_rounds=2 (2 used)"),
        (Budget(max_cost=0.0001), "max_cost=0.0001 (0.00014 used)"),
    ],
)
def test_a_conversation_has_a_budget_of_its_own(turnmill: Turnmill, budget: Budget, named: str) -> None:
    model = ScriptedModel([says("ok")], repeat_last=True)
    here = turnmill(Agent("a", model, limits=Limits(conversation=budget)), prices=PRICES)
    assert [here.ask("a", "hi", conversation_id="c")["stop_reason"] for _ in range(3)] == ["answer", "answer", "budget"]
    assert here.ask("a", "hi", conversation_id="c")["error"]["detail"] == f"the conversation's budget {named} is used up"
    assert here.ask("a", "hi", conversation_id="other")["stop_reason"] == "answer"
    assert model.asked == 3


def test_a_conversation_may_have_its_time(turnmill: Turnmill) -> None:
    model = ScriptedModel([says("one"), call(), says("never")])
    here = turnmill(Agent("a", model, tools=[add], limits=Limits(conversation=Budget(deadline_s=1000))))
    assert here.ask("a", "1", conversation_id="c")["stop_reason"] == "answer"
    log = here.ports.store.client
    first = json.loads(str(log.lindex("tm:dev:conv:c:log", 0)))
    log.lset("tm:dev:conv:c:log", 0, json.dumps(first | {"ms": first["ms"] - 1_000_000}))
    turn = here.ask("a", "2", conversation_id="c")
    assert turn["stop_reason"] == "budget" and "the conversation's budget deadline_s=1000" in turn["error"]["detail"]
    assert model.asked == 1 and here.ask("a", "2", conversation_id="d")["stop_reason"] == "answer"


def test_tool_calls_count_across_the_turns_of_a_conversation(turnmill: Turnmill) -> None:
    model = ScriptedModel([call(), "one", call(calls=2), call(calls=2)])
    here = turnmill(Agent("a", model, tools=[add], limits=Limits(conversation=Budget(max_tool_calls=2))))
    assert here.ask("a", "go", conversation_id="c")["stop_reason"] == "answer"
    assert here.ask("a", "go", conversation_id="c")["stop_reason"] == "budget"
    assert len(here.mesh.asked) == 1


def test_the_next_turn_after_a_used_up_budget_is_well_formed(turnmill: Turnmill) -> None:
    model = ScriptedModel([call(100), "fresh"])
    here = turnmill(Agent("a", model, tools=[add], limits=Limits(max_input_tokens=50)))
    here.ask("a", "go", conversation_id="c")
    assert here.ask("a", "again", conversation_id="c")["answer"] == "fresh"
    assert_paired(model.requests[1].messages)


def test_a_bounded_cost_without_a_price_asks_no_model(turnmill: Turnmill) -> None:
    model = ScriptedModel(["never"])
    turn = turnmill(Agent("a", model, limits=Limits(max_cost=1))).ask("a", "go")
    assert (turn["error"]["code"], model.asked) == ("misconfigured", 0)
    assert (
        turnmill(Agent("a", ScriptedModel(["x"]), limits=Limits(max_cost=1)), prices='{"*": {"input": 1, "output": 1}}').ask("a", "go")[
            "answer"
        ]
        == "x"
    )


def test_prices_are_for_a_million_tokens() -> None:
    price = Price(2, 10, 0.5)
    assert price.cost_micros(Usage(1_000_000, 100_000)) == 3_000_000
    assert price.cost_micros(Usage(100, 0, cached_tokens=60)) == 110
    assert price.cost_micros(Usage(1, 0, cached_tokens=1)) == 1, "rounded up"
    assert Price(2, 10).cost_micros(Usage(100, 0, cached_tokens=60)) == 200


def test_wrong_prices_are_refused_at_start() -> None:
    for wrong in ("cheap", '{"m": 3}', '{"m": {"input": 1}}', "[1]"):
        with pytest.raises(Misconfigured, match="TURNMILL_PRICES"):
            load_settings(prices=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Limits(max_rounds=0),
        lambda: Limits(max_tool_calls=-1),
        lambda: Limits(max_cost=float("nan")),
        lambda: Limits(max_input_tokens=1.5),  # type: ignore[arg-type]
        lambda: Limits(max_handoffs=True),
        lambda: Limits(deadline_s=0),
        lambda: Budget(max_rounds=0),
        lambda: Budget(max_cost=-0.1),
    ],
)
def test_bounds_that_cannot_be_any_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(Misconfigured):
        wrong()
