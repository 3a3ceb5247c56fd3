"""Any model a user brings can be asked: sync or async, with a sink or without, and its failures say no more than they may."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from orchestration.core.errors import ModelError
from orchestration.core.model import Delta, ModelReply, RequestedCall, Usage
from orchestration.models.calling import call_model, call_model_async
from orchestration.models.failover import Failover
from orchestration.models.limited import Limited
from orchestration.models.loop_thread import loop_thread
from orchestration.models.scripted import FunctionModel, ScriptedModel

MESSAGES = [{"role": "user", "content": "my secret"}]


class Returns:
    def __init__(self, found: Any) -> None:
        self.found = found

    def complete(self, messages: Any, *, tools: Any = None) -> Any:
        return self.found


class Streams:
    """An async model that shows pieces."""

    model = "streams"

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.cancelled = threading.Event()

    async def complete(self, messages: Any, *, tools: Any = None, sink: Any = None) -> ModelReply:
        try:
            for piece in self.pieces:
                sink(Delta(text=piece))
                await asyncio.sleep(0)
            if self.pieces == ("stuck",):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return ModelReply(content="".join(self.pieces))


@dataclass
class ForeignCall:
    id: str
    name: str
    arguments: dict[str, Any]


@dataclass
class ForeignReply:
    content: str | None = None
    tool_calls: list[ForeignCall] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


CALL = RequestedCall("geo", '{"q": "x"}', "1")


@pytest.mark.parametrize(
    ("found", "reply"),
    [
        (ModelReply("x"), ModelReply("x")),
        ("x", ModelReply("x")),
        ({"content": "x", "tool_calls": None}, ModelReply("x")),
        (
            {"content": None, "tool_calls": [{"id": "1", "function": {"name": "geo", "arguments": '{"q": "x"}'}}]},
            ModelReply("", (CALL,), finish_reason="tool_calls"),
        ),
        (
            ForeignReply(tool_calls=[ForeignCall("1", "geo", {"q": "x"})], usage={"input_tokens": 3, "output_tokens": 1}),
            ModelReply("", (CALL,), finish_reason="tool_calls", usage=Usage(3, 1)),
        ),
        (
            SimpleNamespace(
                choices=[SimpleNamespace(message=SimpleNamespace(content="x", tool_calls=None), finish_reason="length")],
                usage=SimpleNamespace(prompt_tokens=2, completion_tokens=1),
                model="m",
            ),
            ModelReply("x", finish_reason="length", usage=Usage(2, 1), model="m"),
        ),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ModelReply("ab")),
    ],
)
def test_replies_of_other_shapes_are_read(found: Any, reply: ModelReply) -> None:
    assert call_model(Returns(found), MESSAGES) == reply


@pytest.mark.parametrize(
    "found", [None, 7, {"text": "x"}, {"content": 7}, {"content": "", "tool_calls": [{"id": "1"}]}, {"content": "", "tool_calls": "geo"}]
)
def test_a_reply_of_no_known_shape_is_an_error_that_says_so(found: Any) -> None:
    with pytest.raises(ModelError) as caught:
        call_model(Returns(found), MESSAGES)
    assert (caught.value.kind, caught.value.retryable) == ("protocol", False)


def test_a_model_without_a_sink_is_shown_in_one_piece() -> None:
    shown: list[Delta] = []
    call_model(Returns(ModelReply("x", thinking="hm")), MESSAGES, sink=shown.append)
    assert shown == [Delta(text="x", thinking="hm")]


def test_an_async_model_shows_its_pieces_in_the_thread_that_asked() -> None:
    shown: list[tuple[str, int]] = []
    reply = call_model(Streams("a", "b", "c"), MESSAGES, sink=lambda delta: shown.append((delta.text, threading.get_ident())))
    assert reply.content == "abc"
    assert shown == [(piece, threading.get_ident()) for piece in "abc"]


def test_async_models_of_many_threads_share_one_loop() -> None:
    class Asks:
        async def complete(self, messages: Any, *, tools: Any = None) -> ModelReply:
            return ModelReply(str(id(asyncio.get_running_loop())))

    with ThreadPoolExecutor(8) as threads:
        loops = {reply.content for reply in threads.map(lambda _: call_model(Asks(), MESSAGES), range(40))}
    assert len(loops) == 1


def test_an_async_model_can_be_asked_from_inside_a_running_loop() -> None:
    async def outer() -> str:
        return call_model(Streams("a"), MESSAGES, sink=lambda _: None).content

    assert asyncio.run(outer()) == "a"


def test_async_code_asks_an_async_model_through_every_wrapper() -> None:
    async def outer(model: Any) -> str:
        return (await call_model_async(model, MESSAGES, sink=lambda _: None)).content

    for model in (Streams("a"), Failover(Streams("a")), Limited(Streams("a"), concurrency=1, name="x"), ScriptedModel(["a"])):
        assert loop_thread.submit(outer(model)).result(30) == "a"
    assert asyncio.run(outer(Streams("a"))) == "a"


def test_async_code_that_is_cancelled_leaves_the_call_alone(recwarn: pytest.WarningsRecorder) -> None:
    held, ended = threading.Event(), threading.Event()

    def answer(messages: Any) -> str:
        held.wait(30)
        ended.set()
        return "late"

    async def outer() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call_model_async(FunctionModel(answer), MESSAGES), 0.01)

    asyncio.run(outer())
    held.set()
    assert ended.wait(30) and not recwarn.list


def test_async_code_that_would_wait_for_itself_is_told_so() -> None:
    async def outer() -> ModelReply:
        return Limited(Streams("a"), concurrency=1, name="x").complete(MESSAGES)

    with pytest.raises(ModelError, match="call_model_async") as caught:
        loop_thread.submit(outer()).result(30)
    assert caught.value.kind == "bad_request" and not caught.value.retryable
    assert call_model(Streams("b"), MESSAGES, sink=lambda _: None).content == "b", "the loop that all async models share still runs"


def test_context_variables_reach_an_async_model() -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="none")

    class Traced:
        async def complete(self, messages: Any, *, tools: Any = None) -> str:
            return trace.get()

    trace.set("abc")
    assert call_model(Traced(), MESSAGES).content == "abc"


class Stop(Exception):
    pass


def stop(_: Delta) -> None:
    raise Stop


class Swallows:
    """Hides what its sink raises."""

    def __init__(self, *, rename: bool) -> None:
        self.rename = rename

    def complete(self, messages: Any, *, tools: Any = None, sink: Any = None) -> str:
        try:
            sink(Delta(text="x"))
        except Exception:
            if self.rename:
                raise RuntimeError("mine") from None
        return "x"


def test_what_a_sink_raises_comes_out_whatever_the_model_makes_of_it() -> None:
    for model in (Swallows(rename=True), Swallows(rename=False), ScriptedModel(["x"]), Streams("x"), Returns("x")):
        with pytest.raises(Stop):
            call_model(model, MESSAGES, sink=stop)


def test_an_async_model_is_cancelled_when_its_sink_raises() -> None:
    model = Streams("stuck")
    with pytest.raises(Stop):
        call_model(model, MESSAGES, sink=stop)
    assert model.cancelled.wait(30)


class Raises:
    model = "mine"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def complete(self, messages: Any, *, tools: Any = None) -> Any:
        raise self.error


class RaisesLater(Raises):
    async def complete(self, messages: Any, *, tools: Any = None) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [Raises, RaisesLater])
def test_a_foreign_exception_names_its_class_and_place_but_never_its_text(kind: type[Raises]) -> None:
    with pytest.raises(ModelError) as caught:
        call_model(kind(ValueError("prompt was: my secret")), MESSAGES)
    assert not caught.value.retryable
    assert "ValueError (test_models_calling.py:" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", [Raises, RaisesLater])
def test_a_model_error_comes_out_as_it_is(kind: type[Raises]) -> None:
    error = ModelError("rate_limited", "slow", retryable=True, retry_after_s=2.5)
    with pytest.raises(ModelError) as caught:
        call_model(kind(error), MESSAGES)
    assert caught.value is error


def test_a_model_that_cancels_itself_or_exits_does_not_end_the_others() -> None:
    for error in (asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()):
        with pytest.raises(ModelError):
            call_model(RaisesLater(error), MESSAGES)
    assert call_model(Streams("x"), MESSAGES, sink=lambda _: None).content == "x"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_can_ask_too() -> None:
    call_model(Streams("x"), MESSAGES, sink=lambda _: None)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if call_model(Streams("y"), MESSAGES, sink=lambda _: None).content == "y" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
