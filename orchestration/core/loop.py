"""What may happen next in a turn. Values in, values out: no clock, no randomness, no I/O.

`after_reply` follows a plan, `after_round` an observe. The steps in `orchestration/steps/` do what is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.conversation import NO_RESPONSE
from orchestration.core.gate import Gate, gate_for
from orchestration.core.ids import approval_id, call_id
from orchestration.core.limits import Limits
from orchestration.core.model import ModelReply, RequestedCall
from orchestration.core.safe_json import clean, clean_text, dumps
from orchestration.core.tool import ToolSpec
from orchestration.core.turn import StopReason


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call of the round to come. `result` is set when the loop answers it itself: such a call never has a step."""

    record: CallRecord
    result: CallResult | None = None

    @property
    def gated(self) -> bool:
        """Whether a human is asked before it runs."""
        return self.result is None and self.record.gate is not None


@dataclass(frozen=True, slots=True)
class CallTools:
    """The model asked for tools: these calls make up the round."""

    text: str
    calls: tuple[PlannedCall, ...]

    @property
    def headers(self) -> list[int]:
        """The indexes of the calls that have a step."""
        return [index for index, planned in enumerate(self.calls) if planned.result is None]


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The turn ends with `text` as its answer."""

    reason: StopReason
    text: str


@dataclass(frozen=True, slots=True)
class NextRound:
    """The model is asked again."""


def after_reply(
    reply: ModelReply,
    *,
    turn_id: str,
    round_: int,
    limits: Limits,
    catalogue: Mapping[str, ToolSpec],
    gates: Mapping[str, Gate] | None,
) -> CallTools | EndTurn:
    """What follows a model's reply: the calls that it asked for, or the end of the turn.

    A call that cannot run (an unknown tool, broken arguments, a gate without anywhere to ask) is answered at once with an
    error that helps the model; it passes no gate and asks none.
    """
    text = clean_text(reply.content)
    if not reply.tool_calls:
        if reply.finish_reason == "content_filter":
            return EndTurn(StopReason.ERROR, text)
        return EndTurn(StopReason.ANSWER, text) if text else EndTurn(StopReason.EMPTY, NO_RESPONSE)
    if round_ >= limits.max_rounds:
        limit = f"(reached tool call limit of {limits.max_rounds} rounds without a final answer)"
        return EndTurn(StopReason.ROUND_LIMIT, f"{text}\n{limit}" if text else limit)
    calls = tuple(
        _planned(asked, turn_id=turn_id, round_=round_, index=index, catalogue=catalogue, gates=gates)
        for index, asked in enumerate(reply.tool_calls)
    )
    return CallTools(text, calls)


def _planned(
    asked: RequestedCall,
    *,
    turn_id: str,
    round_: int,
    index: int,
    catalogue: Mapping[str, ToolSpec],
    gates: Mapping[str, Gate] | None,
) -> PlannedCall:
    name = clean_text(asked.name)
    spec = catalogue.get(name)
    raw = clean_text(asked.arguments)

    def refused(code: str, **why: object) -> PlannedCall:
        record = CallRecord(call_id(turn_id, round_, index), name, spec.prefix if spec else "", None, raw)
        return PlannedCall(record, CallResult(CallState.FAILED, dumps({"error": code, **why}), code))

    if spec is None:
        return refused("unknown_tool", message=f"there is no tool {name!r}", tools=sorted(catalogue))
    try:
        arguments = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        return refused("invalid_arguments", message=f"the arguments are not valid JSON: {where}", schema=spec.parameters)
    if not isinstance(arguments, dict):
        return refused("invalid_arguments", message="the arguments must be a JSON object", schema=spec.parameters)
    arguments = clean(arguments)
    faults = schema_faults(spec.parameters, arguments)
    if faults:
        return refused("invalid_arguments", message="the arguments do not fit the tool's schema", details=faults, schema=spec.parameters)
    gate = gate_for(spec, dict(gates or {}))
    if gate is not None and gates is None:
        return refused(
            "approval_unavailable", message=f"{name} needs an approval, and this agent has nowhere to ask for one; it did not run"
        )
    record = CallRecord(
        call_id=call_id(turn_id, round_, index),
        name=name,
        prefix=spec.prefix,
        arguments=arguments,
        raw_arguments=raw,
        idempotent=spec.idempotent,
        payload=spec.payload,
        timeout_s=spec.timeout_s,
        schema=spec.parameters,
        approval_id=approval_id(turn_id, round_, index) if gate else "",
        gate=gate,
    )
    return PlannedCall(record)


def schema_faults(schema: dict[str, object], arguments: dict[str, object]) -> list[dict[str, object]]:
    """Where and how `arguments` break a JSON schema; empty when they fit. A schema that is broken itself refuses
    nothing: its owner checks again."""
    try:
        found = list(Draft202012Validator(schema).iter_errors(arguments))
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
