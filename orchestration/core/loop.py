"""What may happen next in a turn. Values in, values out: no clock, no randomness, no I/O.

`before_asking` comes before a model is asked, `after_reply` follows a plan, `after_round` an observe. The steps in
`orchestration/steps/` do what is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from orchestration.core.accounts import Account, used_up
from orchestration.core.agent import Agent
from orchestration.core.agent_tool import MAX_DEPTH, too_deep
from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.conversation import NO_RESPONSE
from orchestration.core.gate import Gate
from orchestration.core.ids import approval_id, call_id
from orchestration.core.limits import Limits, Spent
from orchestration.core.local_calls import ANSWER_ABORTED, SUBMIT, LoopAnswers, LoopTool, closest
from orchestration.core.model import ModelReply, RequestedCall
from orchestration.core.output import MAX_DETAIL_CHARS
from orchestration.core.policy import Deny, PolicyFailed, Rule, ruled_gate
from orchestration.core.round import CallTools, EndTurn, NextRound, PlannedCall, Standing, is_closing
from orchestration.core.safe_json import clean, clean_text, dumps
from orchestration.core.tool import ToolSpec
from orchestration.core.turn import StopReason

#: Names that an error about an unknown tool lists at most.
MAX_NAMES = 50


#: How replies end whose last words are missing.
CUT_OFF = ("length", "content_filter")

#: What stands for arguments that were cut off before they began; no JSON.
LOST = "(cut off)"

#: Why an answer that the provider cut for its content ends the turn.
FILTERED = {"code": "model_content_filtered", "detail": "the provider cut the answer for its content"}


def before_asking(
    agent: Agent, limits: Limits, round_: int, spent: Spent, conversation_spent: Spent, accounts: Sequence[Account] = ()
) -> EndTurn | None:
    """The end of the turn where its model may not be asked any more: a budget is used up, or its rounds are."""
    why = used_up(limits, spent, conversation_spent, accounts)
    if why:
        return out_of_budget("", why)
    if limits.max_rounds is not None and round_ > limits.max_rounds and not is_closing(agent, limits, round_):
        return _round_limit("", agent, limits, invalid=0)
    return None


def after_reply(reply: ModelReply, standing: Standing) -> CallTools | EndTurn:
    """What follows a model's reply: the calls that it asked for, or the end of the turn.

    A call that cannot run (an unknown tool, broken arguments, a gate without anywhere to ask) is answered at once with an
    error that helps the model; it passes no gate and asks none.
    """
    agent, limits = standing.agent, standing.limits
    text = clean_text(reply.content)
    if not reply.tool_calls:
        return _answered(reply, text, standing)
    answers = LoopAnswers(
        agent.output,
        standing.catalogue.tools,
        invalid=standing.invalid,
        handoffs=standing.handoffs,
        max_handoffs=limits.max_handoffs,
    )
    asked = _asked(reply)
    calls = tuple(_call(one, index, standing, answers) for index, one in enumerate(asked))
    round_ = CallTools(text, calls, agent.execution == "sequential")
    if answers.settled:
        return round_ if round_.headers else _settled(round_)
    if standing.last and not round_.headers:
        goes_on = agent.on_round_limit == "answer" and not standing.closing
        return round_ if goes_on else _round_limit(text, agent, limits, invalid=answers.invalid)
    why = used_up(limits, standing.spent, standing.conversation_spent, standing.accounts, calls=len(round_.headers))
    return out_of_budget(text, why) if why else round_


def _asked(reply: ModelReply) -> Sequence[RequestedCall]:
    """The calls of a reply. Where its end was cut off, the last one without arguments may have lost them, so they do not count as none."""
    *before, last = reply.tool_calls
    if reply.finish_reason in CUT_OFF and not last.arguments.strip():
        last = replace(last, arguments=LOST)
    return [*before, last]


def overtaken(round_: CallTools, standing: Standing) -> EndTurn:
    """The end of a turn whose calls do not run after all, since others have used up a budget that they share by now."""
    calls = len(round_.headers)
    why = used_up(standing.limits, standing.spent, standing.conversation_spent, standing.accounts, calls=calls)
    return out_of_budget(round_.text, why or "a shared budget is used up")


def after_round(text: str, calls: Iterable[tuple[CallRecord, CallResult]]) -> NextRound | EndTurn:
    """What follows a round whose calls have all ended; `text` is what the model said beside them."""
    handed_to = ""
    for record, result in calls:
        effect = result.effect or {}
        if "output" in effect:
            return EndTurn(StopReason.ANSWER, text, output=effect["output"])
        if result.code == ANSWER_ABORTED:
            attempts, details = effect.get("attempts", 0), effect.get("details", "")
            detail = f"invalid {record.name} answer after {attempts} attempt(s): {details}"
            return EndTurn(StopReason.INVALID_OUTPUT, text, error=_invalid_output("invalid_answer", attempts, detail, details))
        handed_to = handed_to or effect.get("handoff", "")
    return NextRound(handed_to)


def _settled(round_: CallTools) -> EndTurn:
    ended = after_round(round_.text, [(planned.record, planned.result) for planned in round_.calls if planned.result is not None])
    assert isinstance(ended, EndTurn)
    return replace(ended, calls=round_.calls)


def _answered(reply: ModelReply, text: str, standing: Standing) -> EndTurn:
    if reply.finish_reason == "content_filter":
        return EndTurn(StopReason.ERROR, text, error=FILTERED)
    output = standing.agent.output
    if output is not None:
        detail = f"the model answered in text instead of calling {output.tool}"
        text = text or NO_RESPONSE
        error = _invalid_output("text_answer", standing.invalid, detail, text[:MAX_DETAIL_CHARS])
        return EndTurn(StopReason.INVALID_OUTPUT, text, error=error)
    return EndTurn(StopReason.ANSWER, text) if text else EndTurn(StopReason.EMPTY, NO_RESPONSE)


def _round_limit(text: str, agent: Agent, limits: Limits, *, invalid: int) -> EndTurn:
    limit = f"(reached tool call limit of {limits.max_rounds} rounds without a final answer)"
    text = f"{text}\n{limit}" if text else limit
    if agent.output is None:
        return EndTurn(StopReason.ROUND_LIMIT, text)
    detail = f"no valid {agent.output.tool} call within {limits.max_rounds} round(s)"
    return EndTurn(StopReason.INVALID_OUTPUT, text, error=_invalid_output("round_limit", invalid, detail))


def _invalid_output(reason: str, attempts: int, detail: str, details: str | None = None) -> dict[str, Any]:
    return {"code": "invalid_output", "detail": detail, "reason": reason, "attempts": attempts, "details": details}


def out_of_budget(text: str, why: str) -> EndTurn:
    """The end of a turn because of a budget, which `why` names; `text` is what the model said last."""
    stopped = f"(stopped: {why})"
    return EndTurn(StopReason.BUDGET, f"{text}\n{stopped}" if text else stopped, error={"code": "budget", "detail": why})


def _call(asked: RequestedCall, index: int, standing: Standing, answers: LoopAnswers) -> PlannedCall:
    """One call of a reply, as the round has it."""
    agent, catalogue = standing.agent, standing.catalogue
    name = clean_text(asked.name)
    own = catalogue.own.get(name)
    if standing.last and (own is None or own.does != SUBMIT):
        record = CallRecord(call_id(standing.turn_id, standing.round, index), name, "", None, clean_text(asked.arguments))
        message = f"{name} did not run: this was the last of {standing.limits.max_rounds} rounds. Answer with what is known."
        return PlannedCall(record, CallResult(CallState.FAILED, dumps({"error": "round_limit", "message": message}), "round_limit"))
    if own is not None:
        return _own_call(asked, own, index, standing, answers)
    planned = _planned(
        asked,
        turn_id=standing.turn_id,
        round_=standing.round,
        index=index,
        catalogue=catalogue.tools,
        gates=agent.approvals,
        rule=standing.rule,
    )
    spec = catalogue.tools.get(name)
    record = replace(planned.record, asked_by=agent.name, agent=spec.agent if spec else "")
    if record.agent and planned.result is None and standing.depth >= MAX_DEPTH:
        return PlannedCall(replace(record, gate=None, approval_id=""), too_deep(name))
    return PlannedCall(record, planned.result)


def _own_call(asked: RequestedCall, tool: LoopTool, index: int, standing: Standing, answers: LoopAnswers) -> PlannedCall:
    """A call that the loop answers, under the same rules as any; only a gate that names the tool itself counts for it."""
    agent, takes_answer = standing.agent, tool.does == SUBMIT
    gates = None if agent.approvals is None else {key: gate for key, gate in agent.approvals.items() if key == tool.name}
    # a typed answer is validated by its own library, which also converts
    spec = ToolSpec(tool.name, parameters={} if takes_answer else tool.schema, idempotent=True, name=tool.name)
    planned = _planned(
        asked,
        turn_id=standing.turn_id,
        round_=standing.round,
        index=index,
        catalogue={tool.name: spec},
        gates=gates,
        rule=standing.rule,
    )
    record, result = replace(planned.record, asked_by=agent.name, loop=tool.does, schema=tool.schema), planned.result
    if takes_answer and result is not None and result.code == "invalid_arguments":
        return PlannedCall(record, answers.submitted(None, json.loads(result.content)["message"]))
    if result is not None or record.arguments is None:
        return PlannedCall(record, result)
    if planned.gated and not (takes_answer and answers.refuses(record.arguments)):
        return PlannedCall(record)
    return PlannedCall(replace(record, gate=None, approval_id=""), answers.answer(tool, record.arguments))


def _planned(
    asked: RequestedCall,
    *,
    turn_id: str,
    round_: int,
    index: int,
    catalogue: Mapping[str, ToolSpec],
    gates: Mapping[str, Gate] | None,
    rule: Rule,
) -> PlannedCall:
    name = clean_text(asked.name)
    spec = catalogue.get(name)
    raw = clean_text(asked.arguments)

    def answered(state: CallState, code: str, why: Mapping[str, object]) -> PlannedCall:
        record = CallRecord(call_id(turn_id, round_, index), name, spec.prefix if spec else "", None, raw)
        return PlannedCall(record, CallResult(state, dumps({"error": code, **why}), code))

    def refused(code: str, **why: object) -> PlannedCall:
        return answered(CallState.FAILED, code, why)

    if spec is None:
        return refused("unknown_tool", message=f"there is no tool {name!r}", **_names_like(name, catalogue))
    try:
        arguments = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        where = "the answer was cut off before they began" if raw == LOST else where
        return refused("invalid_arguments", message=f"the arguments are not valid JSON: {where}", schema=spec.parameters)
    if not isinstance(arguments, dict):
        return refused("invalid_arguments", message="the arguments must be a JSON object", schema=spec.parameters)
    arguments = clean(arguments)
    faults = schema_faults(spec.parameters, arguments)
    if faults:
        return refused("invalid_arguments", message="the arguments do not fit the tool's schema", details=faults, schema=spec.parameters)
    said = rule(name, spec.prefix, arguments)
    if isinstance(said, PolicyFailed):
        return refused("policy_failed", message=f"the agent's policy gave no verdict about {name}; it did not run")
    if isinstance(said, Deny):
        reason = clean_text(said.reason) or f"the agent's policy does not allow this call of {name}"
        return answered(CallState.DENIED, "policy_denied", {"message": reason})
    gate = ruled_gate(said, spec, gates)
    if gate is not None and gates is None:
        return refused(
            "approval_unavailable", message=f"{name} needs an approval, and this agent has nowhere to ask for one; it did not run"
        )
    takes = spec.takes if gate is not None and spec.takes is not None else spec.parameters
    faults = schema_faults(takes, arguments) if takes is not spec.parameters else []
    if faults:  # no human is asked about what the tool's owner would refuse
        return refused("invalid_arguments", message="the arguments do not fit what the tool's owner takes", details=faults, schema=takes)
    record = CallRecord(
        call_id=call_id(turn_id, round_, index),
        name=name,
        prefix=spec.prefix,
        arguments=arguments,
        raw_arguments=raw,
        idempotent=spec.idempotent,
        payload=spec.payload,
        timeout_s=spec.timeout_s,
        schema=takes,
        approval_id=approval_id(turn_id, round_, index) if gate else "",
        gate=gate,
    )
    return PlannedCall(record)


def _names_like(name: str, catalogue: Mapping[str, ToolSpec]) -> dict[str, Any]:
    """What an error about an unknown tool suggests: names that are near, and all of them where they are not too many."""
    near = closest(name, catalogue)
    named = {"closest": near} if near else {}
    return named | ({"tools": sorted(catalogue)} if len(catalogue) <= MAX_NAMES else {})


@lru_cache(maxsize=500)
def _validator(schema: str) -> Draft202012Validator:
    """The validator of a schema, given as JSON text: making one costs many times what its use does, and each step reads its schema anew."""
    return Draft202012Validator(json.loads(schema))


def schema_faults(schema: dict[str, object], arguments: dict[str, object]) -> list[dict[str, object]]:
    """Where and how `arguments` break a JSON schema; empty when they fit. A schema that is broken itself refuses
    nothing: its owner checks again."""
    try:
        found = list(_validator(dumps(schema)).iter_errors(arguments))
    except (SchemaError, ValidationError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    except Exception:  # referencing raises classes of its own for references that lead nowhere
        return []
    return [{"loc": [str(part) for part in fault.absolute_path], "msg": _fault_text(fault)} for fault in found[:20]]


def _fault_text(fault: ValidationError) -> str:
    """What is wanted, without the value that was sent."""
    wanted = fault.validator_value
    if fault.validator == "required" and isinstance(wanted, list) and isinstance(fault.instance, dict):
        missing = [name for name in wanted if name not in fault.instance]
        return f"missing: {', '.join(map(str, missing))}"
    return f"{fault.validator}: {dumps(clean(wanted))}"[:300]


def denial(state: CallState, name: str, note: str = "") -> CallResult:
    """What the model reads of a gated call that never ran: denied, expired or cancelled."""
    codes = {
        CallState.DENIED: ("approval_denied", f"{name} was denied"),
        CallState.EXPIRED: ("approval_expired", f"nobody decided about {name} in time; it did not run"),
        CallState.CANCELLED: ("cancelled", f"the call of {name} was cancelled; it did not run"),
    }
    code, text = codes[state]
    return CallResult(state, f"{code}: {text}: {note}" if note else f"{code}: {text}", code)


def unknown_outcome(name: str) -> CallResult:
    """What the model reads of a call that was asked and of which nobody knows what came."""
    text = f"unknown_outcome: {name} was asked, but its answer was lost; it may or may not have run. Do not simply call it again."
    return CallResult(CallState.UNKNOWN_OUTCOME, text, "unknown_outcome")


def unanswered(states: Sequence[CallState], names: Sequence[str]) -> list[CallResult]:
    """How the open calls of a turn that ends are closed: a claimed one may have run, the others never did."""
    return [
        unknown_outcome(name) if state is CallState.RUNNING else denial(CallState.CANCELLED, name)
        for state, name in zip(states, names, strict=True)
    ]
