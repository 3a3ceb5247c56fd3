"""plan: ask the model once, stream its tokens, commit its reply and what follows. A committed reply is never asked for again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestration.actions.pass_on import pass_on
from orchestration.core.agent import Agent
from orchestration.core.agent_tool import depth_of
from orchestration.core.call import CallState
from orchestration.core.catalogue import Catalogue
from orchestration.core.conversation import Entry, cut, message_entry
from orchestration.core.errors import Fenced, MeshUnavailable, ModelBusy, ModelError, StepLost, StoreUnavailable, TurnmillError
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.limits import Limits, Spent
from orchestration.core.local_calls import handoffs_so_far, invalid_so_far
from orchestration.core.loop import after_reply, after_round, before_asking, overtaken
from orchestration.core.model import ModelReply
from orchestration.core.outbound import Way
from orchestration.core.round import CallTools, EndTurn, NextRound, PlannedCall, Standing
from orchestration.core.safe_json import clean_text, dumps
from orchestration.core.turn import StopReason
from orchestration.models.limited import counted
from orchestration.state.journal import Claim, Committed, NotClaimed, TurnSoFar, reply_as_json
from orchestration.state.model_limits import ModelPlaces
from orchestration.steps.asking import approval_frame, approval_of, log_refused, rule_of
from orchestration.steps.claims import holds_claims
from orchestration.steps.ending import MAX_FRAME_CHARS, asked_log, ending, round_log
from orchestration.steps.faults import MAX_CLAIMS, end_with_error, log_unexpected, reached, try_again, wake
from orchestration.steps.request import ask, check_price, compact_when_due, round_catalogue, spend_of, spent_on
from orchestration.steps.rounds import tell_round
from orchestration.steps.token_frames import TokenFrames
from orchestration.wiring import Ports

#: Pause of a plan step in a process that does not know yet which tools the mesh has, in seconds; another process may know.
MESH_PAUSE_S = 0.3


@holds_claims
def plan(step: StepId, ports: Ports) -> str:
    """Run one plan step if it is to be run; returns what became of it, for the log."""
    reached("before_claim", step)
    claimed = ports.journal.claim(step)
    if isinstance(claimed, NotClaimed):
        return claimed.why
    claim, fields = claimed
    turn, _ = ports.journal.turn_so_far(fields)
    ports.project.compare(turn.request.agent, turn.request.snapshot)
    # a first attempt that comes as a task was given back before it was tried, so its round was told of
    return work(claim, turn, ports, told=claim.attempt == 1)


def work(claim: Claim, turn: TurnSoFar, ports: Ports, *, told: bool = False) -> str:
    """Do the plan step that `claim` holds, and every following one that needs no other task. `told` when
    `on_round` knows the round before."""
    while True:
        if not told:
            tell_round(claim, turn, ports)
        told = False
        following = _once(claim, turn, ports)
        if following is None:
            return "done"
        claim, turn = following


def _once(claim: Claim, turn: TurnSoFar, ports: Ports) -> tuple[Claim, TurnSoFar] | None:
    tokens = TokenFrames(claim, ports)
    places = ModelPlaces(ports.store, claim, lambda steps: wake(ports, steps))
    max_attempts = Limits().max_attempts
    try:
        agent = ports.project.agent(turn.agent)
        max_attempts = agent.limits.max_attempts
        if claim.attempt > MAX_CLAIMS:
            raise StepLost(f"step {claim.step.task_id} was begun {claim.attempt - 1} times and never finished")
        turn = _with_others(claim, turn, agent, ports)
        if over := _over(claim, turn, agent):
            return _not_asked(claim, turn, ports, over)
        check_price(agent, turn.request, ports)
        catalogue = round_catalogue(agent, turn.request, ports, claim.step.round, turn.entries, sure=True)
        with counted(places):
            before, turn = turn, compact_when_due(claim, turn, agent, ports)
            if turn is not before and (over := _over(claim, turn, agent)):
                return _not_asked(claim, turn, ports, over)  # a compactor's model used the rest
            reply, turn = ask(claim, turn, agent, catalogue, ports, tokens)
        reached("replied", claim.step)
        return _commit(claim, turn, ports, agent, catalogue, reply, tokens)
    except Fenced:
        return None  # somebody else has the step
    except StoreUnavailable:
        try_again(ports, claim, None, void_tokens=tokens.any, uncounted=True)  # it is ours as long as this process lives
    except MeshUnavailable:
        try_again(ports, claim, MESH_PAUSE_S, uncounted=True)  # nothing was asked yet
    except ModelBusy as error:
        try_again(ports, claim, error.retry_after_s, uncounted=True)
        places.look_again()
    except ModelError as error:
        if error.retryable and claim.attempt < max_attempts:
            try_again(ports, claim, error.retry_after_s, void_tokens=tokens.any)
        else:
            end_with_error(ports, claim, turn, f"model_{error.kind}", str(error), tokens.rest())
    except TurnmillError as error:
        end_with_error(ports, claim, turn, error.code, str(error), tokens.rest())
    except Exception as error:
        log_unexpected(claim.step, error)
        if claim.attempt < max_attempts:
            try_again(ports, claim, None, void_tokens=tokens.any)
        else:
            end_with_error(ports, claim, turn, "internal_error", "Internal error", tokens.rest())
    return None


def _with_others(claim: Claim, turn: TurnSoFar, agent: Agent, ports: Ports) -> TurnSoFar:
    """The turn with what its budgets depend on besides itself: the age of its conversation, and what was used on the accounts above."""
    if agent.limits.conversation is not None and turn.entries:
        now_ms = claim.store_now_ms()
        turn = turn.aged((now_ms - turn.entries[0].get("ms", now_ms)) / 1000)
    return replace(turn, accounts=ports.journal.accounts(turn.request)) if turn.request.accounts else turn


def _over(claim: Claim, turn: TurnSoFar, agent: Agent) -> EndTurn | None:
    return before_asking(agent, agent.limits, claim.step.round, turn.spent, turn.conversation_spent, turn.accounts)


def _not_asked(claim: Claim, turn: TurnSoFar, ports: Ports, over: EndTurn) -> tuple[Claim, TurnSoFar] | None:
    entry = message_entry(claim.step.turn_id, claim.step.round, over.text)
    return end(claim, turn, ports, over, {"log": [dumps(entry)]}, [entry])


def _commit(
    claim: Claim,
    turn: TurnSoFar,
    ports: Ports,
    agent: Agent,
    catalogue: Catalogue,
    reply: ModelReply,
    tokens: TokenFrames,
) -> tuple[Claim, TurnSoFar] | None:
    step = claim.step
    used = spent_on(reply, agent, turn.request, ports)
    last_input_tokens = reply.usage.input_tokens or turn.last_input_tokens
    turn = replace(turn.with_spent(used), usage=turn.usage + reply.usage, last_input_tokens=last_input_tokens)
    standing = _standing(step, turn, agent, catalogue)
    decided = after_reply(reply, standing)
    calls = decided.calls
    asked = Spent(tool_calls=sum(planned.result is None and not planned.record.loop for planned in calls))
    turn = turn.with_spent(asked)
    replied: dict[str, Any] = {
        "set": {f"p:{step.round}": reply_as_json(reply)},
        "spend": spend_of(used),
        "conv_set": {"last_in": str(turn.last_input_tokens)},
        "frames": tokens.rest(),
    }
    change = replied | {"spend": spend_of(used + asked)}
    if calls:
        now_ms = claim.store_now_ms()
        change |= _round(ports, turn, step, agent.name, decided, now_ms)
        change["frames"] = replied["frames"] + _call_frames(turn, step, agent.name, calls, now_ms)
        log_refused(step, calls)
    if isinstance(decided, CallTools) and all(planned.plain for planned in calls):
        change["asked"] = dumps(asked_log(step, reply, [planned.record for planned in calls]))
    if isinstance(decided, CallTools) and decided.headers:
        if _dispatch(claim, turn, ports, decided, change):
            return None
        # others on the same account were faster
        used_by_now = replace(standing, accounts=ports.journal.accounts(turn.request))
        decided, calls, change = overtaken(decided, used_by_now), (), replied
    change["set"]["rounds"] = str(step.round)
    closed = [(planned.record, planned.result) for planned in calls if planned.result is not None]
    if calls:
        entries = round_log(step, reply, closed)
    else:
        entries = [message_entry(step.turn_id, step.round, decided.text, clean_text(reply.thinking), reply.thinking_blocks)]
    change["log"] = [dumps(entry) for entry in entries]
    following = decided if isinstance(decided, EndTurn) else after_round(decided.text, closed)
    if isinstance(following, EndTurn):
        return end(claim, turn, ports, following, change, entries, standing.limits)
    return go_on(claim, turn, ports, change, entries, following)


def _standing(step: StepId, turn: TurnSoFar, agent: Agent, catalogue: Catalogue) -> Standing:
    return Standing(
        turn_id=step.turn_id,
        round=step.round,
        agent=agent,
        limits=agent.limits,
        catalogue=catalogue,
        spent=turn.spent,
        conversation_spent=turn.conversation_spent,
        accounts=turn.accounts,
        invalid=invalid_so_far(turn.entries, step.turn_id) if agent.output is not None else 0,
        handoffs=handoffs_so_far(turn.entries, step.turn_id) if agent.handoffs else 0,
        depth=depth_of(turn.request),
        rule=rule_of(agent, turn.request),
    )


def _dispatch(claim: Claim, turn: TurnSoFar, ports: Ports, decided: CallTools, change: dict[str, Any]) -> bool:
    """Open a round whose calls have steps, and send those that may run. False when a shared budget has no room for them any more."""
    step = claim.step
    bounded = [(account.kind, account.id, account.bounds.max_tool_calls) for account in turn.accounts]
    room = [one for one in bounded if one[2] is not None]
    if room and "tools" in change["spend"]:
        change["room"] = room
    if "chord" not in change:
        sent = decided.headers[:1] if decided.sequential else decided.headers
        change["ring"] = ports.queue.ring([StepId(step.tenant, step.turn_id, step.round, StepKind.TOOL, index) for index in sent])
    committed = ports.journal.commit(step.tenant, step.turn_id, change, claim)
    reached("committed", step)
    if committed.ours:
        headers = decided.headers if any(planned.gated for planned in decided.calls) else ()
        pass_on(ports, committed.sends, headers=headers, traceparent=turn.request.traceparent)
    return committed.why != "over"


def end(
    claim: Claim,
    turn: TurnSoFar,
    ports: Ports,
    decided: EndTurn,
    change: dict[str, Any],
    entries: Sequence[Entry],
    limits: Limits | None = None,
) -> tuple[Claim, TurnSoFar] | None:
    """End the turn, unless an input joined it while its answer was made and `limits` leave room: then it goes on with that."""
    step = claim.step
    final = change | ending(step, turn.request, decided, turn.usage, change.get("frames", ()), cost_micros=turn.spent.cost_micros)
    agent = ports.project.agents.get(turn.agent)
    if agent is not None and agent.on_round is not None:
        final["fin"]["tell"] = str(Way.ROUND)
        final["set"] = final.get("set", {}) | {"ended_by": agent.name}
    final["unless_steered"] = limits is not None and _may_go_on(decided, limits, step.round)
    committed = ports.journal.commit(step.tenant, step.turn_id, final, claim)
    reached("committed", step)
    if committed.why == "steered":
        return go_on(claim, turn, ports, change, entries, NextRound())
    if committed.ours:
        pass_on(ports, committed.sends)
    return None


def _may_go_on(decided: EndTurn, limits: Limits, round_: int) -> bool:
    """Whether a turn that would end now can still take an input that joined it."""
    return decided.reason in (StopReason.ANSWER, StopReason.EMPTY) and (limits.max_rounds is None or round_ < limits.max_rounds)


def go_on(
    claim: Claim, turn: TurnSoFar, ports: Ports, change: dict[str, Any], entries: Sequence[Entry], following: NextRound
) -> tuple[Claim, TurnSoFar] | None:
    """Commit a round that is closed and claim the next plan in place; None when the commit did not stand."""
    step = claim.step
    plan_step = StepId(step.tenant, step.turn_id, step.round + 1, StepKind.PLAN)
    change = change | {"claim": str(plan_step)}
    if following.agent:
        change["set"] = change.get("set", {}) | {"active": following.agent}
        change["conv_set"] = change.get("conv_set", {}) | {"active": following.agent, "active_from": turn.request.agent}
        change["frames"] = [*change.get("frames", ()), frame(FrameKind.HANDOFF, step.turn_id, step.round, name=following.agent)]
        turn = replace(turn, agent=following.agent)
    committed = ports.journal.commit(step.tenant, step.turn_id, change, claim)
    return next_plan(claim, ports, committed, plan_step, replace(turn, entries=[*turn.entries, *entries]))


def next_plan(claim: Claim, ports: Ports, committed: Committed, following: StepId, turn: TurnSoFar) -> tuple[Claim, TurnSoFar] | None:
    """The plan that a commit claimed in place, with the inputs that joined the turn meanwhile; None when the commit did not stand."""
    if committed.ours:
        pass_on(ports, committed.sends)
    if committed.why != "committed":
        return None
    joined = replace(turn, entries=[*turn.entries, *committed.joined])
    return ports.journal.claimed_next(claim, committed, following), joined


def _round(ports: Ports, turn: TurnSoFar, step: StepId, agent: str, decided: CallTools | EndTurn, now_ms: int) -> dict[str, Any]:
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
                "approval": approval_of(ports, turn.request, agent, planned.record, step, index, now_ms),
            }
        else:
            one |= {"state": str(CallState.REQUESTED), "step": "ready"}
        calls.append(one)
    change: dict[str, Any] = {"round": step.round, "calls": calls}
    if isinstance(decided, CallTools):
        if any(planned.gated for planned in decided.calls):
            change["chord"] = dumps({"headers": decided.headers})
        if decided.sequential and len(decided.headers) > 1:
            change["sequential"] = True
    return change


def _call_frames(turn: TurnSoFar, step: StepId, agent: str, calls: Sequence[PlannedCall], now_ms: int) -> list[str]:
    frames = []
    for index, planned in enumerate(calls):
        record = planned.record
        shown = record.arguments if record.arguments is not None else record.raw_arguments[:MAX_FRAME_CHARS]
        about = {"tool_call_id": record.call_id, "name": record.name}
        frames.append(frame(FrameKind.TOOL_CALL, step.turn_id, step.round, **about, arguments=shown))
        if planned.result is not None:
            told = {"content": cut(planned.result.content, MAX_FRAME_CHARS), "error": planned.result.error}
            frames.append(frame(FrameKind.TOOL_RESULT, step.turn_id, step.round, **about, **told))
        if planned.gated:
            frames.append(approval_frame(turn.request, agent, record, step, index, now_ms))
    return frames
