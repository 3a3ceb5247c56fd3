"""plan: ask the model once, stream its tokens, commit its reply and what follows. A committed reply is never asked for again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orchestration.actions.pass_on import pass_on
from orchestration.core.agent import Agent
from orchestration.core.call import CallState
from orchestration.core.conversation import NO_RESPONSE, message_entry, messages
from orchestration.core.errors import Fenced, ModelError, StepLost, StoreUnavailable, TurnmillError
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.limits import Limits
from orchestration.core.loop import CallTools, EndTurn, PlannedCall, after_reply
from orchestration.core.model import Delta, ModelReply, Usage
from orchestration.core.safe_json import clean_text, dumps
from orchestration.core.times import rfc3339
from orchestration.core.tool import Discover, ToolSpec, attached_tools, build_catalogue, owned
from orchestration.core.turn import StopReason, state_at_end
from orchestration.models.calling import call_model
from orchestration.state.approvals import new_approval
from orchestration.state.journal import Claim, Committed, NotClaimed, TurnSoFar, reply_as_json
from orchestration.steps.faults import MAX_CLAIMS, end_with_error, log_unexpected, reached, try_again
from orchestration.wiring import Ports

#: Shortest pause between two token frames of one step, in seconds.
FRAME_PAUSE_S = 0.04

#: Characters of arguments or results that a frame carries.
MAX_FRAME_CHARS = 65_536


def plan(step: StepId, ports: Ports) -> str:
    """Run one plan step if it is to be run; returns what became of it, for the log."""
    reached("before_claim", step)
    claimed = ports.journal.claim(step)
    if isinstance(claimed, NotClaimed):
        return claimed.why
    claim, fields = claimed
    turn, _ = ports.journal.turn_so_far(fields)
    return work(claim, turn, ports)


def work(claim: Claim, turn: TurnSoFar, ports: Ports) -> str:
    """Do the plan step that `claim` holds, and every following one that needs no other task."""
    while True:
        following = _once(claim, turn, ports)
        if following is None:
            return "done"
        claim, turn = following


def _once(claim: Claim, turn: TurnSoFar, ports: Ports) -> tuple[Claim, TurnSoFar] | None:
    tokens = TokenFrames(claim, ports)
    max_attempts = Limits().max_attempts
    try:
        agent = ports.project.agent(turn.agent)
        max_attempts = agent.limits.max_attempts
        if claim.attempt > MAX_CLAIMS:
            raise StepLost(f"step {claim.step.task_id} was begun {claim.attempt - 1} times and never finished")
        catalogue = _catalogue(agent, turn, ports)
        reply = _ask(agent, turn, list(catalogue.values()), tokens)
        reached("replied", claim.step)
        return _commit(claim, turn, ports, agent, catalogue, reply, tokens)
    except (Fenced, StoreUnavailable):
        return None  # somebody else has the step, or will
    except ModelError as error:
        if error.retryable and claim.attempt < max_attempts:
            try_again(ports, claim, error.retry_after_s, void_tokens=tokens.any)
        else:
            end_with_error(ports, claim, turn.usage, f"model_{error.kind}", str(error), tokens.rest())
    except TurnmillError as error:
        end_with_error(ports, claim, turn.usage, error.code, str(error), tokens.rest())
    except Exception as error:
        log_unexpected(claim.step, error)
        if claim.attempt < max_attempts:
            try_again(ports, claim, None, void_tokens=tokens.any)
        else:
            end_with_error(ports, claim, turn.usage, "internal_error", "Internal error", tokens.rest())
    return None


def _catalogue(agent: Agent, turn: TurnSoFar, ports: Ports) -> dict[str, ToolSpec]:
    """The round's tools: the agent's own, those that discovery finds now, those attached to this turn."""
    attached = attached_tools(turn.request.tools)
    wishes = [*agent.discoveries(), *(Discover((spec.prefix,)) for spec in attached)]
    found = ports.mesh.discover(wishes) if wishes else []
    owners = {spec.prefix: spec for spec in found}
    wanted = [*agent.known_tools(), *(spec for spec in found if any(wish.includes(spec.prefix) for wish in agent.discoveries()))]
    return build_catalogue([*wanted, *(owned(spec, owners.get(spec.prefix)) for spec in attached)])


def _ask(agent: Agent, turn: TurnSoFar, specs: Sequence[ToolSpec], tokens: TokenFrames) -> ModelReply:
    system = "\n\n".join(part for part in (agent.system, turn.request.brief) if part)
    sent = messages(turn.entries, system=system, max_result_chars=agent.limits.max_tool_result_chars)
    return call_model(agent.model_named(turn.request.model), sent, tools=[spec.definition() for spec in specs] or None, sink=tokens)


def _commit(
    claim: Claim,
    turn: TurnSoFar,
    ports: Ports,
    agent: Agent,
    catalogue: dict[str, ToolSpec],
    reply: ModelReply,
    tokens: TokenFrames,
) -> tuple[Claim, TurnSoFar] | None:
    step = claim.step
    usage = turn.usage + reply.usage
    decided = after_reply(reply, turn_id=step.turn_id, round_=step.round, limits=agent.limits, catalogue=catalogue, gates=agent.approvals)
    change: dict[str, Any] = {
        "set": {f"p:{step.round}": reply_as_json(reply)},
        "usage": [reply.usage.input_tokens, reply.usage.output_tokens],
    }
    if isinstance(decided, CallTools):
        now_ms = claim.store_now_ms()
        change |= _round(turn, step, agent.name, decided, now_ms)
        change["frames"] = [*tokens.rest(), *_call_frames(step, decided.calls, now_ms)]
        committed = ports.journal.commit(step.tenant, step.turn_id, change, claim)
        reached("committed", step)
        if committed.ours:
            headers = decided.headers if any(planned.gated for planned in decided.calls) else ()
            pass_on(ports, committed.sends, headers=headers, traceparent=turn.request.traceparent)
        return None

    entry = message_entry(step.turn_id, step.round, "" if decided.text == NO_RESPONSE else decided.text, clean_text(reply.thinking))
    final = change | {
        "log": [dumps(entry)],
        "frames": [*tokens.rest(), *_end_frames(step, decided, usage)],
        "fin": _fin(decided),
        "unless_steered": step.round < agent.limits.max_rounds,
    }
    final["set"] = final["set"] | {"rounds": str(step.round)}
    committed = ports.journal.commit(step.tenant, step.turn_id, final, claim)
    reached("committed", step)
    if committed.why != "steered":
        if committed.ours:
            pass_on(ports, committed.sends)
        return None
    following = StepId(step.tenant, step.turn_id, step.round + 1, StepKind.PLAN)
    change |= {"log": [dumps(entry)], "frames": tokens.rest(), "claim": str(following)}
    change["set"] = change["set"] | {"rounds": str(step.round)}
    committed = ports.journal.commit(step.tenant, step.turn_id, change, claim)
    return next_plan(claim, ports, committed, following, replace(turn, usage=usage, entries=[*turn.entries, entry]))


def next_plan(claim: Claim, ports: Ports, committed: Committed, following: StepId, turn: TurnSoFar) -> tuple[Claim, TurnSoFar] | None:
    """The plan that a commit claimed in place, with the inputs that joined the turn meanwhile; None when the commit did not stand."""
    if committed.ours:
        pass_on(ports, committed.sends)
    if committed.why != "committed":
        return None
    joined = replace(turn, entries=[*turn.entries, *committed.joined])
    return ports.journal.claimed_next(claim, committed, following), joined


def _expires_at(planned: PlannedCall, now_ms: int) -> int:
    """When a gated call's approval expires, in ms of the store; 0 for never."""
    gate = planned.record.gate
    return now_ms + round(gate.timeout_s * 1000) if gate is not None and gate.timeout_s is not None else 0


