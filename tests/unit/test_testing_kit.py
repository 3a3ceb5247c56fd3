"""What users test their agents with: the fixture, asserts that explain themselves, scripts that complain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestration import Agent, Gate, Limits, ToolError, tool
from orchestration.core.errors import Forbidden, ModelError
from orchestration.models import ScriptedModel, ScriptEnded, Step
from orchestration.testing.frames import assert_kinds, assert_paired, assert_whole, kinds, only, picture, text_of
from orchestration.testing.local import LocalTurnmill

Turnmill = Callable[..., LocalTurnmill]


@tool("math/add")
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_an_agent_is_tested_in_a_few_lines(turnmill: Turnmill) -> None:
    model = ScriptedModel([("math-add", {"a": 1, "b": 2}), "It is 3."])
    here = turnmill(Agent("support", model, tools=[add]))
    assert here.ask("support", "1 + 2?", conversation_id="c")["answer"] == "It is 3."
    assert model.requests[1].messages[-1]["content"] == "3"
    assert_whole(here.frames("c"))
    assert_kinds(here.frames("c"), "tool_call", "tool_result", "message", "done")


def test_a_script_that_runs_out_fails_loudly(turnmill: Turnmill) -> None:
    here = turnmill(Agent("support", ScriptedModel([("math-add", {"a": 1, "b": 2})]), tools=[add]))
    with pytest.raises(ScriptEnded, match="asked for step 2, but its script has 1"):
        here.ask("support", "1 + 2?")
    here.run()


def test_pauses_before_another_attempt_pass_at_once(turnmill: Turnmill) -> None:
    away = ModelError("unavailable", "away", retryable=True, retry_after_s=200)
    model = ScriptedModel([away, Step("half", chunks=2, error=away), "whole"])
    here = turnmill(Agent("support", model))
    assert here.ask("support", "hi", conversation_id="c")["answer"] == "whole"
    assert text_of(here.frames("c")) == "whole"


def test_tools_answer_as_a_tool_host_would(turnmill: Turnmill, caplog: pytest.LogCaptureFixture) -> None:
    @tool("shop/refuse")
    def refuse() -> None:
        """Refuse."""
        raise ToolError("sold_out", "there are none left")

    @tool("shop/break")
    def break_down() -> None:
        """Break."""
        raise ValueError("my secret")

    @tool("shop/picture")
    async def draw() -> bytes:
        """Draw."""
        return b"\x89PNG"

    @tool("shop/error_like")
    def error_like() -> dict[str, str]:
        """An object that looks like an error."""
        return {"error": "none", "code": "x", "message": "fine"}

    names = ["shop-refuse", "shop-break", "shop-picture", "shop-error_like"]
    model = ScriptedModel([[(name, {}) for name in names], "done"])
    here = turnmill(Agent("support", model, tools=[refuse, break_down, draw, error_like]))

    async def inside_a_loop() -> None:
        here.ask("support", "go")

    asyncio.run(inside_a_loop())
    told = [json.loads(message["content"]) for message in model.requests[1].messages[-4:]]
    assert told[0] == {"error": "sold_out", "message": "there are none left"}
    assert told[1] == {"error": "internal_error", "message": "Internal error"}
    assert told[2] == {"type": "application/octet-stream", "bytes": 4, "note": "binary content, not shown"}
    assert told[3] == {"error": "none", "code": "x", "message": "fine"}
    assert "ValueError: my secret" in caplog.text, "the test's own log says what happened"


def test_a_setting_that_does_not_exist_is_told(turnmill: Turnmill) -> None:
    with pytest.raises(TypeError, match="did you mean 'prices'"):
        turnmill(Agent("a", ScriptedModel([])), pricess="{}")


def test_time_can_be_let_pass(turnmill: Turnmill) -> None:
    def here(gate: Gate, **more: Any) -> tuple[LocalTurnmill, str]:
        made = turnmill(
            Agent("a", ScriptedModel([("math-add", {"a": 1, "b": 2}), "done"]), tools=[add], approvals={"math/add": gate}, **more)
        )
        return made, made.ask("a", "go", conversation_id="c")["turn_id"]

    refusing, turn = here(Gate(timeout_s=6000, remind_before_s=3000))
    refusing.pass_time(2000)
    assert kinds(refusing.frames("c")).count("approval_request") == 1
    refusing.pass_time(2000)
    assert kinds(refusing.frames("c")).count("approval_request") == 2, "a reminder"
    assert refusing.turn(turn)["state"] == "waiting"
    refusing.pass_time(2000)
    assert refusing.turn(turn)["answer"] == "done" and refusing.turn(turn)["calls"][0]["state"] == "expired"

    ending, turn = here(Gate(timeout_s=60, on_expiry="end_turn"))
    ending.pass_time(60)
    assert ending.turn(turn)["stop_reason"] == "approval_expired"

    late, turn = here(Gate(timeout_s=6000, deadline_runs=True), limits=Limits(deadline_s=3000))
    late.pass_time(2000)
    assert late.turn(turn)["state"] == "waiting"
    late.pass_time(1000)
    assert late.turn(turn)["stop_reason"] == "deadline" and late.approvals() == []


def test_others_than_the_developer_can_ask_and_decide(turnmill: Turnmill) -> None:
    model = ScriptedModel([("math-add", {"a": 1, "b": 2}), "3"])
    here = turnmill(Agent("a", model, tools=[add], approvals={"math/add": Gate(roles=["ops"], four_eyes=True)}))
    here.ask("a", "go", conversation_id="c", principal=here.person("ann", "ops"))
    [approval] = here.approvals()
    for other in (here.person("bob"), here.person("ann", "ops")):
        with pytest.raises(Forbidden):
            here.decide(approval["approval_id"], True, by=other)
    here.decide(approval["approval_id"], True, by=here.person("bea", "ops"))
    here.run()
    assert here.history("c")[-1]["data"]["content"] == "3" and model.remaining == 0


def frame(kind: str, **more: Any) -> dict[str, Any]:
    return {"seq": 1, "kind": kind, "turn_id": "tn_1", "ts": "", "round": 1} | more


def test_the_text_of_a_round_leaves_out_what_became_void() -> None:
    frames = [frame("token", text="a"), frame("retry"), frame("token", text="b"), frame("token", text="c", round=2)]
    assert text_of(frames) == "bc" and text_of(frames, 2) == "c"


def test_a_missing_frame_is_shown_with_what_there_was() -> None:
    frames = [frame("tool_call", name="math-add"), frame("done")]
    with pytest.raises(AssertionError, match=r"no 'tool_result' frame as number 2(.|\n)*tool_call +\{.*math-add"):
        assert_kinds(frames, "tool_call", "tool_result")
    assert kinds([*frames, frame("token", text="x")]) == ["tool_call", "done"]
    assert picture([]) == "  (no frames)"


def test_one_frame_is_wanted_and_only_one() -> None:
    frames = [frame("tool_call", name="a"), frame("tool_call", name="b")]
    assert only(frames, "tool_call", name="b")["name"] == "b"
    for wanted in ({}, {"name": "c"}):
        with pytest.raises(AssertionError, match="frames of kind 'tool_call'"):
            only(frames, "tool_call", **wanted)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [frame("message")],
        [frame("done"), frame("done", seq=2)],
        [frame("done", seq=2), frame("turn", seq=1)],
        [frame("tool_call", tool_call_id="x"), frame("done", seq=2)],
    ],
)
def test_frames_that_cannot_be_whole_are_told(frames: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError):
        assert_whole(frames)


CALL = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "c1", "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": {"a": 1}}],
    ],
)
def test_messages_that_a_provider_would_refuse_are_told(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError):
        assert_paired(messages)
