"""Reading: turns, conversations, agents and approvals in the shapes of the API. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from orchestration.core.agent import Agent
from orchestration.core.approval import Approval, ApprovalState, as_api
from orchestration.core.errors import ConversationBusy, Invalid, NotFound
from orchestration.core.gate import gate_for
from orchestration.core.ids import is_id
from orchestration.core.times import rfc3339
from orchestration.core.tool import ToolSpec
from orchestration.core.turn import ENDED
from orchestration.state.conversations import CallView, TurnView
from orchestration.wiring import Ports


def turn(ports: Ports, tenant: str, turn_id: str) -> dict[str, Any]:
    """One turn; raises NotFound."""
    return turn_as_api(ports.conversations.turn(tenant, turn_id))


def turn_as_api(view: TurnView) -> dict[str, Any]:
    """A turn in the shape of `GET /v1/turns/{id}`."""
    raw = view.raw
    return {
        "turn_id": view.request.turn_id,
        "conversation_id": view.request.conversation_id,
        "agent": view.request.agent,
        "state": str(view.state),
        "stop_reason": raw.get("stop"),
        "answer": raw.get("answer"),
        "output": json.loads(raw["output"]) if "output" in raw else None,
        "error": json.loads(raw["error"]) if "error" in raw else None,
        "rounds": view.rounds,
        "usage": {"input_tokens": view.number("in"), "output_tokens": view.number("out")},
        "calls": [_call(call) for call in view.calls],
        "metadata": view.request.metadata,
        "created_at": rfc3339(view.number("created")),
        "started_at": rfc3339(view.number("started")),
        "ended_at": rfc3339(view.number("ended")),
    }


def _call(call: CallView) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "call_id": call.record.call_id,
        "name": call.record.name,
        "arguments": call.arguments if call.arguments is not None else call.record.raw_arguments,
        "state": str(call.state),
        "error": {"code": call.result.code, "detail": call.result.content[:1000]} if call.result and call.result.error else None,
        "started_at": rfc3339(call.began_ms),
        "ended_at": rfc3339(call.ended_ms),
    }
    if call.record.approval_id:
        shown["approval_id"] = call.record.approval_id
    return shown


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a turn's frames are: numbers of its first and last one so far; `ended` says whether the last is its `done`."""

    conversation_id: str
    first_seq: int
    last_seq: int
    ended: bool


def turn_place(ports: Ports, tenant: str, turn_id: str) -> TurnPlace:
    """Where a turn's frames are; raises NotFound."""
    if not is_id(turn_id):
        raise NotFound("there is no such turn")
    conversation_id, state, first, last = ports.conversations.fields(tenant, turn_id, "conv", "state", "seq0", "seqn")
    if conversation_id is None or state is None:
        raise NotFound("there is no such turn")
    return TurnPlace(conversation_id, int(first or 0), int(last or 0), state in ENDED)


def conversation(ports: Ports, tenant: str, conversation_id: str) -> dict[str, Any]:
    """One conversation; raises NotFound."""
    raw = ports.conversations.conversation(tenant, conversation_id)
    return {
        "conversation_id": conversation_id,
        "agent": raw["agent"],
        "running_turn_id": raw.get("running"),
        "waiting_turns": int(raw["waiting"]),
        "entries": int(raw["length"]),
        "last_seq": int(raw.get("seq") or 0),
        "created_at": rfc3339(int(raw.get("created") or 0)),
        "updated_at": rfc3339(int(raw.get("updated") or 0)),
    }


def history(ports: Ports, tenant: str, conversation_id: str, limit: int = 1000, before: int | None = None) -> list[dict[str, Any]]:
    """The newest `limit` entries of a conversation, oldest first, those before entry number `before` if given; raises NotFound."""
    ports.conversations.conversation(tenant, conversation_id)
    return [
        {"n": number, "dir": entry["dir"], "data": entry["data"], "ts": rfc3339(entry["ms"]), "turn_id": entry["turn_id"]}
        for number, entry in ports.conversations.log(tenant, conversation_id, limit=limit, before=before)
    ]


def delete_conversation(ports: Ports, tenant: str, conversation_id: str) -> None:
    """Forget a conversation and its turns.

    Raises:
        NotFound: there is none.
        ConversationBusy: a turn of it runs or waits; cancel it first. Nothing is deleted.
    """
    if not ports.conversations.delete(tenant, conversation_id):
        raise ConversationBusy("a turn of this conversation is under way; cancel it first")


def agent_list(ports: Ports) -> list[dict[str, Any]]:
    """All agents."""
    return [agent(ports, name) for name in sorted(ports.project.agents)]


def agent(ports: Ports, name: str) -> dict[str, Any]:
    """One agent; raises UnknownAgent. Its discovered tools are those that the mesh shows now."""
    found = ports.project.agent(name)
    specs = [*found.known_tools(), *(ports.mesh.discover(found.discoveries()) if found.discoveries() else [])]
    return {
        "name": found.name,
        "description": found.description,
        "tools": [_tool(found, spec) for spec in specs],
        "limits": asdict(found.limits),
        "snapshot": found.snapshot(),
    }


def _tool(owner: Agent, spec: ToolSpec) -> dict[str, Any]:
    gate = gate_for(spec, owner.approvals)
    return {
        "name": spec.name,
        "prefix": spec.prefix,
        "description": spec.description,
        "schema": spec.parameters,
        "approval": None if gate is None else {"reason": gate.reason, "roles": list(gate.roles), "timeout_s": gate.timeout_s},
    }


def approvals(
    ports: Ports, tenant: str, state: str = "pending", agent: str | None = None, limit: int = 100, cursor: str | None = None
) -> dict[str, Any]:
    """Undecided approvals, oldest first.

    Raises:
        Invalid: a state that is not listed; only `pending` is kept in order.
    """
    if state != str(ApprovalState.PENDING):
        raise Invalid("approvals are listed by state=pending; others are read one by one", [{"loc": ["state"], "msg": "must be 'pending'"}])
    found: list[Approval] = []
    after = cursor or ""
    while True:
        page, after = ports.approvals.pending(tenant, after=after, most=limit)
        found.extend(one for one in page if agent is None or one.agent == agent)
        if not after or len(found) >= limit:
            return {"approvals": [as_api(one) for one in found], "cursor": after or None}


def approval(ports: Ports, tenant: str, approval_id: str) -> dict[str, Any]:
    """One approval; raises NotFound."""
    return as_api(ports.approvals.get(tenant, approval_id))
