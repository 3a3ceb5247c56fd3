"""A round's tools: which ones there are and what a request carries of them, in which order they run, and what hangs around a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestration import Agent, Gate, Limits, MeshTool, ToolContext, ToolError, discover, tool
from orchestration.actions.cancel import cancel_call
from orchestration.core.catalogue import MAX_LINE_CHARS
from orchestration.core.errors import Misconfigured
from orchestration.core.ids import StepKind
from orchestration.core.tool import Discover, ToolSpec
from orchestration.models import ScriptedModel, Step
from orchestration.testing.frames import assert_paired, assert_whole
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]

ran: list[str] = []


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


@tool("notes/write")
def write(text: str) -> str:
    """Write a note. It is kept for a year."""
    ran.append(text)
    return f"wrote {text}"


@tool("notes/read")
def read_notes() -> list[str]:
    """Read all notes!  Costs nothing."""
    return list(ran)


@tool("geo/look_up")
def look_up(place: str) -> str:
    """Find the coordinates of a place, of which there may be more than one, so that one has to ask again, with a country or a region."""
    return "50 N"


@tool("notes/fail")
def fail() -> str:
    """Fail."""
    raise ToolError("full", "the notebook is full")


ALL = (write, read_notes, look_up)


# Deferred loading


def deferred(*steps: Any, tools: Any = ALL, **more: Any) -> tuple[Agent, ScriptedModel]:
    model = ScriptedModel(list(steps))
    return Agent("a", model, tools=tools, tool_loading="deferred", **more), model


def test_a_request_carries_names_and_then_what_was_loaded(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {"names": ["notes-write"]})], [("notes-write", {"text": "x"})], "done")
    here = turnmill(declared)
    assert here.ask("a", "note x", conversation_id="c")["answer"] == "done" and ran == ["x"]
    assert [request.tool_names for request in model.requests] == [
        ["load_tools"],
        ["load_tools", "notes-write"],
        ["load_tools", "notes-write"],
    ]
    assert json.loads(model.requests[1].messages[-1]["content"]) == {"loaded": ["notes-write"]}
    assert_whole(here.frames("c"))


def test_the_list_has_a_line_for_each_tool_and_does_not_change(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {"names": ["notes-write"]})], "done")
    turnmill(declared).ask("a", "hi")
    texts = [request.tools[0]["function"]["description"] for request in model.requests]
    assert texts[0] == texts[1], "a provider's prompt cache holds"
    lines = texts[0].splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["geo-look_up", "notes-read", "notes-write"]
    assert lines[1:] == ["notes-read: Read all notes!", "notes-write: Write a note."]
    assert len(lines[0]) == len("geo-look_up: ") + MAX_LINE_CHARS and lines[0].endswith("…")


def test_an_unknown_name_gets_the_closest_ones(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {"names": ["note_write", "notes-read", "xyzzy"]})], "done")
    turnmill(declared).ask("a", "hi")
    told = json.loads(model.requests[1].messages[-1]["content"])
    assert told["loaded"] == ["notes-read"]
    assert told["unknown"]["note_write"][0] == "notes-write" and told["unknown"]["xyzzy"] == []


def test_what_is_always_loaded_is_sent_in_full(turnmill: Turnmill) -> None:
    declared, model = deferred("done", always_loaded=["notes-read", "geo/look_up"])
    turnmill(declared).ask("a", "hi")
    assert model.requests[0].tool_names == ["load_tools", "notes-read", "geo-look_up"]


def test_a_tool_that_was_never_loaded_runs_and_loads_nothing(turnmill: Turnmill) -> None:
    declared, model = deferred([("notes-write", {"text": "x"})], "done")
    turnmill(declared).ask("a", "hi")
    assert ran == ["x"] and model.requests[1].tool_names == ["load_tools"]


def test_loaded_tools_stay_loaded_in_later_turns_and_those_that_left_do_not(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {"names": ["notes-write", "notes-read"]})], "done", "again", tools=[discover("notes/*")])
    here = turnmill(declared, write, read_notes)
    here.ask("a", "hi", conversation_id="c")
    del here.mesh.tools["notes/read"]
    here.ask("a", "hi", conversation_id="c")
    assert model.requests[2].tool_names == ["load_tools", "notes-write"]


def test_loaded_tools_stay_loaded_whatever_becomes_of_the_messages_that_loaded_them(turnmill: Turnmill) -> None:
    loads = [("load_tools", {"names": ["notes-write"]})], [("load_tools", {"names": ["geo-look_up", "notes-write"]})]
    declared, model = deferred(*loads, [("notes-read", {})], "done", "again", compact_after=1, keep_recent_rounds=0)
    declared = replace(declared, compactor=lambda older: [{"role": "user", "content": "(forgotten)"}])
    here = turnmill(declared)
    here.ask("a", "hi", conversation_id="c")
    here.project.agents["a"] = replace(declared, max_history_messages=1)
    here.ask("a", "hi", conversation_id="c")
    assert not any("load_tools" in json.dumps(message) for message in model.requests[4].messages)
    for request in model.requests[2:]:
        assert request.tool_names == ["load_tools", "notes-write", "geo-look_up"], "in the order in which they were loaded"


def test_loading_without_names_is_an_error_that_helps(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {}), ("load_tools", {"names": []})], "done")
    turnmill(declared).ask("a", "hi")
    for message in model.requests[1].messages[-2:]:
        assert json.loads(message["content"])["error"] == "invalid_arguments"


def test_a_denied_load_loads_nothing(turnmill: Turnmill) -> None:
    declared, model = deferred([("load_tools", {"names": ["notes-write"]})], "done", approvals={"load_tools": Gate()})
    here = turnmill(declared)
    here.ask("a", "hi")
    here.decide(here.approvals()[0]["approval_id"], False)
    here.run()
    assert model.requests[1].tool_names == ["load_tools"]


def test_an_agent_without_tools_has_nothing_to_load(turnmill: Turnmill) -> None:
    declared, model = deferred("done", tools=[])
    turnmill(declared).ask("a", "hi")
    assert model.requests[0].tools == []


# Names


class OtherMesh:
    """The tools of several services, as discovery finds them."""

    def __init__(self, here: LocalTurnmill, specs: list[ToolSpec]) -> None:
        self.specs = specs
        here.mesh.discover = self.discover  # type: ignore[method-assign]

    def discover(self, wishes: Any, *, sure: bool = False) -> list[ToolSpec]:
        return [spec for spec in self.specs if any(wish.includes(spec.prefix) for wish in wishes)]


SEARCHES = [
    ToolSpec("github/search", service="git hub", name="search"),
    ToolSpec("github/issues", service="git hub", name="issues"),
    ToolSpec("web/search", service="web", name="search"),
    ToolSpec("calendar/today", service="calendar", name="today"),
]


def names_with(turnmill: Turnmill, specs: list[ToolSpec], **more: Any) -> tuple[list[str], dict[str, Any]]:
    model = ScriptedModel(["done"])
    here = turnmill(Agent("a", model, tools=[discover("**")], **more))
    OtherMesh(here, specs)
    turn = here.ask("a", "hi")
    return (model.requests[0].tool_names if model.requests else []), turn


def test_two_services_with_one_name_are_refused_naming_both(turnmill: Turnmill) -> None:
    for specs in (SEARCHES, SEARCHES[::-1]):
        _, turn = names_with(turnmill, specs)
        assert turn["state"] == "failed" and turn["error"]["code"] == "catalogue_error"
        assert "'github/search' and 'web/search'" in turn["error"]["detail"], "whatever the order of discovery"


def test_or_get_their_services_names_in_front(turnmill: Turnmill) -> None:
    for specs in (SEARCHES, SEARCHES[::-1]):
        names, turn = names_with(turnmill, specs, on_collision="prefix")
        assert turn["state"] == "completed"
        assert set(names) == {"git_hub__search", "git_hub__issues", "web__search", "today"}


def test_what_still_collides_under_its_prefix_is_refused(turnmill: Turnmill) -> None:
    specs = [ToolSpec("a/search", service="x y", name="search"), ToolSpec("b/search", service="x_y", name="search")]
    _, turn = names_with(turnmill, specs, on_collision="prefix")
    assert turn["error"]["code"] == "catalogue_error" and "'a/search' and 'b/search'" in turn["error"]["detail"]


def test_a_call_by_a_prefixed_name_reaches_its_own_key(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("web__search", {}), ("git_hub__search", {})], "done"])
    here = turnmill(Agent("a", model, tools=[discover("**")], on_collision="prefix"))
    OtherMesh(here, SEARCHES)
    here.ask("a", "hi")
    assert [query.prefix for query in here.mesh.asked] == ["web/search", "github/search"]


def test_a_source_may_have_a_prefix_of_its_own(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("n__notes-write", {"text": "x"})], "done"])
    here = turnmill(Agent("a", model, tools=[discover("notes/w*", name_prefix="n"), discover("geo/*")]), *ALL)
    assert here.ask("a", "hi")["state"] == "completed" and ran == ["x"]
    assert model.requests[0].tool_names == ["geo-look_up", "n__notes-write"]
    assert Discover(("**",)).name_prefix == ""


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [MeshTool("a/b"), MeshTool("a-b")]},
        {"tools": [MeshTool("load_tools")], "tool_loading": "deferred"},
        {"tools": [MeshTool("transfer_to_b")], "handoffs": ["b"]},
        {"tools": [write], "tool_loading": "deferred", "always_loaded": ["notes-wirte"]},
        {"execution": "random"},
        {"tool_loading": "lazy"},
        {"on_round_limit": "explode"},
        {"on_collision": "ignore"},
        {"max_history_messages": 0},
        {"compact_after": -1},
        {"keep_recent_rounds": None},
        {"compactor": 3},
        {"on_tool": "print"},
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(more: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured):
        Agent("a", ScriptedModel([]), **more)


def test_an_unknown_tool_gets_near_names_and_not_hundreds(turnmill: Turnmill) -> None:
    many = [MeshTool(f"tool/number{number}") for number in range(60)]
    model = ScriptedModel([[("tool-number_7", {})], "ok"])
    turnmill(Agent("a", model, tools=many)).ask("a", "hi")
    told = json.loads(model.requests[1].messages[-1]["content"])
    assert told["closest"][0] == "tool-number7" and "tools" not in told


# Order


def sequential(*steps: Any, **more: Any) -> tuple[Agent, ScriptedModel]:
    model = ScriptedModel(list(steps))
    return Agent("a", model, tools=[write], execution="sequential", **more), model


WRITES = [("notes-write", {"text": text}) for text in ("1", "2", "3")]


def test_sequential_calls_run_one_after_the_other_whatever_is_delivered(turnmill: Turnmill) -> None:
    declared, model = sequential(WRITES, "done")
    here = turnmill(declared)
    turn = here.submit("a", "go")
    here.run_one(here.queue.waiting.popleft())
    sent = [step for step in here.queue.waiting if step.kind is StepKind.TOOL]
    assert [step.index for step in sent] == [0], "only the first is sent"
    for index in (2, 1):
        assert here.run_one(replace(sent[0], index=index)) == "parked", "a later one that arrives early waits"
    here.run()
    assert ran == ["1", "2", "3"] and here.turn(turn.turn_id)["answer"] == "done"
    assert [message["content"] for message in model.requests[1].messages[-3:]] == ["wrote 1", "wrote 2", "wrote 3"]


def test_a_sequential_call_waits_for_the_human_before_it(turnmill: Turnmill) -> None:
    @tool("notes/check", approval="look first")
    def check(text: str) -> str:
        """Check."""
        ran.append(text)
        return "checked"

    model = ScriptedModel([[WRITES[0], ("notes-check", {"text": "gated"}), WRITES[2]], "done"])
    here = turnmill(Agent("a", model, tools=[write, check], execution="sequential"))
    turn = here.ask("a", "go", conversation_id="c")
    assert ran == ["1"], "the third does not overtake the one that waits"
    assert turn["state"] == "waiting", "nothing goes on before a human decides"
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    assert ran == ["1", "gated", "3"] and here.turn(turn["turn_id"])["state"] == "completed"
    assert_whole(here.frames("c"))


def test_an_approval_of_a_later_call_does_not_let_it_overtake(turnmill: Turnmill) -> None:
    model = ScriptedModel([WRITES, "done"])
    here = turnmill(Agent("a", model, tools=[write], execution="sequential", approvals={"notes/write": Gate()}))
    turn = here.ask("a", "go")
    third, second, first = (approval["approval_id"] for approval in reversed(here.approvals()))
    del second
    here.decide(third, True)
    here.run()
    assert ran == [] and here.turn(turn["turn_id"])["state"] == "waiting"
    here.decide(first, True)
    here.run()
    assert ran == ["1"] and here.turn(turn["turn_id"])["state"] == "waiting"
    here.decide(here.approvals()[0]["approval_id"], False)
    here.run()
    assert ran == ["1", "3"] and here.turn(turn["turn_id"])["state"] == "completed"


def test_a_cancelled_sequential_call_lets_the_next_one_go(turnmill: Turnmill) -> None:
    declared, _ = sequential(WRITES, "done")
    here = turnmill(declared)
    turn = here.submit("a", "go")
    here.run_one(here.queue.waiting.popleft())
    here.queue.waiting.clear()
    cancel_call(here.ports, here.principal, turn.turn_id, here.turn(turn.turn_id)["calls"][0]["call_id"])
    here.run()
    assert ran == ["2", "3"] and here.turn(turn.turn_id)["state"] == "completed"


def test_sequential_calls_run_once_however_often_they_are_delivered(turnmill: Turnmill) -> None:
    declared, model = sequential(WRITES, "done")
    here = turnmill(declared)
    here.submit("a", "go")
    while here.queue.waiting:
        step = here.queue.waiting.popleft()
        here.run_one(step)
        here.run_one(step)
    assert ran == ["1", "2", "3"] and model.asked == 2


# The round limit


def test_at_the_round_limit_the_model_may_be_asked_for_its_answer(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("notes-write", {"text": "1"})], [("notes-write", {"text": "2"})], "what I know"])
    here = turnmill(Agent("a", model, tools=[write], limits=Limits(max_rounds=2), on_round_limit="answer"))
    turn = here.ask("a", "go", conversation_id="c")
    assert (turn["state"], turn["answer"], turn["rounds"]) == ("completed", "what I know", 3)
    assert ran == ["1"] and model.requests[2].tools == []
    assert json.loads(model.requests[2].messages[-1]["content"])["error"] == "round_limit"
    assert_paired(model.requests[2].messages)
    assert_whole(here.frames("c"))


def test_a_model_that_asks_for_tools_even_then_has_reached_the_limit(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("notes-write", {"text": "1"})]] * 2)
    turn = turnmill(Agent("a", model, tools=[write], limits=Limits(max_rounds=1), on_round_limit="answer")).ask("a", "go")
    assert (turn["stop_reason"], turn["answer"]) == ("round_limit", "(reached tool call limit of 1 rounds without a final answer)")
    assert ran == [] and model.asked == 2


def test_no_bound_on_rounds_is_possible(turnmill: Turnmill) -> None:
    model = ScriptedModel([[("notes-read", {})]] * 30 + ["done"])
    assert turnmill(Agent("a", model, tools=[read_notes], limits=Limits(max_rounds=None))).ask("a", "go")["rounds"] == 31


# An answer whose end is missing


@pytest.mark.parametrize("finish", ["length", "content_filter"])
def test_a_call_whose_arguments_were_cut_off_does_not_run_without_them(turnmill: Turnmill, finish: str) -> None:
    cut = Step(tool_calls=[("notes-read", {}), ("notes-read", "")], finish_reason=finish)
    model = ScriptedModel([cut, "I see."])
    here = turnmill(Agent("a", model, tools=[read_notes], approvals={"notes/read": Gate()}))
    turn = here.ask("a", "go")
    assert [call["state"] for call in turn["calls"]] == ["waiting", "failed"] and len(here.approvals()) == 1
    here.decide(here.approvals()[0]["approval_id"], True)
    here.run()
    told = json.loads(model.requests[1].messages[-1]["content"])
    assert told["error"] == "invalid_arguments" and "cut off" in told["message"]
    assert_paired(model.requests[1].messages)


# Hooks


def test_a_hook_surrounds_each_call_and_knows_what_came_of_it(turnmill: Turnmill) -> None:
    seen: list[Any] = []

    @contextmanager
    def around(call: ToolContext) -> Iterator[None]:
        seen.append(("before", call.name, call.call_id, dict(call.arguments), call.attempt, call.agent))
        call.arguments["text"] = "changed"
        yield
        seen.append(("after", call.result.content if call.result else None, call.result.error if call.result else None))

    model = ScriptedModel([[("notes-write", {"text": "x"}), ("notes-fail", {}), ("nope", {}), ("notes-write", "{")], "done"])
    here = turnmill(Agent("a", model, tools=[write, fail], on_tool=around))
    turn = here.ask("a", "go")
    assert ran == ["x"], "what a hook does to its copy changes nothing"
    first = turn["calls"][0]["call_id"]
    assert seen[:2] == [("before", "notes-write", first, {"text": "x"}, 1, "a"), ("after", "wrote x", False)]
    assert len(seen) == 4 and seen[3][2] is True, "calls that are never asked pass no hook"


def test_a_hook_that_raises_before_keeps_the_tool_from_running(turnmill: Turnmill) -> None:
    def refusing(call: ToolContext) -> Any:
        raise RuntimeError("secret")

    model = ScriptedModel([[("notes-write", {"text": "x"})], "done"])
    here = turnmill(Agent("a", model, tools=[write], on_tool=refusing))
    turn = here.ask("a", "go")
    assert turn["state"] == "completed" and ran == [] and turn["calls"][0]["error"]["code"] == "hook_failed"
    assert "secret" not in model.requests[1].messages[-1]["content"]


def test_a_hook_that_raises_after_costs_nothing(turnmill: Turnmill) -> None:
    @contextmanager
    def around(call: ToolContext) -> Iterator[None]:
        yield
        raise RuntimeError

    model = ScriptedModel([[("notes-write", {"text": "x"})], "done"])
    turn = turnmill(Agent("a", model, tools=[write], on_tool=around)).ask("a", "go")
    assert turn["calls"][0]["state"] == "completed" and turn["answer"] == "done"


def test_an_agent_has_its_own_words_for_failures(turnmill: Turnmill) -> None:
    def words(call: ToolContext, arguments: dict[str, Any], error: ToolError) -> str:
        return f"[{call.name} failed: {error.code}]"

    @tool("notes/odd")
    def odd() -> str:
        """Fail oddly."""
        raise ValueError

    model = ScriptedModel([[("notes-odd", {}), ("notes-write", {"text": "x"})], "done"])
    here = turnmill(Agent("a", model, tools=[odd, write], on_tool_error=words))
    turn = here.ask("a", "go", conversation_id="c")
    assert [message["content"] for message in model.requests[1].messages[-2:]] == ["[notes-odd failed: internal_error]", "wrote x"]
    assert turn["calls"][0]["state"] == "failed" and turn["calls"][0]["error"]["code"] == "internal_error"


def test_words_that_fail_are_replaced_by_ours(turnmill: Turnmill) -> None:
    def words(call: ToolContext, arguments: dict[str, Any], error: ToolError) -> str:
        raise KeyError

    model = ScriptedModel([[("notes-fail", {})], "done"])
    turn = turnmill(Agent("a", model, tools=[fail], on_tool_error=words)).ask("a", "go")
    assert turn["state"] == "completed" and json.loads(model.requests[1].messages[-1]["content"])["error"]
