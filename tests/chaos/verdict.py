"""The verdict on a chaos run: what people, tools and models saw, held against what Turnmill says of it. Values in, faults out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.chaos.evidence import Evidence, Fault
from tests.chaos.told import callbacks, histories, turn_frames, watchers
from tests.chaos.workload import KEY

#: States of calls that certainly had no effect, and those that may have had one.
WITHOUT_EFFECT = ("denied", "expired", "cancelled", "failed")
#: Why a call may fail in a deployment whose processes die: nothing ran, or the tool said so itself.
FAILS_WITH = ("refused", "not_found", "mesh_unavailable", "store_unavailable", "rate_limit_exceeded", "expired", "unknown_tool")


def faults(evidence: Evidence) -> list[Fault]:
    """All that is wrong; empty for a run in which every promise was kept."""
    found = [Fault(what) for what in evidence.record.faults]
    found += [Fault("a turn does not end", turn_id) for turn_id in evidence.open_turns]
    found += [Fault(f"the model was shown: {what}") for what in evidence.model_faults]
    for check in (_submissions, _ends, _nested, _effects, _decisions, histories, turn_frames, watchers, callbacks):
        found += [fault for fault in check(evidence) if fault.turn_id not in evidence.open_turns]
    return found


def _submissions(evidence: Evidence) -> Iterator[Fault]:
    """Each submission became one turn, or joined one, or (where its sender does not know) at most one."""
    inputs = Counter(_script_name(entry["data"]) for entries in evidence.histories.values() for entry in entries if entry["dir"] == "in")
    of_name: dict[str, list[str]] = {}
    for turn_id, name in evidence.names.items():
        of_name.setdefault(name, []).append(turn_id)
    for _, submission in evidence.record.sent:
        name = submission.name
        own = of_name.pop(name, [])
        if len(own) > 1:
            yield Fault(f"submission {name} became {len(own)} turns: {own}", own[0])
        if inputs[name] > 1:
            yield Fault(f"input {name} is {inputs[name]} times in the history", own[0] if own else "")
        accepted = evidence.record.accepted.get(name)
        if accepted is None:
            if name in evidence.record.rejected and (own or inputs[name]):
                yield Fault(f"submission {name} was rejected, and became a turn", own[0] if own else "")
            continue
        if accepted.turn_id not in evidence.turns:
            yield Fault(f"submission {name} was accepted as turn {accepted.turn_id}, which is not there")
        elif accepted.turn_id in own:
            if evidence.turns[accepted.turn_id]["started_at"] and inputs[name] != 1:
                yield Fault(f"turn {name} began, and its input is {inputs[name]} times in the history", accepted.turn_id)
        elif inputs[name] != 1 or own:
            yield Fault(
                f"input {name} joined a turn, and is {inputs[name]} times in the history; turns of its own: {own}", accepted.turn_id
            )
    for name, own in of_name.items():
        if name not in evidence.scripts or own[0] not in evidence.parents:
            yield Fault(f"turns that nobody submitted: {name}", own[0])
        elif len(own) > 1 or inputs[name] != 1:
            yield Fault(f"nested {name} became {len(own)} turns: {own}, and its input is {inputs[name]} times in the history", own[0])


def _ends(evidence: Evidence) -> Iterator[Fault]:
    """Each turn ended, and for a reason that somebody gave it."""
    record = evidence.record
    interrupted = {conversation for conversation, submission in record.sent if submission.on_busy == "interrupt"}
    for turn_id, turn in evidence.turns.items():
        submission = evidence.submission_of(turn_id)
        state, reason = turn["state"], turn["stop_reason"]
        if submission is None:
            limited = _within_deadline(evidence, evidence.parents.get(turn_id, ""))
            if (state, reason) not in (("completed", "answer"), ("cancelled", "cancelled"), ("failed", "deadline") if limited else ()):
                yield Fault(f"the turn of a nested agent ended {state}, {reason}: {turn['error']}", turn_id)
        elif state == "cancelled":
            if turn_id not in record.cancel_wished and turn["conversation_id"] not in interrupted:
                yield Fault("a turn was cancelled, and nobody wished it", turn_id)
        elif turn_id in record.cancelled:
            yield Fault(f"a cancel was acknowledged, and the turn is {state}", turn_id)
        elif reason == "deadline":
            if submission.deadline_s is None:
                yield Fault("a turn without a deadline met one", turn_id)
        elif (state, reason) != ("completed", "answer"):
            yield Fault(f"a turn ended {state}, {reason}: {turn['error']}", turn_id)
        elif turn["usage"]["input_tokens"] not in _tokens(evidence, turn):
            yield Fault(f"usage {turn['usage']} after {turn['rounds']} rounds of 10 tokens and those of its agents", turn_id)
        for call in turn["calls"]:
            if call["state"] in ("requested", "waiting", "running"):
                yield Fault(f"call {call['call_id']} of an ended turn is {call['state']}", turn_id)
            code = call["error"]["code"] if call["state"] == "failed" else ""
            if code and code not in FAILS_WITH and not (code == "agent_deadline" and _within_deadline(evidence, turn_id)):
                yield Fault(f"call {call['call_id']} failed with {call['error']}", turn_id)
            if call["call_id"] in record.calls_cancelled and call["state"] not in ("cancelled", "unknown_outcome"):
                yield Fault(f"the cancel of call {call['call_id']} was acknowledged, and it is {call['state']}", turn_id)


def _within_deadline(evidence: Evidence, turn_id: str) -> bool:
    """Whether a turn, and so those of the agents that it asks, had a deadline."""
    submission = evidence.submission_of(turn_id) if turn_id in evidence.names else None
    return submission is not None and submission.deadline_s is not None


def _tokens(evidence: Evidence, turn: dict[str, Any]) -> range:
    """What a turn's models may have used: 10 tokens a round, and what the agents used that it asked; of those whose calls were
    cancelled, as much as came before the turn's own end."""
    asked = [(call, evidence.turns[call["child_turn_id"]]) for call in turn["calls"] if call.get("child_turn_id") in evidence.turns]
    least = turn["rounds"] + sum(child["rounds"] for call, child in asked if call["state"] == "completed")
    most = turn["rounds"] + sum(child["rounds"] + (call["state"] != "completed") for call, child in asked)
    return range(10 * least, 10 * most + 1)


