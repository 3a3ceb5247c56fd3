"""Models behind Anthropic's Messages API, over plain HTTP. Messages and tools come in chat form, as for every model here.

It puts request, exchange and reply together; each of these is a module of its own. It does not try again and does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.model import Message, ModelReply, Sink, ToolDefinition
from orchestration.models.anthropic_reply import AnthropicReply
from orchestration.models.anthropic_request import messages_payload
from orchestration.models.connection import Call, asked
from orchestration.models.endpoint import Endpoint
from orchestration.models.error_text import Shown
from orchestration.models.metering import noted
from orchestration.models.wire_json import body_of


class AnthropicModel:
    """A model of Anthropic, or of a server that speaks its API. One instance serves any number of threads, and survives a fork.

    Args:
        model: its name there.
        base_url: the URL before `/messages`.
        api_key_env: the environment variable with the key, read at each call; empty for none.
        api_key: the key itself, where it does not come from the environment.
        max_tokens: the longest answer, in tokens.
        stream: whether the answer comes in pieces.
        timeout_s: seconds for one whole call. It is looked at whenever something arrives, so a server that falls silent
            right before it may hold a call for `read_timeout_s` more.
        read_timeout_s: seconds of silence after which a call is given up; without `stream`, all of `timeout_s` may be one.
        extra_params: further fields of the request, such as `temperature` or `thinking`; None takes one away.
        extra_headers: further headers, such as `anthropic-beta`; never shown.
        send_thinking: whether signed thinking goes back beside the messages that it belongs to. The API wants that while
            tools are used with thinking on, and refuses another model's signatures.

    Raises:
        Misconfigured: no model name, a URL that is none, or a number that is not above 0.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "https://api.anthropic.com/v1",
        api_key_env: str = "ANTHROPIC_API_KEY",
        api_key: str | None = None,
        max_tokens: int = 8_192,
        stream: bool = True,
        timeout_s: float = 600.0,
        read_timeout_s: float = 120.0,
        extra_params: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        send_thinking: bool = True,
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise Misconfigured(f"AnthropicModel({model!r}): max_tokens is a whole number above 0")
        self._endpoint = Endpoint(
            "AnthropicModel",
            model,
            base_url,
            "/messages",
            api_key=api_key,
            api_key_env=api_key_env,
            key_optional=False,
            timeout_s=timeout_s,
            read_timeout_s=read_timeout_s if stream else timeout_s,
            extra_headers=extra_headers,
        )
        self.model = self._endpoint.model
        self._max_tokens = max_tokens
        self._stream = stream
        self._extra_params = dict(extra_params or {})
        self._send_thinking = send_thinking

    def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolDefinition] | None = None, sink: Sink | None = None
    ) -> ModelReply:
        """Ask the model once; `sink` receives the pieces as they come.

        What `sink` raises closes the connection and passes through.

        Raises:
            ModelError: by kind, see `ModelFault`; `retry_after_s` when the server asked for a pause.
        """
        endpoint = self._endpoint
        key = endpoint.key()
        payload = messages_payload(
            self.model,
            messages,
            tools,
            max_tokens=self._max_tokens,
            stream=self._stream,
            send_thinking=self._send_thinking,
            extra=self._extra_params,
        )
        shown = Shown([payload.get("system"), payload.get("messages"), payload.get("tools")], key)
        call = Call(
            who=endpoint.who,
            url=endpoint.url,
            headers=endpoint.headers({"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})),
            body=body_of(endpoint.who, payload),
            timeout_s=endpoint.timeout_s,
            read_timeout_s=endpoint.read_timeout_s,
            shown=shown,
        )
        reply = AnthropicReply(endpoint.who, sink, shown)
        with asked(call) as pieces:
            return noted(reply.read(pieces))

    def __repr__(self) -> str:
        return repr(self._endpoint)
