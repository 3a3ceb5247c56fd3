"""Approvals in Redis: read, list, record changes. Which change may be recorded is decided in `core/approval.py`; first one wins here."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from orchestration.core.approval import Approval, ApprovalState, reminder_at
from orchestration.core.audit import AuditEvent, audit_entry
from orchestration.core.call import CallRecord
from orchestration.core.errors import NotFound
from orchestration.core.gate import Gate
from orchestration.core.ids import StepId, is_id
from orchestration.core.outbound import Delivery, OutboundEvent, Way
from orchestration.core.safe_json import dumps
from orchestration.state.outbox import Outbox
from orchestration.state.store import Store, approval_key, texts, translated, turn_key

#: What the id of an approval begins with; nothing else is looked up under the approvals' keys.
PREFIX = "ap_"


class Only(StrEnum):
    """When a change may be recorded, by the store's clock."""

    IN_TIME = "open"  #: while its time is not up
    OVERDUE = "due"  #: once its time is up
    REMINDER = "remind"  #: once its reminder is due, the first time
    ALWAYS = ""  #: whenever


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an approval and what follows from it.

    Args:
        after: the approval as it is afterwards.
        audit: the entry of the audit stream.
        frames: what watchers are told.
        decision: the new entry of its decisions, if there is one; its time is added when it is stored.
        result: what the model reads, as JSON, when the call is decided and does not run.
        ends_call: whether the call is decided by this.
        instead: the approval that is asked instead.
        call: the call as it is recorded from then on, where that changes.
        tell: deliveries that become due.
        ring: messages that the script can send itself, as `Queue.ring` makes them.
    """

    after: Approval
    audit: str
    frames: Sequence[str] = ()
    only: Only = Only.ALWAYS
    decision: Mapping[str, Any] | None = None
    result: str = ""
    ends_call: bool = False
    instead: Approval | None = None
    call: CallRecord | None = None
    tell: Sequence[str] = ()
    ring: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """A suspended tool step that is to be sent again, with the indexes of its chord's headers and its turn's trace."""

    step: StepId
    headers: tuple[int, ...]
    traceparent: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of a change: `why` is ok, stale (read again), ended (the turn has), expired or not_due (see `Only`)."""

    why: str
    sends: tuple[StepId, ...] = ()


def new_approval(approval: Approval, *, hooked: bool) -> dict[str, Any]:
    """What a script takes to create `approval`. `hooked` says that the user's module has a hook to be told."""
    gate = approval.gate
    fields = {
        "state": str(ApprovalState.PENDING),
        "v": "0",
        "turn_id": approval.turn_id,
        "conversation_id": approval.conversation_id,
        "call_id": approval.call_id,
        "round": str(approval.round),
        "index": str(approval.index),
        "agent": approval.agent,
        "tool": approval.tool,
        "prefix": approval.prefix,
        "arguments": dumps(approval.arguments),
        "schema": dumps(approval.schema),
        "gate": dumps(gate.as_json()),
        "submitted_by": approval.submitted_by,
    }
    if approval.escalated_from:
        fields["escalated_from"] = approval.escalated_from
    if approval.called_back:
        fields["called_back"] = "1"
    source = approval.escalated_from or approval.agent
    made: dict[str, Any] = {
        "id": approval.approval_id,
        "agent": approval.agent,
        "round": str(approval.round),
        "index": str(approval.index),
        "fields": fields,
        "audit": audit_entry(AuditEvent.REQUESTED, approval, by=approval.submitted_by, source=source, shown=True),
        "tell": told(approval, OutboundEvent.APPROVAL_REQUESTED, hooked=hooked),
        **_times(approval),
    }
    if gate.deadline_runs:
        made["clock"] = True
    return made


def told(approval: Approval, event: OutboundEvent, *, hooked: bool) -> list[str]:
    """The names of the deliveries by which the outside is told of `event`."""
    ways = [Way.HOOK] if hooked and event is OutboundEvent.APPROVAL_REQUESTED else []
    if approval.called_back:
        ways.append(Way.CALLBACK)
    return [Delivery(way, event, approval.approval_id, approval.asked).name for way in ways]


def _times(approval: Approval) -> dict[str, str]:
    remind_at = reminder_at(approval)
    return {
        "expires_at": str(approval.expires_at) if approval.expires_at else "",
        "remind_at": str(remind_at) if remind_at else "",
    }


def _read(tenant: str, approval_id: str, raw: Mapping[str, str]) -> Approval:
    return Approval(
        approval_id=approval_id,
        tenant=tenant,
        turn_id=raw["turn_id"],
        conversation_id=raw["conversation_id"],
        call_id=raw["call_id"],
        round=int(raw["round"]),
        index=int(raw["index"]),
        agent=raw["agent"],
        tool=raw["tool"],
        prefix=raw["prefix"],
        arguments=json.loads(raw["arguments"]),
        schema=json.loads(raw["schema"]),
        gate=Gate(**json.loads(raw["gate"])),
        submitted_by=raw["submitted_by"],
        state=ApprovalState(raw["state"]),
        requested_at=int(raw.get("requested_at", "0")),
        expires_at=int(raw.get("expires_at", "0")),
        decided_at=int(raw.get("decided_at", "0")),
        decided_by=raw.get("decided_by", ""),
        note=raw.get("note", ""),
        decisions=tuple(json.loads(raw.get("decisions", "[]"))),
        approved_arguments=json.loads(raw["approved_arguments"]) if raw.get("approved_arguments") else None,
        escalated_from=raw.get("escalated_from", ""),
        escalated_to=raw.get("escalated_to", ""),
        called_back="called_back" in raw,
        asked=int(raw.get("asked", "1")),
        version=raw["v"],
    )


