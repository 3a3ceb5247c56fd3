"""Models behind an OpenAI-compatible `/chat/completions`: OpenAI, Azure, vLLM, Ollama, LM Studio, Gemini's and many more.

It puts request, exchange and reply together; each of these is a module of its own. It does not try again and does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestration.core.model import Message, ModelReply, Sink, ToolDefinition
from orchestration.models.chat_reply import ChatReply
from orchestration.models.chat_request import chat_payload
from orchestration.models.connection import Call, asked
from orchestration.models.endpoint import Endpoint, offered_names, thinking_field
from orchestration.models.error_text import Shown
from orchestration.models.metering import noted
from orchestration.models.wire_json import body_of

_OPENAI = "https://api.openai.com/v1"
_OPENAI_KEY = "OPENAI_API_KEY"


class OpenAIChatModel:
    """A model of an OpenAI-compatible server. One instance serves any number of threads, and survives a fork.

    Args:
        model: its name there.
        base_url: the URL before `/chat/completions`; a query in it stays.
        api_key_env: the environment variable with the key, read at each call; empty for none. A server other than
            OpenAI's is asked without a key when `OPENAI_API_KEY` is left as the name and not set.
        api_key: the key itself, where it does not come from the environment.
        stream: whether the answer comes in pieces; a server that answers whole all the same is understood.
        timeout_s: seconds for one whole call. It is looked at whenever something arrives, so a server that falls silent
            right before it may hold a call for `read_timeout_s` more.
        read_timeout_s: seconds of silence after which a call is given up; without `stream`, all of `timeout_s` may be one.
        extra_params: further fields of the request, such as `temperature`; None takes one away.
        extra_headers: further headers; never shown.
        send_thinking: whether assistant messages carry their thinking back, as some providers demand and others refuse:
            True for `reasoning_content`, or the name of the field.
        think_tags: whether an answer that opens with `<think>…</think>` has its thinking there.

    Raises:
        Misconfigured: no model name, a URL that is none, or a time that is not above 0.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = _OPENAI,
        api_key_env: str = _OPENAI_KEY,
        api_key: str | None = None,
        stream: bool = True,
        timeout_s: float = 600.0,
        read_timeout_s: float = 120.0,
        extra_params: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        send_thinking: bool | str = False,
        think_tags: bool = True,
    ) -> None:
        self._endpoint = Endpoint(
            "OpenAIChatModel",
            model,
            base_url,
            "/chat/completions",
            api_key=api_key,
            api_key_env=api_key_env,
            key_optional=api_key_env == _OPENAI_KEY and base_url.rstrip("/") != _OPENAI,
            timeout_s=timeout_s,
            read_timeout_s=read_timeout_s if stream else timeout_s,
            extra_headers=extra_headers,
        )
        self.model = self._endpoint.model
        self._stream = stream
        self._extra_params = dict(extra_params or {})
        self._thinking_field = thinking_field(send_thinking)
        self._think_tags = think_tags

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
        payload = chat_payload(
            self.model, messages, tools, stream=self._stream, thinking_field=self._thinking_field, extra=self._extra_params
        )
        shown = Shown([payload.get("messages"), payload.get("tools")], key)
        call = Call(
            who=endpoint.who,
            url=endpoint.url,
            headers=endpoint.headers({"authorization": f"Bearer {key}"} if key else {}),
            body=body_of(endpoint.who, payload),
            timeout_s=endpoint.timeout_s,
            read_timeout_s=endpoint.read_timeout_s,
            shown=shown,
        )
        reply = ChatReply(endpoint.who, offered_names(tools), sink, shown, think_tags=self._think_tags)
        with asked(call) as pieces:
            return noted(reply.read(pieces))

    def __repr__(self) -> str:
        return repr(self._endpoint)
