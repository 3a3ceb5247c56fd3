"""A scripted model plays what it was told, says what it was shown, and complains loudly when its script is over."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestration.core.errors import Misconfigured, ModelError
from orchestration.core.model import Delta, ModelReply, RequestedCall, Usage
from orchestration.models import FunctionModel, ScriptedModel, ScriptEnded, Step, call_model

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "geo", "parameters": {}}}]


def test_steps_are_played_in_order() -> None:
    model = ScriptedModel(
        [[("geo", {"q": "x"})], ("geo", "{broken"), Step("done", thinking="hm", usage=Usage(3, 1)), RequestedCall("geo", "")]
    )
    replies = [model.complete([USER]) for _ in range(4)]
    assert replies[0] == ModelReply(
        "", (RequestedCall("geo", '{"q": "x"}'),), finish_reason="tool_calls", usage=Usage(7, 3), model="scripted"
    )
    assert replies[1].tool_calls == (RequestedCall("geo", "{broken"),)
    assert replies[2] == ModelReply("done", thinking="hm", usage=Usage(3, 1), model="scripted")
    assert replies[3].tool_calls[0].arguments == ""


def test_a_script_that_runs_out_says_which_and_how_long_it_was() -> None:
    model = ScriptedModel(["a"], model="greeter")
    assert model.remaining == 1
    model.complete([USER])
    assert model.remaining == 0
    with pytest.raises(AssertionError, match=r"ScriptedModel\('greeter'\): asked for step 2, but its script has 1"):
        model.complete([USER])
    with pytest.raises(ModelError, match="asked for step 3, but its script has 1"):
        call_model(model, [USER])


def test_the_last_step_may_be_played_for_ever() -> None:
    model = ScriptedModel(["a", "b"], repeat_last=True)
    assert [model.complete([USER]).content for _ in range(4)] == ["a", "b", "b", "b"]
    with pytest.raises(ScriptEnded):
        ScriptedModel([], repeat_last=True).complete([USER])


def test_a_step_tried_again_plays_the_same_when_told_by_messages() -> None:
    model = ScriptedModel([("geo", {}), "done"], by_messages=True)
    assert model.complete([USER]) == model.complete([USER])
    assert model.complete([USER, {"role": "assistant"}, {"role": "tool"}]).content == "done"


def test_pieces_are_shown_before_an_error() -> None:
    shown: list[Delta] = []
    model = ScriptedModel([Step("Hello", chunks=2, thinking="hm", error="unavailable"), Step(chunks=["a", "b"]), ValueError("x")])
    with pytest.raises(ModelError) as caught:
        model.complete([USER], sink=shown.append)
    assert (caught.value.kind, caught.value.retryable) == ("unavailable", True)
    assert shown == [Delta(thinking="hm"), Delta(text="Hel"), Delta(text="lo")]
    assert model.complete([USER]).content == "ab"
    with pytest.raises(ValueError, match="x"):
        model.complete([USER])


def test_it_remembers_what_it_was_shown_then_not_now() -> None:
    model = ScriptedModel(["a", "b", "c"], requests_kept=2)
    messages: list[dict[str, Any]] = []
    for text in ("one", "two", "three"):
        messages.append({"role": "user", "content": text})
        model.complete(messages, tools=TOOLS)
    assert [len(request.messages) for request in model.requests] == [2, 3]
    assert model.requests[0].tool_names == ["geo"]
    assert model.asked == 3


def test_an_answer_can_be_held_back() -> None:
    release = threading.Event()
    model = ScriptedModel([Step("now", release=release)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(model.complete, [USER])
        assert not waiting.done()
        release.set()
        assert waiting.result(30).content == "now"


def test_calls_at_once_get_a_step_each() -> None:
    model = ScriptedModel([str(n) for n in range(200)])
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: model.complete([USER]).content, range(200)))
    assert sorted(texts, key=int) == [str(n) for n in range(200)]


def test_a_function_answers_from_the_messages_and_tools() -> None:
    echo = FunctionModel(lambda messages: messages[-1]["content"].upper())
    assert echo.complete([USER]).content == "HI"
    model = FunctionModel(lambda messages, tools: [(tools[0]["function"]["name"], {})])
    assert model.complete([USER], tools=TOOLS).tool_calls == (RequestedCall("geo", "{}"),)
    assert model.requests[0].messages == [USER]
    with pytest.raises(ModelError):
        FunctionModel(lambda messages: ModelError("quota", "empty", retryable=False)).complete([USER])


@pytest.mark.parametrize("steps", ["text", [7], [[]], [["geo"]], [{"content": "x"}]])
def test_what_is_no_script_is_refused_when_it_is_made(steps: Any) -> None:
    with pytest.raises(Misconfigured):
        ScriptedModel(steps)
