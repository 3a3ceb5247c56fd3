"""A chat completion as OpenAI's clients ask for it, read as a submission: the last user message is the input, the rest the history.

What an agent decides for itself (its model's parameters) is left alone; what it could only pretend to do (run a client's tools) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.problems import validation_errors
from gateway.turns import Input
from orchestration.core.call import CallResult, CallState
from orchestration.core.conversation import NO_RESULT, Entry, input_entry, message_entry, round_entries
from orchestration.core.errors import Invalid
from orchestration.core.ids import ID_PATTERN, is_id


class StreamOptions(BaseModel):
    """What a stream has beside its pieces."""

    include_usage: bool | None = None


class ChatBody(BaseModel):
    """What `POST /v1/chat/completions` reads of OpenAI's request; other members are left alone."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    model: str = Field(min_length=1, max_length=200, description="the agent's name")
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=5000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="`conversation_id` names the conversation that is kept")
    n: Literal[1] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat completion as a submission. `history` is None where the conversation is kept, and then the log is what came before."""

    input: str | list[dict[str, Any]]
    brief: str
    conversation_id: str | None
    history: list[Entry] | None


#: Members that only somebody who runs the client's tools, or speaks, could heed; and the values under which they ask for nothing.
_REFUSED: dict[str, Sequence[Any]] = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "logprobs": (None, False),
    "web_search_options": (None,),
}

_INPUT: TypeAdapter[str | list[Any]] = TypeAdapter(Annotated[Input, Field()])


def asked(body: ChatBody, header: str | None) -> Asked:
    """What a request asks of its agent; `header` is the conversation in its headers.

    Raises:
        Invalid: it cannot be done, or does not fit; says where.
    """
    for name, harmless in _REFUSED.items():
        if (body.model_extra or {}).get(name) not in harmless:
            raise _invalid([name], "an agent has its own tools and its own form of answer; leave this out")
    conversation_id = (body.metadata or {}).get("conversation_id") or header or None
    if conversation_id is not None and not (isinstance(conversation_id, str) and is_id(conversation_id)):
        raise _invalid(["metadata", "conversation_id"], f"must match {ID_PATTERN}")
    places = [place for place, message in enumerate(body.messages) if message.get("role") == "user"]
    if not places:
        raise _invalid(["messages"], "there is no user message")
    last = places[-1]
    after = [message.get("role") for message in body.messages[last + 1 :]]
    if any(role not in _INSTRUCTING for role in after):
        raise _invalid(["messages", last + 1], "the last message is the user's, which the agent is to answer")
    brief = "\n\n".join(_text(message, place) for place, message in enumerate(body.messages) if message.get("role") in _INSTRUCTING)
    history = None if conversation_id else _history(body.messages[:last])
    return Asked(_input(body.messages[last], last), brief, conversation_id, history)


def digest(body: ChatBody, conversation_id: str | None) -> str:
    """What tells two requests with one idempotency key apart."""
    text = body.model_dump_json(exclude={"stream", "stream_options"}) + (conversation_id or "")
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


_INSTRUCTING = ("system", "developer")


def _history(messages: Sequence[Mapping[str, Any]]) -> list[Entry]:
    entries: list[Entry] = []
    results = {
        str(message.get("tool_call_id")): _text(message, place) for place, message in enumerate(messages) if message.get("role") == "tool"
    }
    for place, message in enumerate(messages):
        match message.get("role"):
            case "user":
                entries.append(input_entry("", _input(message, place)))
            case "assistant":
                entries.extend(_spoken(message, place, results))
            case "system" | "developer" | "tool":
                pass  # the brief, and the results of the calls before them
            case _:
                raise _invalid(["messages", place, "role"], "system, developer, user, assistant or tool")
    return entries


def _spoken(message: Mapping[str, Any], place: int, results: Mapping[str, str]) -> list[Entry]:
    text = _text(message, place)
    asked_for = message.get("tool_calls") or []
    if not asked_for:
        return [message_entry("", 0, text)] if text else []
    calls, ended = [], []
    for number, call in enumerate(asked_for if isinstance(asked_for, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str)
        ):
            raise _invalid(["messages", place, "tool_calls", number], "a function call with a name and arguments (text)")
        # Models repeat their ids; within the conversation each is to be one call's.
        calls.append((f"h{place}_{number}", function["name"], function.get("arguments", "")))
        ended.append(CallResult(CallState.COMPLETED, results.get(str(call.get("id")), NO_RESULT)))
    return round_entries("", 0, text, calls, ended)


def _input(message: Mapping[str, Any], place: int) -> str | list[dict[str, Any]]:
    try:
        read = _INPUT.validate_python(message.get("content"))
    except ValidationError as error:
        found = [
            {**one, "loc": ["body", "messages", place, "content", *one["loc"]]}
            for one in validation_errors(error.errors(include_input=False))
        ]
        raise Invalid("a user message is text, or parts of text and images", found) from None
    return read if isinstance(read, str) else [part.model_dump(exclude_none=True) for part in read]


def _text(message: Mapping[str, Any], place: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise _invalid(["messages", place, "content"], "text, or parts of text")


def _invalid(where: list[str | int], expected: str) -> Invalid:
    return Invalid(
        f"the request does not fit at: {'.'.join(str(part) for part in where)}: {expected}", [{"loc": ["body", *where], "msg": expected}]
    )
