"""A chat-completions answer, streamed or whole, as a `ModelReply`. Pure: it takes bytes and gives values.

Compatible servers differ in everything that the format leaves open; each allowance here is for one that was seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelReply, Sink, Usage
from orchestration.models.answer_pieces import opened, until_settled
from orchestration.models.call_pieces import CallPieces
from orchestration.models.error_text import Shown
from orchestration.models.faults import fault_in_stream, truncated, unreadable
from orchestration.models.finish import chat_usage, finish_reason
from orchestration.models.sse import EventReader, ServerEvent
from orchestration.models.text_pieces import Collector, sound

#: Where a server that answers with something else says why.
_WORDS = ("message", "msg", "detail", "error_message")

_THINKING = ("reasoning_content", "reasoning", "reasoning_text", "thinking")


class ChatReply:
    """One answer as it comes in.

    Args:
        who: the model and its server, as errors name them.
        offered: names of the tools that the request offered.
        sink: receives the pieces of text and thinking.
        shown: decides what of the server's error text may be repeated.
        think_tags: whether an answer that opens with `<think>` has its thinking there.
    """

    def __init__(self, who: str, offered: Sequence[str], sink: Sink | None, shown: Shown, *, think_tags: bool = True) -> None:
        self._who = who
        self._shown = shown
        self._said = Collector(sink, think_tags=think_tags)
        self._calls = CallPieces(offered)
        self._usage = Usage()
        self._model = ""
        self._label = ""
        self._refused = False
        self._seen = False
        self._odd: dict[str, Any] | None = None  # the first document that holds no completion

    def read(self, pieces: Iterable[bytes]) -> ModelReply:
        """The whole reply out of the answer's bytes, whichever way it was sent: the first character tells events from a document.

        Raises:
            ModelError: the server reports an error in its answer (by what it says), the answer ends early
                (`truncated`) or cannot be understood (`protocol`).
        """
        first, rest = opened(pieces)
        if not first:
            raise truncated(self._who)
        if first in b"{[":
            self._document(b"".join(rest))
        elif first == b"<":
            raise unreadable(self._who, "the answer is a page, not a completion")
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
            raise self._nothing() or truncated(self._who)

    def _event(self, event: ServerEvent) -> bool:
        """Take one event; whether it was the last."""
        if _is_done(event.data):
            return True
        for text in self._texts(event):
            if _is_done(text):
                return True
            if event.name == "error":
                raise fault_in_stream(self._who, _error(text), self._shown)
            self._chunk(self._parsed(text, whole=event.whole))
        return False

    def _texts(self, event: ServerEvent) -> Sequence[str]:
        """An event's documents: one, or one a line where a server forgets the blank lines between its events."""
        if len(event.lines) > 1:
            try:
                json.loads(event.data)
            except (ValueError, RecursionError):
                return [line for line in event.lines if line.strip()]
        return [event.data]

    def _parsed(self, text: str, *, whole: bool) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            if not whole and not self._label:
                raise truncated(self._who) from None
            if not whole:
                return {}
            raise unreadable(self._who, "an event of the answer is not JSON") from None

    def _document(self, body: bytes) -> None:
        text = body.decode("utf-8", "replace")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = self._lines(text)
        documents = found if isinstance(found, list) else [found]
        for document in documents:
            self._chunk(document)
        if not self._label and len(documents) > 1:
            raise truncated(self._who)
        if not self._label:
            self._label = "stop"

    def _lines(self, text: str) -> list[Any]:
        """The documents of an answer that has one on each line."""
        try:
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        except (ValueError, RecursionError):
            raise unreadable(self._who, "the answer is not JSON") from None

    def _chunk(self, chunk: Any) -> None:
        if not isinstance(chunk, dict):
            raise unreadable(self._who, "a part of the answer is not an object")
        if chunk.get("error"):
            raise fault_in_stream(self._who, chunk["error"], self._shown)
        if chunk.get("object") == "error" or (chunk.get("type") == "error" and "choices" not in chunk):
            raise fault_in_stream(self._who, chunk, self._shown)
        if isinstance(chunk.get("model"), str) and chunk["model"]:
            self._model = chunk["model"]
        self._count(chunk.get("usage"))
        if isinstance(chunk.get("x_groq"), dict):
            self._count(chunk["x_groq"].get("usage"))
        choices = chunk.get("choices")
        if "choices" not in chunk and self._odd is None:
            self._odd = chunk
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index") in (0, None, "0"):
                self._choice(choice)

    def _count(self, found: Any) -> None:
        usage = chat_usage(found)
        if usage is not None and usage != Usage():
            self._usage = usage

    def _choice(self, choice: dict[str, Any]) -> None:
        self._seen = True
        self._count(choice.get("usage"))
        if isinstance(choice.get("error"), (dict, str)) and choice["error"]:
            raise fault_in_stream(self._who, choice["error"], self._shown)
        said = choice.get("delta")
        if not isinstance(said, dict):
            # Some servers close the stream with the whole message once more.
            whole = choice.get("message")
            said = whole if isinstance(whole, dict) and self._said.empty and not self._calls else {"content": choice.get("text")}
        thinking = next((said[key] for key in _THINKING if said.get(key)), None)
        text, thought = _content(said.get("content"))
        if isinstance(said.get("refusal"), str) and said["refusal"]:
            self._refused = True
            text += said["refusal"]
        self._said.add(text, _content(thinking)[0] + thought)
        if said.get("tool_calls"):
            self._calls.add(said["tool_calls"])
        elif isinstance(said.get("function_call"), dict):
            self._calls.add([{"index": 0, "function": said["function_call"]}])
        label = choice.get("finish_reason")
        if isinstance(label, str) and label.strip():
            self._label = label

    def _nothing(self) -> ModelError | None:
        """The error that an answer stands for which holds no completion, but words."""
        if self._seen or self._odd is None:
            return None
        told = any(isinstance(self._odd.get(key), str) and self._odd[key] for key in _WORDS)
        return fault_in_stream(self._who, self._odd, self._shown) if told else None

    def _reply(self) -> ModelReply:
        if not self._seen:
            raise self._nothing() or unreadable(self._who, "the answer holds no completion")
        self._said.finish()
        calls = self._calls.finish()
        finish = finish_reason(self._who, self._label, calls=bool(calls))
        if self._refused and not calls:
            finish = "content_filter"
        if not calls and self._said.empty and self._label.strip().lower() in ("tool_calls", "function_call"):
            raise unreadable(self._who, "the answer says that it asks for tools, but names none")
        return ModelReply(
            content=self._said.text,
            tool_calls=calls,
            thinking=self._said.thinking,
            finish_reason=finish,
            usage=self._usage,
            model=sound(self._model[:200]),
        )


def _is_done(text: str) -> bool:
    return text.strip().strip('"').upper() == "[DONE]"


def _error(text: str) -> Any:
    """What an `error` event carries: an object of any shape, or plain words."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found["error"] if isinstance(found, dict) and found.get("error") else found


def _content(value: Any) -> tuple[str, str]:
    """(text, thinking) of a content field: text, a list of parts, or nothing."""
    if isinstance(value, str):
        return value, ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value), ""  # a server that took the answer for a number
    if isinstance(value, dict):
        value = [value]
    text: list[str] = []
    thinking: list[str] = []
    for part in value if isinstance(value, list) else ():
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, dict):
            inner = part.get("thinking", part.get("reasoning"))
            if inner:
                thinking.append(_content(inner)[0])
            elif isinstance(part.get("text"), str):
                text.append(part["text"])
    return "".join(text), "".join(thinking)
