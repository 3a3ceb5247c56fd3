"""Typed answers: a turn ends on data that was validated, or says which of three ways it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from orchestration import Agent, AgentOutput, Gate, Limits, tool
from orchestration.actions import read
from orchestration.core.errors import Misconfigured
from orchestration.core.turn import OnBusy
from orchestration.models import ScriptedModel, Step
from orchestration.testing.frames import assert_paired, assert_whole, only
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


class Triage(BaseModel):
    """How urgent it is, and whose."""

    priority: Literal["low", "normal", "urgent"]
    team: str
    count: Annotated[int, Field(ge=0)] = 0


GOOD = {"priority": "urgent", "team": "payments"}
BAD = {"priority": "now", "team": "payments"}


@tool("search")
def search(q: str) -> str:
    """Search."""
    return f"found {q}"


def agent(*steps: Any, output: Any = None, **more: Any) -> tuple[Agent, ScriptedModel]:
    model = ScriptedModel(list(steps))
    return Agent("triage", model, output=output or AgentOutput(Triage), **more), model


def test_a_turn_ends_on_the_validated_object(turnmill: Turnmill) -> None:
    declared, model = agent([("submit", GOOD | {"count": "3"})])
    here = turnmill(declared)
    turn = here.ask("triage", "checkout is down", conversation_id="c")
    assert (turn["state"], turn["stop_reason"]) == ("completed", "answer")
    assert turn["output"] == {"priority": "urgent", "team": "payments", "count": 3}, "converted and with its defaults"
    assert turn["calls"][0]["name"] == "submit" and turn["calls"][0]["state"] == "completed"
    frames = here.frames("c")
    assert_whole(frames)
    assert only(frames, "message")["output"] == turn["output"]
    assert only(frames, "tool_result")["content"] == "accepted"
    assert model.asked == 1, "it ends at once"
    loaded = declared.output.load(turn["output"]) if declared.output else None
    assert isinstance(loaded, Triage) and loaded.team == "payments"


def test_the_model_is_told_of_the_answers_schema(turnmill: Turnmill) -> None:
    declared, model = agent([("submit", GOOD)])
    turnmill(declared).ask("triage", "hi")
    [definition] = model.requests[0].tools
    parameters = definition["function"]["parameters"]
    assert definition["function"]["name"] == "submit"
    assert parameters["type"] == "object" and parameters["required"] == ["priority", "team"] and "title" not in parameters


def test_an_invalid_answer_is_given_back_to_be_mended(turnmill: Turnmill) -> None:
    declared, model = agent([("submit", BAD)], [("submit", GOOD)])
    turn = turnmill(declared).ask("triage", "hi")
    told = json.loads(model.requests[1].messages[-1]["content"])
    assert told["error"] == "invalid answer, fix the fields below and call submit again"
    assert told["details"].startswith("priority: ") and "pydantic.dev" not in told["details"] and "'now'" not in told["details"]
    assert turn["output"]["team"] == "payments" and turn["rounds"] == 2


@pytest.mark.parametrize("broken", ['{"priority": ', "[1]", '"s"', "null"])
def test_arguments_that_are_no_object_count_as_an_invalid_answer(turnmill: Turnmill, broken: str) -> None:
    declared, model = agent([("submit", broken)], [("submit", broken)])
    turn = turnmill(declared).ask("triage", "hi")
    assert (turn["state"], turn["stop_reason"]) == ("failed", "invalid_output")
    assert (turn["error"]["reason"], turn["error"]["attempts"]) == ("invalid_answer", 2)
    assert_paired(model.requests[1].messages)


@pytest.mark.parametrize("repairs", [0, 1, 2])
def test_one_invalid_answer_too_many_ends_the_turn(turnmill: Turnmill, repairs: int) -> None:
    declared, model = agent(*[[("submit", BAD)]] * (repairs + 1), output=AgentOutput(Triage, max_repairs=repairs))
    turn = turnmill(declared).ask("triage", "hi", conversation_id="c")
    assert (turn["state"], turn["stop_reason"]) == ("failed", "invalid_output")
    assert turn["error"]["code"] == "invalid_output" and turn["error"]["reason"] == "invalid_answer"
    assert turn["error"]["attempts"] == repairs + 1 == model.asked
    assert f"after {repairs + 1} attempt(s)" in turn["error"]["detail"]
    assert turn["output"] is None


def test_invalid_answers_of_an_earlier_turn_cost_no_repair(turnmill: Turnmill) -> None:
    declared, _ = agent([("submit", BAD)], [("submit", GOOD)], [("submit", BAD)], [("submit", GOOD)])
    here = turnmill(declared)
    for _ in range(2):
        assert here.ask("triage", "hi", conversation_id="c")["stop_reason"] == "answer"


def test_a_text_answer_is_no_answer(turnmill: Turnmill) -> None:
    declared, _ = agent([("submit", BAD)], "It is urgent.")
    here = turnmill(declared)
    turn = here.ask("triage", "hi", conversation_id="c")
    assert (turn["stop_reason"], turn["error"]["reason"], turn["error"]["attempts"]) == ("invalid_output", "text_answer", 1)
    assert turn["answer"] == turn["error"]["details"] == "It is urgent."
    assert read.history(here.ports, "dev", "c")[-1]["data"]["content"] == "It is urgent.", "the conversation goes on from it"


def test_an_empty_answer_is_a_text_answer(turnmill: Turnmill) -> None:
    declared, _ = agent("")
    turn = turnmill(declared).ask("triage", "hi")
    assert (turn["error"]["reason"], turn["answer"]) == ("text_answer", "(no response)")


def test_the_round_limit_without_an_answer_says_so(turnmill: Turnmill) -> None:
    declared, _ = agent(*[[("search", {"q": "x"})]] * 2, tools=[search], limits=Limits(max_rounds=2))
    turn = turnmill(declared).ask("triage", "hi")
    assert (turn["stop_reason"], turn["error"]["reason"]) == ("invalid_output", "round_limit")
    assert turn["error"]["detail"] == "no valid submit call within 2 round(s)" and turn["error"]["details"] is None


def test_an_answer_in_the_last_round_counts(turnmill: Turnmill) -> None:
    declared, _ = agent([("search", {"q": "x"})], [("submit", GOOD)], tools=[search], limits=Limits(max_rounds=2))
    assert turnmill(declared).ask("triage", "hi")["stop_reason"] == "answer"


def test_at_the_round_limit_the_typed_answer_may_still_be_asked_for(turnmill: Turnmill) -> None:
    declared, model = agent(
        [("search", {"q": "x"})], [("submit", GOOD)], tools=[search], limits=Limits(max_rounds=1), on_round_limit="answer"
    )
    here = turnmill(declared)
    turn = here.ask("triage", "hi")
    assert turn["stop_reason"] == "answer" and turn["output"]["team"] == "payments"
    assert model.requests[1].tool_names == ["submit"] and here.mesh.asked == []


def test_the_first_accepted_answer_counts_whatever_else_the_round_holds(turnmill: Turnmill) -> None:
    declared, _ = agent([("submit", BAD), ("search", {"q": "x"}), ("submit", GOOD), ("submit", GOOD | {"team": "other"})], tools=[search])
    here = turnmill(declared)
    turn = here.ask("triage", "hi", conversation_id="c")
    assert (turn["stop_reason"], turn["output"]["team"]) == ("answer", "payments")
    assert [call["state"] for call in turn["calls"]] == ["failed", "completed", "completed", "failed"]
    assert len(here.mesh.asked) == 1, "what was asked for beside it runs"
    results = [one["content"] for one in here.frames("c") if one["kind"] == "tool_result"]
    assert any("submit already settled this run, call ignored" in content for content in results)
    assert_whole(here.frames("c"))


def test_the_conversation_goes_on_after_a_typed_answer(turnmill: Turnmill) -> None:
    declared, model = agent([("submit", GOOD)], [("submit", GOOD)])
    here = turnmill(declared)
    for text in ("one", "two"):
        here.ask("triage", text, conversation_id="c")
    assert_paired(model.requests[1].messages)
    assert [message["role"] for message in model.requests[1].messages] == ["user", "assistant", "tool", "user"]


def test_a_message_that_joins_meanwhile_is_answered_too(turnmill: Turnmill) -> None:
    declared, model = agent([("search", {"q": "x"})], [("submit", GOOD)], [("submit", GOOD | {"team": "b"})], tools=[search])
    here = turnmill(declared)
    turn = here.submit("triage", "one", conversation_id="c")
    steered: list[bool] = []
    complete = model.complete

    def joining(*args: Any, **more: Any) -> Any:
        if model.asked == 1 and not steered:
            steered.append(True)
            here.submit("triage", "and this", conversation_id="c", on_busy=OnBusy.STEER)
        return complete(*args, **more)

    model.complete = joining  # type: ignore[method-assign]
    here.run()
    ended = here.turn(turn.turn_id)
    assert ended["output"]["team"] == "b" and model.requests[2].messages[-1]["content"] == "and this"
    assert_paired(model.requests[2].messages)


def test_a_gated_answer_waits_for_a_human_who_may_correct_it(turnmill: Turnmill) -> None:
    declared, _ = agent([("submit", GOOD)], approvals={"submit": Gate(reason="goes to the customer")})
    here = turnmill(declared)
    turn = here.ask("triage", "hi", conversation_id="c")
    assert turn["state"] == "waiting" and turn["output"] is None
    [approval] = here.approvals()
    assert approval["tool"] == "submit" and approval["schema"]["required"] == ["priority", "team"]
    here.decide(approval["approval_id"], True, arguments=GOOD | {"team": "fraud"})
    here.run()
    ended = here.turn(turn["turn_id"])
    assert (ended["stop_reason"], ended["output"]["team"]) == ("answer", "fraud")
    assert_whole(here.frames("c"))


def test_a_denied_answer_costs_no_repair_and_an_invalid_one_asks_nobody(turnmill: Turnmill) -> None:
    declared, _ = agent(
        [("submit", BAD)], [("submit", GOOD)], [("submit", GOOD)], output=AgentOutput(Triage, max_repairs=1), approvals={"submit": Gate()}
    )
    here = turnmill(declared)
    turn = here.ask("triage", "hi")
    assert len(here.approvals()) == 1 and turn["rounds"] == 1
    here.decide(here.approvals()[0]["approval_id"], False, note="too early")
    here.run()
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert here.turn(turn["turn_id"])["stop_reason"] == "answer"


def test_a_gate_for_everything_on_the_mesh_does_not_gate_the_answer(turnmill: Turnmill) -> None:
    declared, _ = agent([("submit", GOOD)], approvals={"**": Gate()})
    assert turnmill(declared).ask("triage", "hi")["state"] == "completed"


def test_the_tool_may_have_another_name_and_the_class_be_given_alone(turnmill: Turnmill) -> None:
    declared, model = agent([("report", GOOD)], output=AgentOutput(Triage, tool="report"))
    assert turnmill(declared).ask("triage", "hi")["output"]["priority"] == "urgent" and model.requests[0].tool_names == ["report"]
    assert Agent("a", ScriptedModel(["x"]), output=Triage).output.tool == "submit"  # type: ignore[arg-type, union-attr]


def test_validators_of_the_class_run_and_nested_classes_keep_their_definitions(turnmill: Turnmill) -> None:
    class Part(BaseModel):
        name: str

    class Report(BaseModel):
        parts: list[Part]

        @field_validator("parts")
        @classmethod
        def _some(cls, value: list[Part]) -> list[Part]:
            if not value:
                raise ValueError("name at least one part")
            return value

    output = AgentOutput(Report)
    assert "Part" in output.schema["$defs"]
    declared, model = agent([("submit", {"parts": []})], [("submit", {"parts": [{"name": "x"}]})], output=output)
    assert turnmill(declared).ask("triage", "hi")["output"] == {"parts": [{"name": "x"}]}
    assert "name at least one part" in model.requests[1].messages[-1]["content"]


def test_a_class_that_refers_to_itself_is_inlined(turnmill: Turnmill) -> None:
    output = AgentOutput(Tree)
    assert output.schema["type"] == "object" and "Tree" in output.schema["$defs"]
    declared, _ = agent([("submit", {"name": "a", "parts": [{"name": "b"}]})], output=output)
    assert turnmill(declared).ask("triage", "hi")["output"]["parts"][0]["name"] == "b"


class Tree(BaseModel):
    name: str
    parts: list[Tree] = Field(default_factory=list)


def test_a_struct_of_msgspec_is_validated_by_its_own_library(turnmill: Turnmill) -> None:
    msgspec = pytest.importorskip("msgspec")

    Answer = msgspec.defstruct("Answer", [("team", str), ("count", Annotated[int, msgspec.Meta(ge=1)])])
    output = AgentOutput(Answer)
    assert output.schema["type"] == "object" and output.schema["required"] == ["team", "count"]
    declared, model = agent([("submit", {"team": "a", "count": 0})], [("submit", {"team": "a", "count": "3"})], output=output)
    assert turnmill(declared).ask("triage", "hi")["output"] == {"team": "a", "count": 3}
    assert "count" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize(
    "declare",
    [
        lambda: AgentOutput(Triage, max_repairs=-1),
        lambda: AgentOutput(Triage, tool="no spaces"),
        lambda: AgentOutput(int),
        lambda: Agent("a", ScriptedModel(["x"]), output="Triage"),  # type: ignore[arg-type]
        lambda: Agent("a", ScriptedModel(["x"]), output=AgentOutput(Triage, tool="search"), tools=[search]),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(declare: Callable[[], Any]) -> None:
    with pytest.raises(Misconfigured):
        declare()


def test_a_typed_turn_survives_messages_delivered_twice(turnmill: Turnmill) -> None:
    declared, model = agent([("search", {"q": "x"}), ("submit", BAD)], Step(tool_calls=[("submit", GOOD)]), tools=[search])
    here = turnmill(declared)
    turn = here.ask("triage", "hi", conversation_id="c")
    ended, frames = here.turn(turn["turn_id"]), here.frames("c")
    for step in list(here.queue.sent):
        here.run_one(step)
    here.run()
    assert here.turn(turn["turn_id"]) == ended and here.frames("c") == frames and model.asked == 2
