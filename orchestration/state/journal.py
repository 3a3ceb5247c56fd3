"""The journal: what each step of a turn did, committed once. A step is claimed, does its work, and commits; the scripts decide who wins.

Calls that must not fail for a Redis that is away for a while (a claim, a commit: the model has been paid for by then) insist
until it is back; those of the gateway do not go through here.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import astuple, dataclass, field, replace
from typing import Any, cast

from orchestration.core.accounts import Account, accounts_of
from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.compaction import View
from orchestration.core.conversation import Entry
from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepId, StepKind
from orchestration.core.limits import NOTHING, Spent
from orchestration.core.model import ModelReply, RequestedCall, Usage
from orchestration.core.safe_json import dumps, loads
from orchestration.core.turn import TurnRequest
from orchestration.state.leases import ProcessLease
from orchestration.state.outbox import Outbox
from orchestration.state.store import CLAIM_PATIENCE_S, Store, conversation_key, translated, turn_key


@dataclass(frozen=True, slots=True)
class Claim:
    """A step that is ours until its lease ends. `began` and `deadline` are local and monotonic; times in ms are the store's."""

    step: StepId
    owner: str
    fence: int
    attempt: int
    now_ms: int
    lease_ends_ms: int
    began: float
    deadline: float

    def store_now_ms(self) -> int:
        """The store's time now, as far as this process can tell without asking it."""
        return self.now_ms + round((time.monotonic() - self.began) * 1000)


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """Why a step is not ours: done, busy, parked, ended, unknown."""

    why: str


@dataclass(frozen=True, slots=True)
class TurnSoFar:
    """What a plan or an observe knows of its turn. `agent` is the one that goes on with it; `view` is what is sent of the older
    entries; `last_input_tokens` are those of the conversation's last model call; `accounts` are those of the turns above it."""

    request: TurnRequest
    agent: str
    usage: Usage
    entries: list[Entry]
    view: View = field(default_factory=View)
    spent: Spent = NOTHING
    conversation_spent: Spent = NOTHING
    last_input_tokens: int = 0
    accounts: tuple[Account, ...] = ()

    def aged(self, seconds: float) -> TurnSoFar:
        """The turn in a conversation of this age."""
        return replace(self, conversation_spent=replace(self.conversation_spent, seconds=seconds))

    def with_spent(self, used: Spent) -> TurnSoFar:
        """The turn when it has used this much more."""
        above = tuple(replace(account, spent=account.spent + used) for account in self.accounts)
        return replace(self, spent=self.spent + used, conversation_spent=self.conversation_spent + used, accounts=above)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a round, as recorded."""

    record: CallRecord
    state: CallState
    result: CallResult | None


@dataclass(frozen=True, slots=True)
class RoundSoFar:
    """What an observe knows of its round."""

    reply: ModelReply
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class ToolWork:
    """What a tool step needs."""

    request: TurnRequest
    record: CallRecord
    approved_arguments: dict[str, Any] | None
    maybe_ran: bool = False  #: an attempt before this one may have run


@dataclass(frozen=True, slots=True)
class Committed:
    """What came of a commit: `why` is committed, already, fenced, ended, stale, steered or over (a shared budget has no room)."""

    why: str
    sends: list[StepId]
    joined: list[Entry]
    fence: int = 0

    @property
    def ours(self) -> bool:
        """Whether the commit stands, and its sends are ours to make."""
        return self.why in ("committed", "already")


def reply_as_json(reply: ModelReply) -> str:
    """A model's reply as the journal keeps it."""
    return dumps(
        {
            "content": reply.content,
            "thinking": reply.thinking,
            "finish": reply.finish_reason,
            "model": reply.model,
            "calls": [[call.name, call.arguments, call.id] for call in reply.tool_calls],
            "usage": list(astuple(reply.usage)),
        }
        | ({"blocks": reply.thinking_blocks} if reply.thinking_blocks else {})
    )


def reply_from_json(text: str) -> ModelReply:
    """A model's reply from what the journal kept of it."""
    data = loads(text)
    calls = tuple(RequestedCall(name, arguments, id_) for name, arguments, id_ in data["calls"])
    usage = Usage(*data.get("usage", ()))
    return ModelReply(data["content"], calls, data["thinking"], data["finish"], usage, data["model"], data.get("blocks", ""))


def _numbers(texts: list[str]) -> list[int]:
    return [int(text or 0) for text in texts]


