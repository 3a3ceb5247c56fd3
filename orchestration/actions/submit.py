"""Submit: a user's input becomes a turn in its conversation's mailbox, once, and starts when its turn has come."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from orchestration.actions.cancel import cancel_for_interrupt
from orchestration.actions.pass_on import pass_on
from orchestration.core.errors import ConversationBusy, IdempotencyMismatch, Invalid, MailboxFull
from orchestration.core.ids import StepId, StepKind, is_id, new_conversation_id, new_turn_id
from orchestration.core.principal import Principal
from orchestration.core.safe_json import clean, clean_text, dumps
from orchestration.core.tool import attached_tools
from orchestration.core.turn import OnBusy, TurnRequest
from orchestration.outbound.address import check_url
from orchestration.state.passing import begin_passing
from orchestration.wiring import Ports

#: Longest idempotency key that is taken, in characters.
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody wants of an agent. `idempotency_scope` says within what the key is unique; by default the agent.

    `idempotency_digest` tells whether two submissions with one key are the same, where that is not all of what is submitted. `webhook`
    names the webhook whose `on_answer` hears of the turn's end. `token` is the JWT that its principal came in with (never an API key)
    and `token_ends_s` the end of its life (epoch seconds). `history` are entries of a conversation that begins with them
    and is kept for an hour after its turn (then `conversation_id` is None).
    """

    agent: str
    input: str | list[dict[str, Any]]
    principal: Principal
    conversation_id: str | None = None
    brief: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    callback_url: str = ""
    on_busy: OnBusy = OnBusy.QUEUE
    deadline_s: float | None = None
    model: str = ""
    idempotency_key: str | None = None
    idempotency_scope: str | None = None
    idempotency_digest: str = ""
    traceparent: str = ""
    webhook: str = ""
    history: list[dict[str, Any]] | None = None
    token: str = field(default="", repr=False)
    token_ends_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """Where the turn stands: `position` is 0 for one that runs, else its place in the mailbox."""

    turn_id: str
    conversation_id: str
    state: str
    position: int


def submit(ports: Ports, submission: Submission) -> Submitted:
    """Store the turn and ring the bell; the same idempotency key with the same body gives the same answer for 24 h.

    Raises:
        UnknownAgent, Invalid: what was submitted cannot become a turn; nothing is stored.
        ConversationBusy, MailboxFull, IdempotencyMismatch: it may not become one now.
        StoreUnavailable: Redis does not take it.
    """
    agent = ports.project.agent(submission.agent)
    _check(submission)
    if submission.callback_url:
        check_url(submission.callback_url, ports.settings.callback_networks)
    agent.model_named(submission.model)
    attached_tools(submission.tools)
    request = TurnRequest(
        turn_id=new_turn_id(),
        tenant=submission.principal.tenant,
        agent=agent.name,
        conversation_id=submission.conversation_id or new_conversation_id(),
        principal=submission.principal,
        input=clean(submission.input),
        brief=clean_text(submission.brief),
        tools=submission.tools,
        metadata=clean(submission.metadata),
        callback_url=submission.callback_url,
        deadline_s=submission.deadline_s,
        model=submission.model,
        traceparent=submission.traceparent,
        snapshot=ports.project.snapshot(agent.name),
        webhook=submission.webhook,
    )
    if submission.history is not None:
        begin_passing(ports.store, request.tenant, request.conversation_id, submission.history)
    kept = bool(submission.token) and ports.project.forwards(agent.name)
    deadlines = [bound for bound in (submission.deadline_s, agent.limits.deadline_s) if bound is not None]
    posted = ports.mailbox.post(
        request,
        on_busy=submission.on_busy,
        on_busy_waiting=OnBusy(agent.on_busy_waiting) if agent.on_busy_waiting else None,
        idempotency=_idempotency(submission),
        digest=submission.idempotency_digest or _digest(submission),
        deadline_s=min(deadlines) if deadlines else None,
        ring=ports.queue.ring([StepId(request.tenant, request.turn_id, 1, StepKind.PLAN)]),
        token=ports.seal.seal(submission.token, request.principal) if kept else "",
        token_ends_ms=int(submission.token_ends_s * 1000) if kept else 0,
    )
    if posted.why == "mismatch":
        raise IdempotencyMismatch("this idempotency key was used with another body")
    if posted.why == "busy":
        raise ConversationBusy(f"turn {posted.other} of this conversation is under way")
    if posted.why == "full":
        raise MailboxFull(f"the {posted.other} has as many waiting turns as it may have", retry_after_s=5)
    pass_on(ports, posted.sends, traceparent=request.traceparent)
    if posted.why == "interrupt":
        cancel_for_interrupt(ports, request.tenant, posted.other, by=request.principal.sub)
    return Submitted(posted.turn_id, posted.conversation_id, posted.state, posted.position)


def _check(submission: Submission) -> None:
    faults = []
    if submission.conversation_id is not None and not is_id(submission.conversation_id):
        faults.append({"loc": ["conversation_id"], "msg": "1 to 64 characters of A-Z a-z 0-9 _ -"})
    if not submission.input:
        faults.append({"loc": ["input"], "msg": "must not be empty"})
    if submission.idempotency_key is not None and not 0 < len(submission.idempotency_key) <= MAX_KEY_CHARS:
        faults.append({"loc": ["Idempotency-Key"], "msg": f"1 to {MAX_KEY_CHARS} characters"})
    if submission.deadline_s is not None and not 0 < submission.deadline_s <= 366 * 86_400:
        faults.append({"loc": ["deadline_s"], "msg": "a positive number of seconds, at most a year"})
    if faults:
        raise Invalid("the submission does not fit", faults)


def _idempotency(submission: Submission) -> str:
    if submission.idempotency_key is None:
        return ""
    scope = submission.idempotency_scope or f"agent.{submission.agent}"
    return f"{scope}:{hashlib.sha256(submission.idempotency_key.encode('utf-8', 'replace')).hexdigest()}"


def _digest(submission: Submission) -> str:
    body = [
        submission.input,
        submission.conversation_id,
        submission.brief,
        submission.tools,
        submission.metadata,
        submission.callback_url,
        str(submission.on_busy),
        submission.deadline_s,
        submission.model,
    ]
    return hashlib.sha256(dumps(clean(body)).encode()).hexdigest()
