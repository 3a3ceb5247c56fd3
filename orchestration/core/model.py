"""What Turnmill needs of a language model, as plain values and one protocol.

Messages are dicts in the form of the chat-completions wire (`role`, `content`, `tool_calls`, `tool_call_id`), whatever
provider answers; an adapter in `orchestration/models/` translates. Nothing here talks to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
ToolDefinition = dict[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`"""


class ModelFault(StrEnum):
    """Why a model did not answer."""

    UNAVAILABLE = "unavailable"  #: the server or the way to it failed; may be tried again
    RATE_LIMITED = "rate_limited"  #: too many requests; may be tried again after a pause
    QUOTA = "quota"  #: the account is used up; trying again does not help
    CONTEXT_OVERFLOW = "context_overflow"  #: the messages are too long for the model
    CONTENT_FILTERED = "content_filtered"  #: the provider refused the content
    BAD_REQUEST = "bad_request"  #: the provider refused the request as such
    AUTH = "auth"  #: the key is wrong or may not use this model
    PROTOCOL = "protocol"  #: the answer could not be read; may be tried again
    TRUNCATED = "truncated"  #: the answer ended before its end; may be tried again


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one model call, as its provider counts them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """One tool call as the model asked for it. `arguments` is the model's own JSON text; it may be broken."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One whole answer of a model. Calls present means that tools are asked for, whatever `finish_reason` says.

    `thinking_blocks` is the thinking in a provider's own signed form, as JSON text to be handed back unchanged under the
    same name in the assistant message; empty where the provider has none.
    """

    content: str = ""
    tool_calls: tuple[RequestedCall, ...] = ()
    thinking: str = ""
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    thinking_blocks: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer on its way: visible text, thinking, or both."""

    text: str = ""
    thinking: str = ""


Sink = Callable[[Delta], None]
"""Receives the pieces as they come. It may raise to stop the answer; the adapter then closes its connection and lets
the exception through."""


@runtime_checkable
class Model(Protocol):
    """Anything that can complete a conversation; `complete` may be sync or async.

    An implementation that also takes `sink: Sink | None = None` streams its pieces through it. Failures are raised as
    `ModelError`; any other exception counts as one that is not worth trying again.
    """

    def complete(self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None) -> Any: ...
