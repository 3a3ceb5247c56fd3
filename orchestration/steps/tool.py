"""tool: ask the mesh once for one call and commit what came of it. A call that may have run is not asked again,
unless its tool is idempotent."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from orchestration.actions.pass_on import pass_on
from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.conversation import cut, result_entry
from orchestration.core.errors import StepLost, StoreUnavailable, TurnmillError, Unauthorized
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.loop import schema_faults, unknown_outcome
from orchestration.core.result_text import result_text
from orchestration.core.safe_json import clean, dumps
from orchestration.core.tool import Discover, Outcome, ToolAnswer, ToolQuery
from orchestration.state.journal import Claim, NotClaimed, ToolWork
from orchestration.steps.claims import holds_claims
from orchestration.steps.faults import MAX_CLAIMS, log_unexpected, reached, try_again
from orchestration.steps.forwarding import forwarded_token
from orchestration.steps.hooks import asked_within, in_own_words
from orchestration.steps.local import answer_here
from orchestration.steps.nested import start_agent
from orchestration.wiring import Ports

#: Characters of one result that the journal keeps; what is beyond is counted, not stored.
MAX_RESULT_CHARS = 262_144

#: Characters of a result that a frame carries.
MAX_FRAME_CHARS = 65_536

#: How often a call that certainly did not run, or whose tool is idempotent, is asked.
MAX_ATTEMPTS = 5

PARKED = "parked"


@holds_claims
def tool(step: StepId, ports: Ports) -> str:
    """Run one tool step if it is to be run; returns what became of it. `parked` says that it waits for a human and
    must not count as ended."""
    reached("before_claim", step)
    claimed = ports.journal.claim(step)
    if isinstance(claimed, NotClaimed):
        return claimed.why
    claim, fields = claimed
    work = ports.journal.tool_work(fields)
    reached("claimed", step)
    if time.monotonic() >= claim.deadline:
        # this process slept past its lease: somebody else may have the call by now, so it is not asked from here
        try_again(ports, claim, 0.0)
        return "late"
    reached("deadline_checked", step)
    if work.record.agent or work.record.loop:
        return _answered_by_us(claim, work, ports)
    token, refusal = "", None
    try:
        token = forwarded_token(work, ports)
    except Unauthorized as error:
        refusal = ToolAnswer(Outcome.FAILED, code=error.code, message=str(error))
    except StoreUnavailable:
        try_again(ports, claim, None, uncounted=True)  # nothing was asked of anybody
        return "again"
    try:
        if claim.attempt > MAX_CLAIMS:
            raise StepLost(f"step {step.task_id} was begun {claim.attempt - 1} times and never finished")
        record = _served_now(work.record, ports)
        refusal = refusal or _refusal(work, record)
        ask = partial(_ask, claim, work, record, token, ports)
        answer = refusal or asked_within(claim, work, ports, ask, lambda got: result_of(got, record))
    except Exception as error:
        # whether it was asked is not known any more
        log_unexpected(step, error)
        refusal, answer = None, ToolAnswer(Outcome.UNKNOWN, code="internal_error")
    reached("asked", step)
    try:
        return _commit(claim, work, answer, ports, asked=refusal is None and answer.outcome is not Outcome.NOT_RUN)
    except StoreUnavailable:
        return "unavailable"


def _answered_by_us(claim: Claim, work: ToolWork, ports: Ports) -> str:
    """A call that never reaches the mesh: an agent of ours answers it, or the loop itself, once a human agreed."""
    try:
        if work.record.agent:
            return PARKED if start_agent(claim, work, ports) else "started"
        return _record(claim, work, answer_here(work, claim.step.round, ports), ports, asked=True)
    except StoreUnavailable:
        try_again(ports, claim, None, uncounted=True)  # nothing was asked of anybody
        return "again"
    except TurnmillError as error:
        failed = CallResult(CallState.FAILED, dumps({"error": error.code, "message": str(error)}), error.code)
        return _record(claim, work, failed, ports, asked=False)


def _served_now(record: CallRecord, ports: Ports) -> CallRecord:
    """The call as its owner serves it now: while it waited for a human, the owner may have changed the schema, or what it takes."""
    if record.gate is None:
        return record
    found = next((spec for spec in ports.mesh.discover([Discover((record.prefix,))]) if spec.prefix == record.prefix), None)
    return record if found is None else replace(record, schema=found.parameters, payload=found.payload)


def _arguments(work: ToolWork) -> dict[str, object]:
    return work.approved_arguments if work.approved_arguments is not None else work.record.arguments or {}


def _refusal(work: ToolWork, record: CallRecord) -> ToolAnswer | None:
    """Why the call is not asked, if it is not: its arguments must fit the schema under which it was asked, and today's.

    A call without a gate was checked when its round was opened, a moment ago.
    """
    if record.gate is None:
        return None
    faults, why = schema_faults(work.record.schema, _arguments(work)), "the arguments do not fit the tool's schema"
    if not faults:
        faults, why = schema_faults(record.schema, _arguments(work)), "the tool's schema has changed while the call waited; it did not run"
    return ToolAnswer(Outcome.FAILED, code="invalid_arguments", message=why, details=faults) if faults else None


def _ask(claim: Claim, work: ToolWork, record: CallRecord, token: str, ports: Ports) -> ToolAnswer:
    principal = work.request.principal
    return ports.mesh.ask(
        ToolQuery(
            prefix=record.prefix,
            arguments=_arguments(work),
            call_id=record.call_id,
            tenant=principal.tenant,
            sub=principal.sub,
            roles=principal.roles,
            timeout_s=record.timeout_s,
            payload=record.payload,
            expires_ms=claim.lease_ends_ms,
            traceparent=work.request.traceparent,
            forwarded_token=token,
        )
    )


def _commit(claim: Claim, work: ToolWork, answer: ToolAnswer, ports: Ports, *, asked: bool) -> str:
    record = work.record
    if _may_ask_again(answer, record) and claim.attempt < MAX_ATTEMPTS:
        try_again(ports, claim, None, maybe_ran=answer.outcome is Outcome.UNKNOWN)
        return "again"
    if work.maybe_ran and not asked:
        # this attempt did not run, and nobody knows about the one before
        answer, asked = ToolAnswer(Outcome.UNKNOWN, code=answer.code), True
    result = in_own_words(claim, work, ports, answer, result_of(answer, record))
    return _record(claim, work, result, ports, asked=asked)


def _record(claim: Claim, work: ToolWork, result: CallResult, ports: Ports, *, asked: bool) -> str:
    record, step = work.record, claim.step
    shown = frame(
        FrameKind.TOOL_RESULT,
        step.turn_id,
        step.round,
        tool_call_id=record.call_id,
        name=record.name,
        content=cut(result.content, MAX_FRAME_CHARS),
        error=result.error,
    )
    change = {
        "result": {
            "round": step.round,
            "index": step.index,
            "state": str(result.state),
            "content": dumps(result.as_json()),
            "entry": dumps(result_entry(step.turn_id, step.round, record.call_id, record.name, result)),
            "refused": not asked,
        },
        "frames": [shown],
        "ring": ports.queue.ring([StepId(step.tenant, step.turn_id, step.round, StepKind.OBSERVE)]),
    }
    committed = ports.journal.commit(step.tenant, step.turn_id, change, claim)
    reached("committed", step)
    if committed.ours:
        pass_on(ports, committed.sends, traceparent=work.request.traceparent)
    return committed.why


def _may_ask_again(answer: ToolAnswer, record: CallRecord) -> bool:
    """Whether asking again is safe and may help: nothing ran and it is a passing fault, or the tool may run twice."""
    if answer.outcome is Outcome.NOT_RUN:
        return answer.code in ("rate_limit_exceeded", "expired", "mesh_unavailable", "store_unavailable")
    if answer.outcome is Outcome.UNKNOWN:
        return record.idempotent
    return answer.outcome is Outcome.FAILED and answer.code == "conflict" and record.idempotent


def result_of(answer: ToolAnswer, record: CallRecord) -> CallResult:
    """What the journal records and the model reads of an answer."""
    if answer.outcome is Outcome.COMPLETED:
        return CallResult(CallState.COMPLETED, cut(result_text(answer.value), MAX_RESULT_CHARS))
    if answer.outcome is Outcome.UNKNOWN:
        unknown = unknown_outcome(record.name)
        cause = f" ({answer.code})" if answer.code else ""
        return CallResult(unknown.state, unknown.content + cause, unknown.code)
    error: dict[str, object] = {"error": answer.code or "failed", "message": answer.message}
    if answer.details is not None:
        error["details"] = clean(answer.details)
    return CallResult(CallState.FAILED, cut(dumps(error), MAX_RESULT_CHARS), answer.code or "failed")