def _round(turn: TurnSoFar, step: StepId, agent: str, decided: CallTools, now_ms: int) -> dict[str, Any]:
    """The part of a commit that opens a round."""
    calls: list[dict[str, Any]] = []
    for index, planned in enumerate(decided.calls):
        one: dict[str, Any] = {"c": dumps(planned.record.as_json())}
        if planned.result is not None:
            one |= {"state": str(planned.result.state), "step": "done", "result": dumps(planned.result.as_json())}
        elif planned.gated:
            one |= {
                "state": str(CallState.WAITING),
                "step": "gated",
                "approval": new_approval(turn.request, agent, planned.record, step.round, index, _expires_at(planned, now_ms)),
            }
        else:
            one |= {"state": str(CallState.REQUESTED), "step": "ready"}
        calls.append(one)
    change: dict[str, Any] = {"round": step.round, "calls": calls}
    if any(planned.gated for planned in decided.calls):
        change["chord"] = dumps({"headers": decided.headers})
    return change


def _call_frames(step: StepId, calls: Sequence[PlannedCall], now_ms: int) -> list[str]:
    frames = []
    for planned in calls:
        record = planned.record
        shown = record.arguments if record.arguments is not None else record.raw_arguments[:MAX_FRAME_CHARS]
        about = {"tool_call_id": record.call_id, "name": record.name}
        frames.append(frame(FrameKind.TOOL_CALL, step.turn_id, step.round, **about, arguments=shown))
        if planned.result is not None:
            frames.append(frame(FrameKind.TOOL_RESULT, step.turn_id, step.round, **about, content=planned.result.content, error=True))
        if planned.gated and record.gate is not None:
            frames.append(
                frame(
                    FrameKind.APPROVAL_REQUEST,
                    step.turn_id,
                    step.round,
                    **about,
                    approval_id=record.approval_id,
                    arguments=shown,
                    reason=record.gate.reason,
                    expires_at=rfc3339(_expires_at(planned, now_ms)),
                )
            )
    return frames


