"""observe: put a round's results into the conversation, in the order of the calls, and go on with the next plan in the same task.

Where all calls of a round were tools of the mesh, each step has left its entry of the log, and the journal itself puts them
together when the observe is claimed: one round trip less. What needs thought (a handoff, a typed answer, a denied call) is done here.
"""

from __future__ import annotations

from orchestration.core.call import CallResult, CallState
from orchestration.core.conversation import NO_RESULT
from orchestration.core.errors import StepLost, StoreUnavailable
from orchestration.core.ids import StepId
from orchestration.core.limits import Limits
from orchestration.core.loop import after_round
from orchestration.core.round import NextRound
from orchestration.core.safe_json import clean_text, dumps
from orchestration.state.journal import Claim, NotClaimed, RoundSoFar, TurnSoFar
from orchestration.steps.claims import holds_claims
from orchestration.steps.ending import round_log
from orchestration.steps.faults import MAX_CLAIMS, end_with_error, log_unexpected, reached, try_again
from orchestration.steps.plan import end, go_on, work
from orchestration.wiring import Ports


@holds_claims
def observe(step: StepId, ports: Ports) -> str:
    """Run one observe step if it is to be run; returns what became of it, for the log."""
    reached("before_claim", step)
    claimed = ports.journal.claim(step)
    if isinstance(claimed, NotClaimed):
        return claimed.why
    claim, fields = claimed
    if claim.step != step:
        reached("observing", step)
        reached("committed", step)
        turn, _ = ports.journal.turn_so_far(fields)
        return work(claim, turn, ports)
    known: TurnSoFar | None = None
    try:
        if claim.attempt > MAX_CLAIMS:
            raise StepLost(f"step {step.task_id} was begun {claim.attempt - 1} times and never finished")
        turn, rest = ports.journal.turn_so_far(fields)
        known = turn
        round_ = ports.journal.round_so_far(rest)
        reached("observing", step)
        following = _commit(claim, turn, round_, ports)
    except StoreUnavailable:
        try_again(ports, claim, None, uncounted=True)
        return "again"
    except Exception as error:
        log_unexpected(step, error)
        if claim.attempt < Limits().max_attempts:
            try_again(ports, claim, None)
        else:
            end_with_error(ports, claim, known, "internal_error", "Internal error", [])
        return "failed"
    reached("committed", step)
    return work(*following, ports) if following else "fenced"


def _commit(claim: Claim, turn: TurnSoFar, round_: RoundSoFar, ports: Ports) -> tuple[Claim, TurnSoFar] | None:
    step = claim.step
    calls = [(call.record, call.result or CallResult(CallState.FAILED, NO_RESULT)) for call in round_.calls]
    entries = round_log(step, round_.reply, calls)
    change = {"set": {"rounds": str(step.round)}, "log": [dumps(entry) for entry in entries]}
    following = after_round(clean_text(round_.reply.content), calls)
    if isinstance(following, NextRound):
        return go_on(claim, turn, ports, change, entries, following)
    return end(claim, turn, ports, following, change, entries)
