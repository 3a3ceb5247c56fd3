"""The mailbox of a conversation: submissions go in, one turn at a time comes out. The script `submit.lua` decides; this gives it types."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.core.conversation import input_entry
from orchestration.core.ids import StepId
from orchestration.core.outbound import told_at_end
from orchestration.core.safe_json import dumps
from orchestration.core.turn import OnBusy, TurnRequest
from orchestration.state.store import Store


@dataclass(frozen=True, slots=True)
class Posted:
    """What came of a submission: `why` is new, same, interrupt, steered, mismatch, busy or full; `other` names the
    turn under way, or which bound was met."""

    why: str
    turn_id: str = ""
    conversation_id: str = ""
    state: str = ""
    position: int = 0
    other: str = ""
    sends: tuple[StepId, ...] = ()


class Mailbox:
    """Submissions into conversations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(
        self,
        request: TurnRequest,
        *,
        on_busy: OnBusy,
        on_busy_waiting: OnBusy | None,
        idempotency: str,
        digest: str,
        deadline_s: float | None,
        ring: dict[str, tuple[str, str]],
        token: str = "",
        token_ends_ms: int = 0,
    ) -> Posted:
        """Put one submission in, atomically and once for `idempotency` (scope and key; empty for none). `token` is the caller's, sealed.

        Raises:
            StoreUnavailable: Redis does not answer; nothing is known to be stored.
        """
        settings = self._store.settings
        why, *rest = self._store.run(
            "submit",
            request.tenant,
            request.conversation_id,
            request.turn_id,
            dumps(request.as_json()),
            dumps(input_entry(request.turn_id, request.input)),
            request.agent,
            str(on_busy),
            str(on_busy_waiting or ""),
            "" if deadline_s is None else str(deadline_s),
            idempotency,
            digest,
            settings.max_waiting_turns,
            settings.max_tenant_waiting_turns,
            request.traceparent,
            dumps(ring),
            " ".join(told_at_end(request)),
            token,
            token_ends_ms,
        )
        conversation_id = request.conversation_id
        if why == "new":
            sends = tuple(StepId.parse(text) for text in rest[3:])
            return Posted(why, rest[0], conversation_id, rest[1], int(rest[2]), sends=sends)
        if why == "same":
            return Posted(why, rest[0], rest[1], rest[2], int(rest[3]))
        if why == "interrupt":
            return Posted(why, rest[0], conversation_id, rest[1], int(rest[2]), other=rest[3])
        if why == "steered":
            return Posted(why, rest[0], conversation_id, rest[1])
        return Posted(why, other=rest[0] if rest else "")