def _end_frames(step: StepId, decided: EndTurn, usage: Usage) -> list[str]:
    frames = []
    if decided.reason is StopReason.ERROR:
        frames.append(frame(FrameKind.ERROR, step.turn_id, step.round, **_FILTERED))
    else:
        frames.append(frame(FrameKind.MESSAGE, step.turn_id, step.round, content=decided.text, stop_reason=str(decided.reason)))
    counted = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    frames.append(frame(FrameKind.DONE, step.turn_id, step.round, stop_reason=str(decided.reason), usage=counted))
    return frames


_FILTERED = {"code": "model_content_filtered", "detail": "the provider cut the answer for its content"}


def _fin(decided: EndTurn) -> dict[str, str]:
    fin = {"state": str(state_at_end(decided.reason)), "stop": str(decided.reason), "answer": decided.text}
    if decided.reason is StopReason.ERROR:
        fin["error"] = dumps(_FILTERED)
    return fin


class TokenFrames:
    """Collects the pieces of an answer into frames, at most one of a kind each 40 ms; what is left goes out with the commit.

    Raises Fenced into the model's adapter when the step is no longer ours, which stops the answer.
    """

    def __init__(self, claim: Claim, ports: Ports, clock: Callable[[], float] = time.monotonic) -> None:
        self._claim = claim
        self._ports = ports
        self._clock = clock
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._last = clock()  # an answer that comes at once goes out with its commit
        self._number = 0

    @property
    def any(self) -> bool:
        """Whether a watcher has been shown something of this answer."""
        return self._number > 0

    def __call__(self, delta: Delta) -> None:
        if delta.text:
            self._text.append(delta.text)
        if delta.thinking:
            self._thinking.append(delta.thinking)
        now = self._clock()
        if now - self._last < FRAME_PAUSE_S:
            return
        frames = self.rest()
        if not frames:
            return
        self._last = now
        self._number += 1
        reached("streaming", self._claim.step)
        if not self._ports.journal.emit(self._claim, self._number, frames):
            raise Fenced(f"step {self._claim.step.task_id} was passed on, or its turn has ended")

    def rest(self) -> list[str]:
        """Frames of what was collected and not yet sent."""
        step = self._claim.step
        frames = []
        for kind, pieces in ((FrameKind.THINKING, self._thinking), (FrameKind.TOKEN, self._text)):
            text = clean_text("".join(pieces))
            if text:
                frames.append(frame(kind, step.turn_id, step.round, text=text))
            pieces.clear()
        return frames
