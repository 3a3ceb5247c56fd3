"""Approvals in Redis: read, list, and record decisions. Which decision may be recorded is decided in
`core/approval.py`; first one wins here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from orchestration.core.approval import Approval, ApprovalState
from orchestration.core.call import CallRecord
from orchestration.core.errors import NotFound
from orchestration.core.ids import StepId, is_id
from orchestration.core.safe_json import dumps
from orchestration.core.turn import TurnRequest
from orchestration.state.outbox import Outbox
from orchestration.state.store import Store, approval_key, texts, translated


def new_approval(request: TurnRequest, agent: str, record: CallRecord, round_: int, index: int, expires_at: int) -> dict[str, Any]:
    """What a commit takes to create the approval that `record` needs; `expires_at` is the store's time in ms, 0 for never."""
    gate = record.gate
    assert gate is not None
    fields = {
        "state": str(ApprovalState.PENDING),
        "v": "0",
        "turn_id": request.turn_id,
        "conversation_id": request.conversation_id,
        "call_id": record.call_id,
        "round": str(round_),
        "index": str(index),
        "agent": agent,
        "tool": record.name,
        "prefix": record.prefix,
        "arguments": dumps(record.arguments),
        "schema": dumps(record.schema),
        "reason": gate.reason,
        "roles": dumps(list(gate.roles)),
        "submitted_by": request.principal.sub,
    }
    made: dict[str, Any] = {"id": record.approval_id, "fields": fields}
    if expires_at:
        made["expires_at"] = str(expires_at)
    return made


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
        reason=raw["reason"],
        roles=tuple(json.loads(raw["roles"])),
        submitted_by=raw["submitted_by"],
        state=ApprovalState(raw["state"]),
        requested_at=int(raw.get("requested_at", "0")),
        expires_at=int(raw.get("expires_at", "0")),
        decided_at=int(raw.get("decided_at", "0")),
        decided_by=raw.get("decided_by", ""),
        note=raw.get("note", ""),
        decisions=tuple(json.loads(raw.get("decisions", "[]"))),
        approved_arguments=json.loads(raw["approved_arguments"]) if "approved_arguments" in raw else None,
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
        raw = self._store.hash(approval_key(tenant, approval_id)) if is_id(approval_id) else {}
        if not raw:
            raise NotFound("there is no such approval")
        return _read(tenant, approval_id, raw)

    def pending(self, tenant: str, *, after: str = "", most: int = 100) -> tuple[list[Approval], str]:
        """Undecided approvals, oldest first, from behind the cursor `after`; and the cursor for what follows, empty at the end."""
        index = f"tm:{tenant}:ap:pending"
        with translated():
            client = self._store.client
            start = 0
            if after:
                rank = client.zrank(index, after)
                start = 0 if rank is None else cast(int, rank) + 1
            ids = texts(client.zrange(index, start, start + most - 1))
            pipe = client.pipeline(transaction=False)
            for id_ in ids:
                pipe.hgetall(approval_key(tenant, id_))
            found = [_read(tenant, id_, raw) for id_, raw in zip(ids, pipe.execute(), strict=True) if raw]
        return found, ids[-1] if len(ids) == most else ""

    def record(
        self,
        before: Approval,
        after: Approval,
        *,
        frames: list[str],
        verdict: ApprovalState | None = None,
        result: str = "",
    ) -> list[StepId] | None:
        """Record `after` in place of `before`, with what follows for its call; what is returned must be sent.

        None when somebody else was faster, or the turn has ended: read the approval again.
        """
        fields = {"state": str(after.state), "decided_by": after.decided_by, "note": after.note, "decisions": dumps(list(after.decisions))}
        change: dict[str, Any] = {"version": before.version, "set": fields, "frames": frames}
        if verdict is not None:
            change["verdict"] = str(verdict)
            if verdict is ApprovalState.APPROVED:
                change["arguments"] = fields["approved_arguments"] = dumps(after.approved_arguments)
            else:
                change["result"] = result
        answer = self._store.run("decide", before.tenant, before.approval_id, dumps(change))
        return [StepId.parse(text) for text in answer[1:]] if answer[0] == "ok" else None

    def resume(self, step: StepId) -> StepId | None:
        """Carry a recorded decision out: the suspended tool step that is to be sent again, if there is one."""
        answer = self._store.run("resume", str(step), self._outbox.take_confirmations())
        return StepId.parse(answer[1]) if answer[0] == "send" else None
