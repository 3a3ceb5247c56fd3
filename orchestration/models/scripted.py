"""Models without a server, for tests and demonstrations: one that plays a script, one that is a function.

Both answer the same each time, stream when asked to, and keep what they were shown. They run in the process that asks.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestration.core.errors import Misconfigured, ModelError
from orchestration.core.model import Delta, Message, ModelFault, ModelReply, RequestedCall, Sink, ToolDefinition, Usage
from orchestration.models.metering import noted

#: A tool call in a script: a `RequestedCall`, `(name, arguments)`, or `{"name", "arguments", "id"}`. Arguments that are text
#: go out as they are, broken or not; an object goes out as its JSON.
ScriptedCall = RequestedCall | tuple[str, Any] | Mapping[str, Any]


class ScriptEnded(AssertionError):
    """A script was asked for more steps than it has."""

    #: Its text may be shown: it holds nothing of the conversation.
    shows_no_content = True


#: The tokens of a step that names none: those of a small answer, so that what counts tokens has some to count.
SMALL = Usage(7, 3)


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of a script.

    Args:
        text: what it says.
        tool_calls: what it asks for.
        thinking: shown before the text.
        error: raised after the pieces were shown: an exception, or a kind of `ModelFault` (retryable where such a fault
            usually is).
        chunks: the pieces in which the text is shown, or how many; together they are the text where `text` is empty.
        delay_s: seconds before anything is shown.
        release: nothing is shown before it is set, so that a test can hold an answer back.
        usage: the tokens that it counts, 7 in and 3 out unless given.
        finish_reason: `tool_calls` or `stop` by what there is, unless given.
    """

    text: str = ""
    tool_calls: Sequence[ScriptedCall] = ()
    thinking: str = ""
    error: BaseException | ModelFault | str | None = None
    chunks: Sequence[str] | int = 1
    delay_s: float = 0.0
    release: threading.Event | None = None
    usage: Usage = SMALL
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """What a model was shown: messages and tools as JSON text, since the lists themselves go on changing."""

    messages_json: str
    tools_json: str

    @property
    def messages(self) -> list[Message]:
        """The messages as they were then."""
        found: list[Message] = json.loads(self.messages_json)
        return found

    @property
    def tools(self) -> list[ToolDefinition]:
        """The tools as they were then."""
        found: list[ToolDefinition] = json.loads(self.tools_json)
        return found

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools."""
        return [tool["function"]["name"] for tool in self.tools]


#: What may stand for a step: its text, its error, its calls alone, or a whole reply.
StepLike = Step | str | BaseException | ModelReply | RequestedCall | Sequence[ScriptedCall]


class _Played:
    """What both models have in common: they remember the last requests, and play a step."""

    def __init__(self, model: str, requests_kept: int) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._requests: deque[ShownRequest] = deque(maxlen=requests_kept)
        self._asked = 0

    @property
    def requests(self) -> list[ShownRequest]:
        """What it was shown, oldest first; the oldest go when there are too many."""
        with self._lock:
            return list(self._requests)

    @property
    def asked(self) -> int:
        """How often it was asked."""
        with self._lock:
            return self._asked

    def _remember(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] | None) -> int:
        request = ShownRequest(json.dumps(list(messages), default=str), json.dumps(list(tools or ()), default=str))
        with self._lock:
            self._requests.append(request)
            self._asked += 1
            return self._asked - 1

    def _play(self, step: Step, sink: Sink | None) -> ModelReply:
        if step.delay_s > 0:
            threading.Event().wait(step.delay_s)
        if step.release is not None:
            step.release.wait()
        pieces = _pieces(step)
        if sink is not None:
            if step.thinking:
                sink(Delta(thinking=step.thinking))
            for piece in pieces:
                sink(Delta(text=piece))
        if step.error is not None:
            raise _exception(self.model, step.error)
        calls = tuple(_call(call) for call in step.tool_calls)
        reply = ModelReply(
            content="".join(pieces),
            tool_calls=calls,
            thinking=step.thinking,
            finish_reason=step.finish_reason or ("tool_calls" if calls else "stop"),
            usage=step.usage,
            model=self.model,
        )
        return noted(reply)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"


class ScriptedModel(_Played):
    """Plays `steps`, one a call, in order. Thread-safe: two calls at once get two steps.

    Args:
        steps: each a `Step` or what stands for one: text, an exception, a list of calls, a `ModelReply`.
        model: its name, which its errors carry.
        repeat_last: whether the last step is played for ever, instead of the script ending.
        by_messages: whether a call's step is told by the number of assistant messages that it is shown, not by the number
            of calls so far: a step tried again, in this process or another, then plays the same.
        requests_kept: how many requests are remembered.

    Raises:
        Misconfigured: a step that is none.
    """

    def __init__(
        self,
        steps: Sequence[StepLike],
        *,
        model: str = "scripted",
        repeat_last: bool = False,
        by_messages: bool = False,
        requests_kept: int = 1_000,
    ) -> None:
        super().__init__(model, requests_kept)
        if isinstance(steps, (str, Step)):
            raise Misconfigured(f"ScriptedModel({model!r}): steps is a list of steps")
        self._steps = tuple(as_step(step) for step in steps)
        self._repeat_last = repeat_last
        self._by_messages = by_messages

    @property
    def remaining(self) -> int:
        """How many steps were not played yet."""
        return max(0, len(self._steps) - self.asked)

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
    ) -> ModelReply:
        """Play the next step.

        Raises:
            ScriptEnded: there is none; names the model and how many there were.
        """
        position = self._remember(messages, tools)
        if self._by_messages:
            position = sum(message.get("role") == "assistant" for message in messages)
        if position >= len(self._steps):
            if not (self._repeat_last and self._steps):
                raise ScriptEnded(f"ScriptedModel({self.model!r}): asked for step {position + 1}, but its script has {len(self._steps)}")
            position = -1
        return self._play(self._steps[position], sink)


class FunctionModel(_Played):
    """Answers with what `function` makes of the messages: text, calls, a `Step`, a `ModelReply`, or an exception to raise.

    Args:
        function: takes the messages, or the messages and the tools; sync. What it raises is raised.
        model: its name.
        requests_kept: how many requests are remembered.
    """

    def __init__(self, function: Callable[..., StepLike], *, model: str = "function", requests_kept: int = 1_000) -> None:
        super().__init__(model, requests_kept)
        self._function = function
        self._takes_tools = _takes_two(function)

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
    ) -> ModelReply:
        """Ask the function."""
        self._remember(messages, tools)
        shown = list(messages)
        found = self._function(shown, list(tools or ())) if self._takes_tools else self._function(shown)
        return self._play(as_step(found), sink)


def as_step(found: StepLike) -> Step:
    """What `found` stands for.

    Raises:
        Misconfigured: nothing that can be played.
    """
    match found:
        case Step():
            return found
        case str():
            return Step(found)
        case BaseException():
            return Step(error=found)
        case RequestedCall():
            return Step(tool_calls=(found,))
        case ModelReply():
            return Step(
                text=found.content,
                tool_calls=found.tool_calls,
                thinking=found.thinking,
                usage=found.usage,
                finish_reason=found.finish_reason,
            )
        case list() | tuple() if found:
            # A pair of name and arguments is one call, not two.
            calls = (found,) if isinstance(found, tuple) and isinstance(found[0], str) else tuple(found)
            return Step(tool_calls=tuple(_call(call) for call in calls))
        case _:
            raise Misconfigured(f"a {type(found).__name__} is no step of a model")


def _pieces(step: Step) -> list[str]:
    if not isinstance(step.chunks, int):
        pieces = [piece for piece in step.chunks if piece]
        if step.text and "".join(pieces) != step.text:
            raise Misconfigured("Step: the chunks do not make the text")
        return pieces
    size = max(1, -(-len(step.text) // max(1, step.chunks)))
    return [step.text[start : start + size] for start in range(0, len(step.text), size)]


def _call(call: ScriptedCall) -> RequestedCall:
    if isinstance(call, RequestedCall):
        return call
    if isinstance(call, Mapping) and isinstance(call.get("name"), str):
        return RequestedCall(call["name"], _arguments(call.get("arguments")), str(call.get("id") or ""))
    if isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], str):
        return RequestedCall(call[0], _arguments(call[1]))
    raise Misconfigured(f"a {type(call).__name__} is no tool call; use (name, arguments)")


def _arguments(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _exception(model: str, error: BaseException | ModelFault | str) -> BaseException:
    if isinstance(error, BaseException):
        return error
    kind = ModelFault(error)
    passing = (ModelFault.UNAVAILABLE, ModelFault.RATE_LIMITED, ModelFault.PROTOCOL, ModelFault.TRUNCATED)
    return ModelError(kind, f"model {model!r}: {kind} (scripted)", retryable=kind in passing)


def _takes_two(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) >= 2 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
