"""The conversation's log and what a model is sent of it.

The log holds entries that never change; a round's tool calls are appended together with their results, so that it is well
paired at every instant. `messages` turns entries into the messages of one request and repairs what an older or foreign log
may hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from orchestration.core.call import CallResult
from orchestration.core.model import Message
from orchestration.core.safe_json import dumps

Entry = dict[str, Any]

#: What a model reads in place of a result that was never recorded.
NO_RESULT = dumps({"error": "no result was recorded for this call"})

#: What stands for an answer without any text.
NO_RESPONSE = "(no response)"


def input_entry(turn_id: str, content: str | list[dict[str, Any]]) -> Entry:
    """A user's input as a log entry; its time (`ms`) is added when it is stored."""
    return {"dir": "in", "turn_id": turn_id, "data": content}


def round_entries(
    turn_id: str,
    round_: int,
    text: str,
    calls: Sequence[tuple[str, str, str]],
    results: Sequence[CallResult],
    thinking: str = "",
    thinking_blocks: str = "",
) -> list[Entry]:
    """One round as log entries: what the model said and asked for (`calls` are id, name, arguments as JSON text),
    then each result in the order of the calls."""
    entries = [asked_entry(turn_id, round_, text, calls, thinking, thinking_blocks)]
    entries += [result_entry(turn_id, round_, id_, name, result) for (id_, name, _), result in zip(calls, results, strict=True)]
    return entries


def asked_entry(
    turn_id: str, round_: int, text: str, calls: Sequence[tuple[str, str, str]], thinking: str = "", thinking_blocks: str = ""
) -> Entry:
    """What the model said and asked for, as a log entry."""
    asked: dict[str, Any] = {
        "kind": "tool_calls",
        "content": text,
        "calls": [{"id": id_, "name": name, "arguments": arguments} for id_, name, arguments in calls],
    } | _thought(thinking, thinking_blocks)
    return {"dir": "out", "turn_id": turn_id, "round": round_, "data": asked}


def result_entry(turn_id: str, round_: int, id_: str, name: str, result: CallResult) -> Entry:
    """What came of one call, as a log entry."""
    data: dict[str, Any] = {"kind": "tool_result", "tool_call_id": id_, "name": name, "content": result.content, "error": result.error}
    if result.code:
        data["code"] = result.code
    if result.effect is not None:
        data["effect"] = result.effect
    return {"dir": "out", "turn_id": turn_id, "round": round_, "data": data}


def message_entry(turn_id: str, round_: int, text: str, thinking: str = "", thinking_blocks: str = "") -> Entry:
    """The model's answer as a log entry."""
    data = {"kind": "message", "content": text} | _thought(thinking, thinking_blocks)
    return {"dir": "out", "turn_id": turn_id, "round": round_, "data": data}


def _thought(thinking: str, thinking_blocks: str) -> dict[str, Any]:
    """What an entry keeps of the model's thinking: some providers refuse a conversation from which it is missing."""
    return {name: kept for name, kept in (("thinking", thinking), ("thinking_blocks", thinking_blocks)) if kept}


def messages(entries: Sequence[Entry], *, system: str = "", max_result_chars: int | None = None) -> list[Message]:
    """The messages of one request: the system prompt, then the log.

    Every call is followed by exactly one result, in order, whatever the log holds; a call's arguments are always the text of
    a JSON object. `max_result_chars` cuts each result in this copy only.
    """
    sent: list[Message] = [{"role": "system", "content": system}] if system else []
    results = {
        entry["data"]["tool_call_id"]: entry["data"]["content"]
        for entry in entries
        if entry["dir"] == "out" and entry["data"]["kind"] == "tool_result"
    }
    for entry in entries:
        data = entry["data"]
        if entry["dir"] == "in":
            sent.append({"role": "user", "content": data})
        elif data["kind"] == "message":
            sent.append(_spoken(data, data["content"]))
        elif data["kind"] == "tool_calls":
            calls = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": _object_text(call["arguments"])}}
                for call in data["calls"]
            ]
            sent.append(_spoken(data, data["content"] or None) | {"tool_calls": calls})
            for call in data["calls"]:
                content = cut(results.get(call["id"], NO_RESULT), max_result_chars)
                sent.append({"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": content})
    return sent


def _spoken(data: dict[str, Any], content: str | None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if data.get("thinking"):
        message["reasoning_content"] = data["thinking"]
    if data.get("thinking_blocks"):
        message["thinking_blocks"] = data["thinking_blocks"]
    return message


def _object_text(arguments: str) -> str:
    """`arguments` where it is the text of a JSON object; else an object that holds the broken text, since providers
    refuse anything else."""
    try:
        if isinstance(json.loads(arguments), dict):
            return arguments
    except ValueError:
        pass
    return dumps({"invalid_arguments": arguments}) if arguments else "{}"


#: The note below a text that was cut, at its end.
_CUT = re.compile(r"\n\[truncated: (\d+) of (\d+) characters are not shown\]\Z")


def cut(text: str, most: int | None) -> str:
    """`text`, or its first `most` characters and a note of how many are missing; of a text that was cut before, of the whole one."""
    if most is None or len(text) <= most:
        return text
    before = _CUT.search(text, max(0, len(text) - 100))
    whole = int(before[2]) if before else len(text)
    return f"{text[:most]}\n[truncated: {whole - most} of {whole} characters are not shown]"
