"""Turns and conversations as readers see them: whole records, history, the place of a turn in its conversation's frames."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.errors import NotFound
from orchestration.core.ids import StepId, is_id
from orchestration.core.turn import TurnRequest, TurnState
from orchestration.state.store import Store, conversation_key, translated, turn_key


@dataclass(frozen=True, slots=True)
class CallView:
    """One call as a reader sees it."""

    round: int
    index: int
    record: CallRecord
    arguments: dict[str, Any] | None
    state: CallState
    result: CallResult | None
    began_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class KeptToken:
    """The token of whoever submitted a turn, sealed (empty once it is gone), and until when it holds (epoch ms)."""

    sealed: str
    expires_ms: int


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn as a reader sees it. `raw` holds the journal's plain fields."""

    request: TurnRequest
    state: TurnState
    version: str
    rounds: int
    calls: list[CallView]
    raw: dict[str, str]

    def number(self, name: str) -> int:
        """A field that is a number; 0 when there is none."""
        return int(self.raw.get(name) or 0)

    def open_round(self) -> int | None:
        """The round whose calls are under way, if one is."""
        rounds = [int(name[2:]) for name in self.raw if name.startswith("n:")]
        last = max(rounds, default=0)
        return last if last > self.rounds else None


class Conversations:
    """Reads of turns and conversations of all tenants; each call names whose."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def turn(self, tenant: str, turn_id: str) -> TurnView:
        """One turn.

        Raises:
            NotFound: there is none of this id, it is no longer kept, or it is another tenant's.
        """
        raw = self._store.hash(turn_key(tenant, turn_id)) if is_id(turn_id) else {}
        if "req" not in raw:
            raise NotFound("there is no such turn")
        calls = []
        for round_ in sorted(int(name[2:]) for name in raw if name.startswith("n:")):
            for index in range(int(raw[f"n:{round_}"])):
                place = f"{round_}:{index}"
                record = CallRecord.from_json(json.loads(raw[f"c:{place}"]))
                result = raw.get(f"cr:{place}")
                calls.append(
                    CallView(
                        round_,
                        index,
                        record,
                        json.loads(raw[f"ok:{place}"]) if f"ok:{place}" in raw else record.arguments,
                        CallState(raw[f"cs:{place}"]),
                        CallResult.from_json(json.loads(result)) if result else None,
                        int(raw.get(f"cb:{place}") or 0),
                        int(raw.get(f"ce:{place}") or 0),
                    )
                )
        return TurnView(
            TurnRequest.from_json(json.loads(raw["req"])),
            TurnState(raw["state"]),
            raw.get("v", "0"),
            int(raw.get("rounds") or 0),
            calls,
            raw,
        )

    def fields(self, tenant: str, turn_id: str, *names: str) -> list[str | None]:
        """Some plain fields of a turn; None for each that it has not."""
        with translated():
            return cast("list[str | None]", self._store.client.hmget(turn_key(tenant, turn_id), list(names)))

    def callers_token(self, tenant: str, turn_id: str) -> KeptToken | None:
        """The caller's token that is kept for a turn; None where none ever was. Raises StoreUnavailable."""
        key = turn_key(tenant, turn_id)
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            pipe.hget(key, "token")
            pipe.get(f"{key}:token")
            expires_ms, sealed = cast("list[str | None]", pipe.execute())
        return None if expires_ms is None else KeptToken(sealed or "", int(expires_ms))

    def call_record(self, step: StepId) -> CallRecord | None:
        """The call of one tool step; None when it is no longer kept."""
        raw = self.fields(step.tenant, step.turn_id, f"c:{step.round}:{step.index}")[0]
        return CallRecord.from_json(json.loads(raw)) if raw else None

    def conversation(self, tenant: str, conversation_id: str) -> dict[str, str]:
        """A conversation's plain fields, `length` (entries in its log) and `waiting` (turns in its mailbox) included.

        Raises:
            NotFound: there is none of this id, or it is another tenant's.
        """
        key = conversation_key(tenant, conversation_id)
        raw: dict[str, str] = {}
        length = waiting = 0
        if is_id(conversation_id):
            with translated():
                pipe = self._store.client.pipeline(transaction=False)
                pipe.hgetall(key)
                pipe.llen(f"{key}:log")
                pipe.llen(f"{key}:mail")
                raw, length, waiting = pipe.execute()
        if "agent" not in raw:
            raise NotFound("there is no such conversation")
        return raw | {"length": str(length), "waiting": str(waiting)}

    def log(self, tenant: str, conversation_id: str, *, limit: int, before: int | None = None) -> list[tuple[int, dict[str, Any]]]:
        """The newest `limit` entries of the log whose number is below `before`, oldest first, each with its number from 0."""
        key = f"{conversation_key(tenant, conversation_id)}:log"
        with translated():
            length = int(self._store.client.llen(key))
        end = length if before is None else max(0, min(before, length))
        start = max(0, end - limit)
        found = self._store.entries(key, start, end - 1) if end > start else []
        return [(start + i, json.loads(text)) for i, text in enumerate(found)]

    def delete(self, tenant: str, conversation_id: str) -> bool:
        """Forget a conversation: log, frames, mailbox. False when a turn of it still runs; nothing is deleted then."""
        self.conversation(tenant, conversation_id)
        return bool(self._store.run("forget", tenant, conversation_id))