def _nested(evidence: Evidence) -> Iterator[Fault]:
    """A call of an agent is what its turn became; a turn that was cancelled was cancelled with its call, or with the turn that asked."""
    answered: set[str] = set()
    for turn_id, turn in evidence.turns.items():
        for call in turn["calls"]:
            child = evidence.turns.get(call.get("child_turn_id", ""))
            if child is None:
                if call["state"] == "completed" and "child_turn_id" in call:
                    yield Fault(f"call {call['call_id']} is completed, and no agent was asked", turn_id)
                continue
            answered.add(child["turn_id"])
            if evidence.parents.get(child["turn_id"]) != turn_id:
                yield Fault(f"the turn of call {call['call_id']} says that {evidence.parents.get(child['turn_id'])} asked for it", turn_id)
            if call["state"] == "completed" and child["state"] != "completed":
                yield Fault(f"call {call['call_id']} is completed, and its agent's turn {child['state']}", turn_id)
            if child["state"] == "completed" and call["state"] not in ("completed", "cancelled", "unknown_outcome"):
                yield Fault(f"an agent's turn is completed, and its call {call['call_id']} {call['state']}: {call['error']}", turn_id)
            if child["state"] == "cancelled" and call["state"] not in ("cancelled", "unknown_outcome"):
                yield Fault(f"an agent's turn was cancelled, and its call {call['call_id']} is {call['state']}", turn_id)
    for stray in evidence.parents.keys() - answered:
        yield Fault("the turn of a nested agent that no call knows", stray)


def _effects(evidence: Evidence) -> Iterator[Fault]:
    """Each effect happened at most once; exactly once where its call completed, never where it says that nothing ran."""
    known: set[str] = set()
    for turn_id, turn in evidence.turns.items():
        for call in turn["calls"]:
            key = (call["arguments"] if isinstance(call["arguments"], dict) else json.loads(call["arguments"])).get(KEY)
            if key is None:  # a handoff, or a call of an agent
                continue
            known.add(key)
            count = evidence.effects[key]
            if count > 1:
                yield Fault(f"effect {key} happened {count} times; its call {call['call_id']} is {call['state']}", turn_id)
            if call["state"] == "completed" and count != 1:
                yield Fault(f"call {call['call_id']} is completed, and effect {key} happened {count} times", turn_id)
            if call["state"] in WITHOUT_EFFECT and count:
                yield Fault(f"call {call['call_id']} is {call['state']} ({call['error']}), and effect {key} happened", turn_id)
    for key in evidence.effects.keys() - known:
        yield Fault(f"effect {key} happened, and no turn knows a call of it")


def _decisions(evidence: Evidence) -> Iterator[Fault]:
    """A decision that was acknowledged holds, and only one of two that differ is."""
    calls = {
        call["approval_id"]: (turn_id, call) for turn_id, turn in evidence.turns.items() for call in turn["calls"] if "approval_id" in call
    }
    for approval_id, decisions in evidence.record.decided.items():
        turn_id, call = calls[approval_id]
        if len({decision.approved for decision in decisions}) > 1:
            yield Fault(f"both a yes and a no to {approval_id} were acknowledged", turn_id)
            continue
        decision = decisions[0]
        if not decision.approved and call["state"] != "denied":
            yield Fault(f"{approval_id} was denied, and its call is {call['state']}", turn_id)
        if decision.approved:
            if call["state"] in ("denied", "expired"):
                yield Fault(f"{approval_id} was approved, and its call is {call['state']}", turn_id)
            if call["arguments"] != decision.arguments:
                yield Fault(f"{approval_id} was approved with {decision.arguments}, and {call['arguments']} is what ran", turn_id)


def _script_name(data: Any) -> str:
    return str(json.loads(data)["name"])