class Approvals:
    """Approvals of all tenants; each call names whose."""

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox

    def get(self, tenant: str, approval_id: str) -> Approval:
        """One approval.

        Raises:
            NotFound: there is none of this id, or it is another tenant's.
        """
        known = is_id(approval_id) and approval_id.startswith(PREFIX)
        raw = self._store.hash(approval_key(tenant, approval_id)) if known else {}
        if "turn_id" not in raw:
            raise NotFound("there is no such approval")
        return _read(tenant, approval_id, raw)

    def page(self, tenant: str, state: ApprovalState, *, agent: str = "", after: int = 0, most: int = 100) -> tuple[list[Approval], int]:
        """Approvals in `state`, oldest first, from behind the cursor `after`; and the cursor of what follows, 0 at the end.

        Undecided ones are in the order in which they were asked, decided ones in that of their decisions. A cursor stays good
        whatever happens to the approval that it was taken from. Costs what the page costs, however many there are.
        """
        index = f"tm:{tenant}:aps:{state}" + (f":{agent}" if agent else "")
        with translated():
            client = self._store.client
            found: Any = client.zrangebyscore(index, f"({after}", "+inf", start=0, num=most + 1, withscores=True)
            pipe = client.pipeline(transaction=False)
            for id_, _ in found[:most]:
                pipe.hgetall(approval_key(tenant, str(id_)))
            read = pipe.execute()
        ids = [str(id_) for id_, _ in found[:most]]
        # one that was forgotten, or has just moved on, is not of this page
        page = [_read(tenant, id_, raw) for id_, raw in zip(ids, read, strict=True) if raw.get("state") == str(state)]
        return page, int(found[most - 1][1]) if len(found) > most else 0

    def audit_numbers(self, tenant: str, approval_id: str) -> list[int] | None:
        """The numbers of the audit entries of one approval, oldest first; None when it is no longer kept."""
        with translated():
            stored = cast("str | None", self._store.client.hget(approval_key(tenant, approval_id), "audit"))
        return [int(number) for number in stored.split()] if stored is not None else None

    def of_turn(self, tenant: str, turn_id: str) -> list[str] | None:
        """The ids of a turn's approvals, oldest first; None when the turn is no longer kept."""
        with translated():
            kept, ids = cast("list[str | None]", self._store.client.hmget(turn_key(tenant, turn_id), ["req", "aps"]))
        return None if kept is None else (ids or "").split()

    def now_ms(self) -> int:
        """The store's time."""
        with translated():
            seconds, micros = self._store.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def record(self, before: Approval, change: Change, *, hooked: bool = False) -> Recorded:
        """Record `change`, decided on `before`, with all that follows; what is sent must be passed on."""
        after = change.after
        sent: dict[str, Any] = {
            "version": before.version,
            "change": secrets.token_hex(8),
            "when": str(change.only),
            "state": str(after.state),
            "set": _changed(before, after),
            "frames": list(change.frames),
            "audit": [change.audit],
            "tell": list(change.tell),
        }
        if change.ring:
            sent["ring"] = change.ring
        if change.decision is not None:
            sent["decision"] = dumps(dict(change.decision))
        if before.state is not after.state and after.state is ApprovalState.PENDING:
            sent["times"] = _times(after)
        if change.ends_call:
            sent["verdict"] = str(after.state)
            sent["result"] = change.result if after.state is not ApprovalState.APPROVED else dumps(after.approved_arguments)
        if change.instead is not None:
            sent["instead"] = new_approval(change.instead, hooked=hooked)
        if change.call is not None:
            sent["call"] = dumps(change.call.as_json())
        answer = self._store.run("decide", before.tenant, before.approval_id, dumps(sent))
        return Recorded(answer[0], tuple(StepId.parse(text) for text in texts(answer[1:])))

    def note(self, approval: Approval, audit: str) -> None:
        """Add an entry about `approval` to the audit stream that comes with no change of it."""
        self._store.run("audit", approval.tenant, approval.approval_id, audit, secrets.token_hex(8))

    def resume(self, step: StepId) -> Header | None:
        """Carry a recorded decision out: the suspended tool step that is to be sent again, if there is one."""
        answer = self._store.run("resume", str(step), self._outbox.take_confirmations())
        if answer[0] != "send":
            return None
        headers = tuple(json.loads(answer[2])["headers"]) if answer[2] else ()
        return Header(StepId.parse(answer[1]), headers, answer[3])


def _changed(before: Approval, after: Approval) -> dict[str, str]:
    """The plain fields that differ. The state and the decisions are for the script."""
    changed: dict[str, str] = {}
    for name in ("decided_by", "note", "escalated_to", "asked"):
        if getattr(before, name) != getattr(after, name):
            changed[name] = str(getattr(after, name))
    if before.approved_arguments is not after.approved_arguments:
        changed["approved_arguments"] = dumps(after.approved_arguments) if after.approved_arguments is not None else ""
    return changed
