"""Frames: what a watcher of a turn sees, one JSON object per event. The number (`seq`) and time are given when a frame is stored."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class FrameKind(StrEnum):
    """What a frame tells."""

    TURN = "turn"  #: the turn's state changed
    TOKEN = "token"  #: a piece of the answer
    THINKING = "thinking"  #: a piece of the model's thinking
    RETRY = "retry"  #: the tokens of this step so far are void
    TOOL_CALL = "tool_call"  #: the model asked for a tool
    APPROVAL_REQUEST = "approval_request"  #: a human is asked
    APPROVAL_DECISION = "approval_decision"  #: a human, a deadline or a cancel answered
    TOOL_RESULT = "tool_result"  #: a tool call ended
    HANDOFF = "handoff"  #: another agent goes on
    COMPACTED = "compacted"  #: older history was shortened for the model
    MESSAGE = "message"  #: the answer
    ERROR = "error"  #: why the turn failed
    CHILD = "child"  #: a frame of the turn of an agent that this turn asked as a tool, in the field `frame`
    GAP = "gap"  #: frames that are no longer kept; never stored
    DONE = "done"  #: the turn has ended


def frame(kind: FrameKind, turn_id: str, round_: int | None = None, **fields: Any) -> str:
    """A frame as JSON text without `seq` and `ts`, which are added when it is stored."""
    body: dict[str, Any] = {"kind": str(kind), "turn_id": turn_id}
    if round_ is not None:
        body["round"] = round_
    body.update(fields)
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def time_of(seq: int) -> str:
    """When the frame of this number was stored, RFC 3339: a number is the store's time in microseconds, or one above the last."""
    return datetime.fromtimestamp(seq / 1_000_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def numbered(seq: int, body: str) -> str:
    """The whole frame, as watchers get it, from its number and its stored text."""
    return f'{{"seq":{seq},"ts":"{time_of(seq)}",{body[1:]}'


def gap(first: int, last: int, turn_id: str | None = None) -> str:
    """The frame that says: numbers `first` to `last` are gone. It has no number of its own."""
    body: dict[str, Any] = {"kind": str(FrameKind.GAP), "from": first, "to": last}
    if turn_id:
        body["turn_id"] = turn_id
    return json.dumps(body, separators=(",", ":"))
