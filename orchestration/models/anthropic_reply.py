"""An answer of the Messages API, streamed or whole, as a `ModelReply`. Pure: it takes bytes and gives values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestration.core.model import ModelReply, RequestedCall, Sink, Usage
from orchestration.models.answer_pieces import opened, until_settled
from orchestration.models.call_pieces import MAX_CALLS
from orchestration.models.error_text import Shown
from orchestration.models.faults import fault_in_stream, truncated, unreadable
from orchestration.models.finish import count, finish_reason
from orchestration.models.sse import EventReader, ServerEvent
from orchestration.models.text_pieces import Collector, sound


@dataclass(slots=True)
class _Block:
    index: int
    start: dict[str, Any]
    text: list[str] = field(default_factory=list)
    signature: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.start.get("type"))

    @property
    def joined(self) -> str:
        return sound("".join(self.text))


class AnthropicReply:
    """One answer as it comes in.

    Args:
        who: the model and its server, as errors name them.
        sink: receives the pieces of text and thinking.
        shown: decides what of the server's error text may be repeated.
    """

    def __init__(self, who: str, sink: Sink | None, shown: Shown) -> None:
        self._who = who
        self._shown = shown
        self._said = Collector(sink)
        self._blocks: list[_Block] = []
        self._by_index: dict[int, _Block] = {}
        self._call_count = 0
        self._counts: dict[str, Any] = {}
        self._model = ""
        self._label = ""
        self._seen = False

    def read(self, pieces: Iterable[bytes]) -> ModelReply:
        """The whole reply out of the answer's bytes, events or one document.

        Raises:
            ModelError: the server reports an error in its answer (by what it says), the answer ends early
                (`truncated`) or cannot be understood (`protocol`).
        """
        first, rest = opened(pieces)
        if not first:
            raise truncated(self._who)
        if first == b"{":
            self._document(b"".join(rest))
        elif first in b"<[":
            raise unreadable(self._who, "the answer is no message")
        else:
            self._stream(rest)
        return self._reply()

    def _stream(self, pieces: Iterator[bytes]) -> None:
        reader = EventReader()
        for piece in until_settled(pieces, lambda: bool(self._label)):
            for event in reader.feed(piece):
                if self._event(event):
                    return
        for event in reader.finish():
            if self._event(event):
                return
        if not self._label:
            raise truncated(self._who)

    def _event(self, event: ServerEvent) -> bool:
        """Take one event; whether it was the last."""
        if event.data.strip() == "[DONE]":
            return True  # some servers close this API's answers as they close others
        try:
            found = json.loads(event.data)
        except (ValueError, RecursionError):
            if event.name == "error":
                raise fault_in_stream(self._who, event.data, self._shown) from None
            if not event.whole:
                return False
            raise unreadable(self._who, "an event of the answer is not JSON") from None
        if not isinstance(found, dict):
            raise unreadable(self._who, "an event of the answer is not an object")
        match found.get("type") or event.name:
            case "error":
                raise fault_in_stream(self._who, found.get("error") or found, self._shown)
            case "message_start":
                self._message(found.get("message"))
            case "content_block_start":
                self._open(_index(found), found.get("content_block"))
            case "content_block_delta":
                self._delta(_index(found), found.get("delta"))
            case "message_delta":
                self._end(found.get("delta"))
                self._count(found.get("usage"))
            case "message_stop":
                return True
            case _:
                pass  # pings, and kinds that come later: the API says to pass them over
        return False

    def _document(self, body: bytes) -> None:
        try:
            found = json.loads(body.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise unreadable(self._who, "the answer is not JSON") from None
        if found.get("type") == "error" or found.get("error"):
            raise fault_in_stream(self._who, found.get("error") or found, self._shown)
        content = found.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise unreadable(self._who, "the answer holds no message")
        self._message(found)
        for index, block in enumerate(content):
            self._open(index, block)
        self._end(found)
        self._label = self._label or "end_turn"

    def _message(self, message: Any) -> None:
        if isinstance(message, dict):
            self._seen = True
            self._model = str(message.get("model") or "")
            self._count(message.get("usage"))

    def _count(self, found: Any) -> None:
        # Later counts include earlier ones; fields that a later event leaves out, or sets back, stand.
        if isinstance(found, dict):
            self._counts.update({name: value for name, value in found.items() if count(value) >= count(self._counts.get(name))})

    def _end(self, found: Any) -> None:
        label = found.get("stop_reason") if isinstance(found, dict) else None
        if isinstance(label, str) and label:
            self._label = label

    def _open(self, index: int, start: Any) -> None:
        if not isinstance(start, dict):
            raise unreadable(self._who, "a block of the answer is not an object")
        block = self._by_index[index] = _Block(index, start)  # a second one of an index is one of its own
        self._blocks.append(block)
        self._call_count += block.kind == "tool_use"
        if self._call_count > MAX_CALLS:
            raise unreadable(self._who, f"the model asked for more than {MAX_CALLS} tools at once")
        if block.kind == "text":
            self._said.add(text=_text(start.get("text")))
        elif block.kind == "thinking":
            block.text.append(_text(start.get("thinking")))
            block.signature.append(_text(start.get("signature")))
            self._said.add(thinking=_text(start.get("thinking")))

    def _delta(self, index: int, delta: Any) -> None:
        block = self._by_index.get(index)
        if block is None or not isinstance(delta, dict):
            raise unreadable(self._who, "a piece of the answer belongs to no block")
        match delta.get("type"):
            case "text_delta":
                self._said.add(text=_text(delta.get("text")))
            case "thinking_delta":
                block.text.append(_text(delta.get("thinking")))
                self._said.add(thinking=_text(delta.get("thinking")))
            case "signature_delta":
                block.signature.append(_text(delta.get("signature")))
            case "input_json_delta":
                given = delta.get("partial_json")
                block.text.append(json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else _text(given))

    def _reply(self) -> ModelReply:
        if not self._seen:
            raise unreadable(self._who, "the answer holds no message")
        self._said.finish()
        blocks = sorted(self._blocks, key=lambda block: block.index)
        calls = tuple(self._call(block) for block in blocks if block.kind == "tool_use")
        if not calls and self._said.empty and self._label == "tool_use":
            raise unreadable(self._who, "the answer says that it asks for tools, but names none")
        signed = [thinking for block in blocks if (thinking := _signed(block)) is not None]
        return ModelReply(
            content=self._said.text,
            tool_calls=calls,
            thinking=self._said.thinking,
            finish_reason=finish_reason(self._who, self._label, calls=bool(calls)),
            usage=self._usage(),
            model=sound(self._model[:200]),
            thinking_blocks=sound(json.dumps(signed, ensure_ascii=False)) if signed else "",
        )

    def _call(self, block: _Block) -> RequestedCall:
        name = block.start.get("name")
        if not isinstance(name, str) or not name:
            raise unreadable(self._who, "the model asked for a tool without naming it")
        arguments = block.joined
        if not arguments and block.start.get("input"):
            given = block.start["input"]
            arguments = sound(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        return RequestedCall(name=sound(name), arguments=arguments, id=sound(_text(block.start.get("id"))))

    def _usage(self) -> Usage:
        cached = count(self._counts.get("cache_read_input_tokens"))
        written = count(self._counts.get("cache_creation_input_tokens"))
        # This API counts cached tokens beside the input, where `Usage` counts them as a part of it.
        return Usage(
            input_tokens=count(self._counts.get("input_tokens")) + cached + written,
            output_tokens=count(self._counts.get("output_tokens")),
            cached_tokens=cached,
        )


def _signed(block: _Block) -> dict[str, Any] | None:
    if block.kind == "redacted_thinking":
        return {"type": "redacted_thinking", "data": _text(block.start.get("data"))}
    signature = "".join(block.signature)
    if block.kind == "thinking" and signature:
        return {"type": "thinking", "thinking": block.joined, "signature": signature}
    return None


def _index(found: dict[str, Any]) -> int:
    index = found.get("index")
    if isinstance(index, str) and len(index) < 10 and index.strip().isdecimal():
        return int(index)
    return index if isinstance(index, int) else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
