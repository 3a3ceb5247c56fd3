"""Frames of a turn as OpenAI's clients read an answer: the pieces of a streamed completion, or one whole. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestration.core.frames import FrameKind
from orchestration.core.turn import StopReason

#: How a turn's stop reason is told. What is not here is an error.
FINISH = {
    StopReason.ANSWER: "stop",
    StopReason.EMPTY: "stop",
    StopReason.ROUND_LIMIT: "length",
    StopReason.BUDGET: "length",
    StopReason.DEADLINE: "length",
}

#: Frames that a client sees whole, beside the pieces of the answer.
_CARRIED = frozenset({FrameKind.APPROVAL_REQUEST, FrameKind.APPROVAL_DECISION, FrameKind.RETRY})


@dataclass(frozen=True, slots=True)
class Completion:
    """What all pieces of one completion have in common."""

    turn_id: str
    conversation_id: str
    agent: str
    created: int

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        """One piece of a stream."""
        choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
        return self._head("chat.completion.chunk") | {"choices": [choice], **more}

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last piece of a stream whose client wants to know what was used."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": as_usage(usage)}

    def whole(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """An ended turn as one completion."""
        message = {"role": "assistant", "content": turn["answer"] or "", "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_of(turn["stop_reason"])}
        about = {"turn_id": self.turn_id, "conversation_id": self.conversation_id, "stop_reason": turn["stop_reason"]}
        return self._head("chat.completion") | {"choices": [choice], "usage": as_usage(turn["usage"]), "turnmill": about}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.turn_id}", "object": kind, "created": self.created, "model": self.agent}


def finish_of(stop_reason: str | None) -> str:
    """Why a completion ended, in OpenAI's words; `stop` for what they have none for."""
    return FINISH.get(StopReason(stop_reason), "stop") if stop_reason else "stop"


def as_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by OpenAI's names."""
    asked, answered = int(usage.get("input_tokens", 0)), int(usage.get("output_tokens", 0))
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def failure(code: str, detail: str) -> dict[str, Any]:
    """The error object for a turn that ended without an answer."""
    return {"error": {"message": detail, "type": "server_error", "param": None, "code": code}}


def why_not(turn: Mapping[str, Any]) -> tuple[str, str]:
    """Code and text for an ended turn that has no answer."""
    error = turn["error"] or {}
    reason = turn["stop_reason"]
    return error.get("code", reason), error.get("detail", f"the turn ended without an answer ({reason})")


class Pieces:
    """Turns a turn's frames, in their order, into the pieces of a stream. `complete` says that it has ended."""

    def __init__(self, completion: Completion, *, with_usage: bool) -> None:
        self._completion = completion
        self._with_usage = with_usage
        self._text = StreamedText()
        self._error: dict[str, Any] | None = None
        self.complete = False

    def first(self) -> dict[str, Any]:
        """What a stream begins with."""
        about = {"turn_id": self._completion.turn_id, "conversation_id": self._completion.conversation_id}
        return self._completion.chunk({"role": "assistant", "content": ""}, turnmill=about)

    def of(self, frame: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The pieces that one frame gives."""
        kind = frame["kind"]
        text = ""
        if kind == FrameKind.TOKEN:
            text = self._text.add(frame.get("round", 0), frame["text"])
        elif kind == FrameKind.MESSAGE:
            text = self._text.end(frame.get("round", 0), frame["content"])
        elif kind == FrameKind.RETRY:
            self._text.begin_again()
        elif kind == FrameKind.ERROR:
            self._error = failure(frame["code"], frame["detail"])
        elif kind == FrameKind.DONE:
            return self._last(frame)
        if text:
            return [self._completion.chunk({"content": text})]
        if kind == FrameKind.THINKING:
            return [self._completion.chunk({"reasoning_content": frame["text"]})]
        return [self._completion.chunk({}, turnmill=dict(frame))] if kind in _CARRIED else []

    def at_end(self, turn: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rest of the pieces of an ended turn whose frames are gone."""
        text = self._text.end(turn["rounds"], turn["answer"] or "") if turn["answer"] else ""
        if turn["error"]:
            self._error = failure(*why_not(turn))
        last = self._last({"kind": str(FrameKind.DONE), "stop_reason": turn["stop_reason"], "usage": turn["usage"]})
        return [self._completion.chunk({"content": text}), *last] if text else last

    def _last(self, frame: Mapping[str, Any]) -> list[dict[str, Any]]:
        reason = frame["stop_reason"]
        self.complete = True
        if reason not in FINISH and not self._text.ended:
            return [self._error or failure(reason, f"the turn ended without an answer ({reason})")]
        last = [self._completion.chunk({}, finish_of(reason), turnmill=dict(frame))]
        return [*last, self._completion.usage_chunk(frame.get("usage", {}))] if self._with_usage else last


class StreamedText:
    """What a client was sent of a turn's text. It cannot be taken back: a step that is tried again goes on behind what is the same."""

    def __init__(self) -> None:
        self.ended = False
        self._round = 0
        self._sent = ""
        self._said = ""
        self._any = False

    def add(self, round_: int, piece: str) -> str:
        """What is to be sent for a piece of a round's text."""
        before = self._turn_to(round_)
        self._said += piece
        if self._sent.startswith(self._said):
            return before
        goes_on = self._said.startswith(self._sent)  # else it went another way this time
        more = self._said[len(self._sent) :] if goes_on else f"\n\n{self._said}"
        self._sent = self._said
        self._any = True
        return before + more

    def begin_again(self) -> None:
        """What was said in this round is void; it will be said again."""
        self._said = ""

    def end(self, round_: int, content: str) -> str:
        """What is to be sent once the whole answer is known."""
        self.ended = True
        before = self._turn_to(round_)
        rest = content[len(self._sent) :] if content.startswith(self._sent) else ""
        return before + rest if rest else ""

    def _turn_to(self, round_: int) -> str:
        """What stands between the text of one round and that of the next."""
        if round_ == self._round:
            return ""
        self._round, self._sent, self._said = round_, "", ""
        return "\n\n" if self._any else ""


def as_data(piece: Mapping[str, Any]) -> bytes:
    """A piece as one event of the stream; characters at which a client may end a line are escaped."""
    return b"data: " + json.dumps(piece, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
