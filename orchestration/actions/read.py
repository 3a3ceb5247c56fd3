"""Reading: turns, conversations, agents and approvals in the shapes of the API. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from orchestration.core.agent import Agent
from orchestration.core.agent_tool import child_turn_id
from orchestration.core.approval import ApprovalState, as_api
from orchestration.core.audit import audit_as_api
from orchestration.core.catalogue import of_wishes
from orchestration.core.errors import ConversationBusy, Invalid, NotFound
from orchestration.core.gate import Gate, gate_for
from orchestration.core.ids import is_id
from orchestration.core.limits import usage_shown
from orchestration.core.model import Usage
from orchestration.core.times import rfc3339
from orchestration.core.tool import Discover, ToolSpec, demanded
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
        "usage": usage_shown(Usage(view.number("in"), view.number("out")), view.number("cost")),
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
    if call.record.agent:
        shown["child_turn_id"] = child_turn_id(call.record.call_id)
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
    """One agent; raises UnknownAgent. Its discovered tools, and what owners demand of the others, are as the mesh shows them now."""
    found = ports.project.agent(name)
    wishes = [*found.discoveries(), *(Discover((spec.prefix,)) for spec in found.of_others())]
    on_mesh = {spec.prefix: spec for spec in ports.mesh.discover(wishes)} if wishes else {}
    known = [demanded(spec, on_mesh.get(spec.prefix)) for spec in found.known_tools()]
    named = {spec.prefix for spec in known}
    specs = [*known, *(spec for spec in of_wishes(found.discoveries(), list(on_mesh.values())) if spec.prefix not in named)]
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
        "approval": None if gate is None else _gate(gate),
    }


def _gate(gate: Gate) -> dict[str, Any]:
    return {
        "reason": gate.reason,
        "roles": list(gate.roles),
        "timeout_s": gate.timeout_s,
        "on_expiry": str(gate.on_expiry),
        "quorum": gate.quorum,
        "four_eyes": gate.four_eyes,
    }


def approvals(
    ports: Ports, tenant: str, state: str = "pending", agent: str | None = None, limit: int = 100, cursor: str | None = None
) -> dict[str, Any]:
    """Approvals in one state, oldest first; the answer's `cursor` leads to the rest, None at the end.

    Raises:
        Invalid: there is no such state, or the cursor is none that was given out.
    """
    if state not in tuple(ApprovalState):
        raise Invalid("there is no such state", [{"loc": ["state"], "msg": f"one of {', '.join(ApprovalState)}"}])
    found, following = ports.approvals.page(tenant, ApprovalState(state), agent=agent or "", after=_number(cursor, "cursor"), most=limit)
    return {"approvals": [as_api(one) for one in found], "cursor": str(following) if following else None}


def approval(ports: Ports, tenant: str, approval_id: str) -> dict[str, Any]:
    """One approval; raises NotFound."""
    return as_api(ports.approvals.get(tenant, approval_id))


def audit(
    ports: Ports, tenant: str, *, approval_id: str | None = None, turn_id: str | None = None, after: int = 0, limit: int = 100
) -> dict[str, Any]:
    """Entries of the audit stream behind number `after`, oldest first, all or those of one approval or turn.

    `after` in the answer is where to go on, None at the end. A page can be empty and yet not the end: entries of an approval
    that is no longer kept are looked for, a part of the stream at a time.
    """
    tied = _audit_numbers(ports, tenant, approval_id, turn_id)
    if tied is not None:
        page = ports.audit.numbered(tenant, tied, after=after, limit=limit)
    elif approval_id is not None or turn_id is not None:
        wanted = f'"approval_id":"{approval_id}"' if approval_id is not None else f'"turn_id":"{turn_id}"'
        page = ports.audit.search(tenant, wanted, after=after, limit=limit)
    else:
        page = ports.audit.page(tenant, after=after, limit=limit)
    entries = [audit_as_api(number, text) for number, text in page.entries]
    matching = [
        entry
        for entry in entries
        if (approval_id is None or entry["approval_id"] == approval_id) and (turn_id is None or entry["turn_id"] == turn_id)
    ]
    return {"entries": matching, "after": page.after or None}


def _audit_numbers(ports: Ports, tenant: str, approval_id: str | None, turn_id: str | None) -> list[int] | None:
    """The numbers of the entries of an approval, or of all of a turn's, where they are still noted there."""
    if approval_id is not None:
        return ports.approvals.audit_numbers(tenant, approval_id)
    ids = ports.approvals.of_turn(tenant, turn_id) if turn_id is not None else None
    if ids is None:
        return None
    found = [ports.approvals.audit_numbers(tenant, one) for one in ids]
    return [number for numbers in found if numbers is not None for number in numbers] if None not in found else None


def _number(text: str | None, name: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Invalid(f"the {name} does not fit", [{"loc": [name], "msg": "a value that an earlier answer gave"}])
    return int(text)
