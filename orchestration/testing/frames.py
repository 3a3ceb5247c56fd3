"""Asserts on frames and on requests to a model, for tests of agents. A failure shows what was there, one line a frame."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from orchestration.core.frames import FrameKind

Frame = dict[str, Any]

#: Kinds that come in any number and place; left out where only the course of a turn matters.
NOISE = frozenset({FrameKind.TOKEN, FrameKind.THINKING, FrameKind.TURN})


def kinds(frames: Iterable[Frame], *, without: Iterable[str] = NOISE) -> list[str]:
    """The kinds of `frames` in their order, except those in `without`."""
    left_out = set(without)
    return [str(one["kind"]) for one in frames if one["kind"] not in left_out]


def assert_kinds(frames: Sequence[Frame], *wanted: str) -> None:
    """Assert that frames of these kinds came in this order; others may lie between them."""
    rest = iter(frames)
    for place, kind in enumerate(wanted):
        if not any(one["kind"] == kind for one in rest):
            raise AssertionError(f"no {kind!r} frame as number {place + 1} of {list(wanted)}\n{picture(frames)}")


def only(frames: Sequence[Frame], kind: str, **fields: Any) -> Frame:
    """The one frame of `kind` with these fields; an assertion fails when there is none or more than one."""
    found = [one for one in frames if one["kind"] == kind and all(one.get(name) == value for name, value in fields.items())]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} frames of kind {kind!r} with {fields}, wanted one\n{picture(frames)}")
    return found[0]


def text_of(frames: Iterable[Frame], round_: int | None = None) -> str:
    """What a watcher has read: the tokens, without those that a `retry` frame made void; of one round, if `round_` is given."""
    read: dict[int, list[str]] = {}
    for one in frames:
        if one["kind"] == FrameKind.TOKEN:
            read.setdefault(one["round"], []).append(one["text"])
        elif one["kind"] == FrameKind.RETRY:
            read.pop(one["round"], None)
    return "".join("".join(pieces) for number, pieces in sorted(read.items()) if round_ in (None, number))


def assert_whole(frames: Sequence[Frame]) -> None:
    """Assert what holds of all frames of an ended turn: numbers that grow, one `done` at the end, a result for each call, a decision
    for each approval."""
    numbers = [one["seq"] for one in frames]
    assert numbers == sorted(set(numbers)), f"the numbers do not grow\n{picture(frames)}"
    assert frames and frames[-1]["kind"] == FrameKind.DONE, f"the last frame is not done\n{picture(frames)}"
    assert [one["kind"] for one in frames].count(FrameKind.DONE) == 1, f"more than one done\n{picture(frames)}"
    for asked, answered, by in (
        (FrameKind.TOOL_CALL, FrameKind.TOOL_RESULT, "tool_call_id"),
        (FrameKind.APPROVAL_REQUEST, FrameKind.APPROVAL_DECISION, "approval_id"),
    ):
        open_ones = [one[by] for one in frames if one["kind"] == asked]
        ended = [one[by] for one in frames if one["kind"] == answered]
        assert sorted(open_ones) == sorted(ended), f"each {asked} has one {answered}\n{picture(frames)}"


def assert_paired(messages: Sequence[dict[str, Any]]) -> None:
    """Assert that a provider would take these messages: each call is followed by its result, and its arguments are JSON text."""
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            assert message["tool_call_id"] in waiting, f"message {place} is a result without its call"
            assert isinstance(message["content"], str), f"the content of message {place} is no text"
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, f"before message {place}, calls without results: {waiting}"
        calls = message.get("tool_calls") or []
        waiting = [call["id"] for call in calls]
        for call in calls:
            assert isinstance(json.loads(call["function"]["arguments"]), dict), f"arguments in message {place} are no object"
    assert not waiting, f"calls without results at the end: {waiting}"


def picture(frames: Iterable[Frame]) -> str:
    """The frames, one a line, cut to what tells them apart."""
    lines = []
    for one in frames:
        about = {name: value for name, value in one.items() if name not in ("kind", "seq", "ts", "turn_id")}
        lines.append(f"  {one['kind']:<18}{json.dumps(about, ensure_ascii=False, default=str)[:150]}")
    return "\n".join(lines) or "  (no frames)"