class Journal:
    """Claims and commits of the steps of this process. Safe for threads."""

    def __init__(self, store: Store, lease: ProcessLease, outbox: Outbox) -> None:
        self._store = store
        self._lease = lease
        self._outbox = outbox

    def claim(self, step: StepId) -> tuple[Claim, list[str]] | NotClaimed:
        """Take `step`, or learn why not. The raw fields that come with it are read by `turn_so_far` and its siblings.

        The claim of an observe that needs no more than what its round left behind is that of the next plan: the journal has
        done it at once.
        """
        while True:
            owner, deadline = self._lease.next_owner(), self._lease.deadline
            try:
                answer = self._insist("claim", str(step), owner, self._outbox.take_confirmations())
            except StoreUnavailable:
                self._lease.unanswered(owner)
                raise
            if answer[0] in ("claimed", "observed"):
                fence, attempt, now, ends = (int(float(value)) for value in answer[1:5])
                taken = StepId(step.tenant, step.turn_id, step.round + 1, StepKind.PLAN) if answer[0] == "observed" else step
                return Claim(taken, owner, fence, attempt, now, ends, time.monotonic(), deadline), answer[5:]
            if answer[0] != "no_lease":
                return NotClaimed(answer[0])
            self._lease.register(instead_of=owner.partition("#")[0])

    @staticmethod
    def turn_so_far(fields: list[str]) -> tuple[TurnSoFar, list[str]]:
        """The turn, from the fields of a claimed plan or observe; and the fields that are left."""
        request, agent, active, *counts = fields[:7]
        tokens_in, tokens_out, cost, tools = _numbers(counts)
        kept, kept_from, compacted, *totals = fields[7:16]
        last_in, asked, all_in, all_out, all_cost, all_tools = _numbers(totals)
        count = int(fields[16])
        parsed = TurnRequest.from_json(loads(request))
        turn = TurnSoFar(
            request=parsed,
            # a handoff of this turn, or one of earlier turns that were addressed to the same agent
            agent=active or (kept if kept and kept_from == agent else agent),
            usage=Usage(tokens_in, tokens_out),
            entries=[loads(entry) for entry in fields[17 : 17 + count]],
            view=View.from_json(compacted),
            spent=Spent(0, tools, tokens_in, tokens_out, cost),
            conversation_spent=Spent(asked, all_tools, all_in, all_out, all_cost),
            last_input_tokens=last_in,
        )
        return turn, fields[17 + count :]

    @staticmethod
    def round_so_far(fields: list[str]) -> RoundSoFar:
        """The round, from what `turn_so_far` left of an observe's fields."""
        reply, count = fields[0], int(fields[1])
        calls = []
        for i in range(count):
            record, state, result = fields[2 + 3 * i : 5 + 3 * i]
            calls.append(
                Call(
                    CallRecord.from_json(loads(record)),
                    CallState(state),
                    CallResult.from_json(loads(result)) if result else None,
                )
            )
        return RoundSoFar(reply_from_json(reply), calls)

    @staticmethod
    def tool_work(fields: list[str]) -> ToolWork:
        """The call, from the fields of a claimed tool step."""
        request, record, approved, maybe = fields
        return ToolWork(
            TurnRequest.from_json(loads(request)),
            CallRecord.from_json(loads(record)),
            loads(approved) if approved else None,
            bool(maybe),
        )

    def commit(self, tenant: str, turn_id: str, change: dict[str, Any], claim: Claim | None = None) -> Committed:
        """Record `change` (its fields are described in `lua/commit.lua`) and all that follows from it, at once.

        A step's commit waits for a Redis that is away; one from outside (no `claim`) raises StoreUnavailable at once.
        """
        if claim is not None:
            change = {**change, "step": str(claim.step), "owner": claim.owner, "fence": claim.fence}
        else:
            change = {**change, "change": secrets.token_hex(8)}
        run = self._insist if claim is not None else self._store.run
        answer = run("commit", tenant, turn_id, dumps(change), self._outbox.take_confirmations())
        if answer[0] == "already":
            return Committed("already", [StepId.parse(text) for text in answer[1:]], [])
        if answer[0] != "committed":
            return Committed(answer[0], [], [])
        joined = int(answer[2])
        return Committed(
            "committed",
            [StepId.parse(text) for text in answer[3 + joined :]],
            [loads(text) for text in answer[3 : 3 + joined]],
            int(answer[1] or 0),
        )

    def accounts(self, request: TurnRequest) -> tuple[Account, ...]:
        """The accounts of those above a turn, with what was used of each by now. What nobody keeps any more has nothing spent.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        found = []
        for account in accounts_of(request):
            key = (turn_key if account.kind == "turn" else conversation_key)(request.tenant, account.id)
            with translated():
                used = cast("list[str | None]", self._store.client.hmget(key, ["tools", "in", "out", "cost"]))
            found.append(replace(account, spent=Spent(0, *(int(number or 0) for number in used))))
        return tuple(found)

    def keep_view(self, claim: Claim, view: View, frames: list[str], spend: dict[str, int]) -> bool:
        """Keep the shorter view of a conversation that a step under way has made, and count what making it used (as `spend` of
        `commit.lua`); False when the step is no longer ours."""
        answer = self._insist("compact", str(claim.step), claim.owner, claim.fence, view.as_json(), dumps(frames), dumps(spend))
        return bool(answer[0] == "ok")

    def emit(self, claim: Claim, number: int, frames: list[str]) -> bool:
        """Frames of a step under way, the claim's `number`th emission; False when the step is no longer ours."""
        answer = self._insist("emit", str(claim.step), claim.owner, claim.fence, dumps(frames), number)
        return bool(answer[0] == "ok")

    def cancel_call(
        self,
        tenant: str,
        turn_id: str,
        version: str,
        round_: int,
        index: int,
        result: str,
        state: str,
        frames: list[str],
        *,
        by: str = "",
        source: str = "",
    ) -> list[StepId] | None:
        """End one call that waits for its step or runs, for the principal `by`, who acts from `source`; what is returned must be sent.
        None when the turn moved on since `version`."""
        who = (dumps(by or None), dumps(source or None))
        change = secrets.token_hex(8)
        answer = self._store.run("cancel_call", tenant, turn_id, version, round_, index, result, state, dumps(frames), change, *who)
        return [StepId.parse(text) for text in answer[1:]] if answer[0] == "ok" else None

    def claimed_next(self, claim: Claim, committed: Committed, step: StepId) -> Claim:
        """The claim of the step that `committed` took in place."""
        return Claim(step, claim.owner, committed.fence, 1, claim.now_ms, claim.lease_ends_ms, claim.began, self._lease.deadline)

    def _insist(self, script: str, *args: str | int) -> list[str]:
        return list(self._store.insist(script, *args, patience_s=CLAIM_PATIENCE_S if script == "claim" else math.inf))
