"""The verdict on a chaos run: what people, tools and models saw, held against what Turnmill says of it. Values in, faults out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.record import Record, Watch
from tests.chaos.workload import KEY, Submission

#: States of calls that certainly had no effect, and those that may have had one.
WITHOUT_EFFECT = ("denied", "expired", "cancelled", "failed")
#: Why a call may fail in a deployment whose processes die: nothing ran, or the tool said so itself.
FAILS_WITH = ("refused", "not_found", "mesh_unavailable", "store_unavailable", "rate_limit_exceeded", "expired", "unknown_tool")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that must not be, and the turn that shows it (empty where no turn does)."""

    what: str
    turn_id: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at the end.

    Args:
        turns: every turn by id, as the API shows it; those that nobody knows of by name included.
        names: what each turn's input calls itself.
        histories: each conversation's history, as the API shows it.
        frames: each conversation's stored frames: number, turn, frame.
        effects: how often each effect happened.
        model_faults: what the model found wrong with the messages that it was shown.
        open_turns: turns that were waited for in vain; little else can be said of them.
    """

    record: Record
    turns: dict[str, dict[str, Any]]
    names: dict[str, str]
    histories: dict[str, list[dict[str, Any]]]
    frames: dict[str, list[tuple[int, str, dict[str, Any]]]]
    effects: Counter[str]
    model_faults: list[str]
    open_turns: list[str]

    def submissions(self) -> dict[str, Submission]:
        """What was submitted, by name."""
        return {submission.name: submission for _, submission in self.record.sent}


def faults(evidence: Evidence) -> list[Fault]:
    """All that is wrong; empty for a run in which every promise was kept."""
    found = [Fault(what) for what in evidence.record.faults]
    found += [Fault("a turn does not end", turn_id) for turn_id in evidence.open_turns]
    found += [Fault(f"the model was shown: {what}") for what in evidence.model_faults]
    for check in (_submissions, _ends, _effects, _decisions, _histories, _turn_frames, _watches):
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
        yield Fault(f"turns that nobody submitted: {name}", own[0])


def _ends(evidence: Evidence) -> Iterator[Fault]:
    """Each turn ended, and for a reason that somebody gave it."""
    record = evidence.record
    interrupted = {conversation for conversation, submission in record.sent if submission.on_busy == "interrupt"}
    for turn_id, turn in evidence.turns.items():
        submission = evidence.submissions().get(evidence.names[turn_id])
        if submission is None:
            continue
        state, reason = turn["state"], turn["stop_reason"]
        if state == "cancelled":
            if turn_id not in record.cancel_wished and turn["conversation_id"] not in interrupted:
                yield Fault("a turn was cancelled, and nobody wished it", turn_id)
        elif turn_id in record.cancelled:
            yield Fault(f"a cancel was acknowledged, and the turn is {state}", turn_id)
        elif reason == "deadline":
            if submission.deadline_s is None:
                yield Fault("a turn without a deadline met one", turn_id)
        elif (state, reason) != ("completed", "answer"):
            yield Fault(f"a turn ended {state}, {reason}: {turn['error']}", turn_id)
        elif turn["usage"]["input_tokens"] != 10 * turn["rounds"]:
            yield Fault(f"usage {turn['usage']} after {turn['rounds']} rounds of 10 tokens", turn_id)
        for call in turn["calls"]:
            if call["state"] in ("requested", "waiting", "running"):
                yield Fault(f"call {call['call_id']} of an ended turn is {call['state']}", turn_id)
            if call["state"] == "failed" and call["error"]["code"] not in FAILS_WITH:
                yield Fault(f"call {call['call_id']} failed with {call['error']}", turn_id)
            if call["call_id"] in record.calls_cancelled and call["state"] not in ("cancelled", "unknown_outcome"):
                yield Fault(f"the cancel of call {call['call_id']} was acknowledged, and it is {call['state']}", turn_id)


def _effects(evidence: Evidence) -> Iterator[Fault]:
    """Each effect happened at most once; exactly once where its call completed, never where it says that nothing ran."""
    known: set[str] = set()
    for turn_id, turn in evidence.turns.items():
        for call in turn["calls"]:
            key = call["arguments"][KEY] if isinstance(call["arguments"], dict) else json.loads(call["arguments"])[KEY]
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


def _histories(evidence: Evidence) -> Iterator[Fault]:
    """Each conversation's history is well paired, one turn after the other, in the order of arrival."""
    for conversation_id, entries in evidence.histories.items():
        began: list[str] = []
        current = ""
        pending: list[str] = []
        last_text: dict[str, str] = {}
        results: Counter[str] = Counter()
        for entry in entries:
            data, turn_id = entry["data"], entry["turn_id"]
            if entry["dir"] == "in":
                if pending:
                    yield Fault(f"an input stands between a call and its result in {conversation_id}", current)
                if turn_id in evidence.turns:
                    if turn_id in began:
                        yield Fault(f"a turn's input is twice in {conversation_id}", turn_id)
                    began.append(turn_id)
                    current = turn_id
                continue
            if turn_id != current:
                yield Fault(f"entry {entry['n']} of {conversation_id} belongs to {turn_id}, while {current} runs", turn_id)
            if data["kind"] == "tool_result":
                results[data["tool_call_id"]] += 1
                if not pending or pending.pop(0) != data["tool_call_id"]:
                    yield Fault(f"a result without its call in {conversation_id}, entry {entry['n']}", turn_id)
                continue
            if pending:
                yield Fault(f"calls without results in {conversation_id}: {pending}", turn_id)
            pending = [call["id"] for call in data["calls"]] if data["kind"] == "tool_calls" else []
            last_text[turn_id] = data["content"]
        if pending:
            yield Fault(f"calls without results at the end of {conversation_id}: {pending}", current)
        for turn_id in (turn_id for turn_id, turn in evidence.turns.items() if turn["conversation_id"] == conversation_id):
            turn = evidence.turns[turn_id]
            if turn["state"] == "completed" and last_text.get(turn_id) != turn["answer"]:
                yield Fault(f"the answer is {turn['answer']!r}, and the history ends with {last_text.get(turn_id)!r}", turn_id)
            missing = [call["call_id"] for call in turn["calls"] if results[call["call_id"]] != 1]
            if missing:
                yield Fault(f"calls that have not one result in the history: {missing}", turn_id)
        yield from _order(evidence, conversation_id, began)


def _order(evidence: Evidence, conversation_id: str, began: list[str]) -> Iterator[Fault]:
    """What was queued begins after all that was submitted before; only an interruption goes ahead."""
    sent = [submission.name for conversation, submission in evidence.record.sent if conversation == conversation_id]
    submissions = evidence.submissions()
    for place, turn_id in enumerate(began):
        name = evidence.names[turn_id]
        for later in began[place + 1 :]:
            before = evidence.names[later]
            if name in sent and before in sent and sent.index(before) < sent.index(name) and submissions[name].on_busy != "interrupt":
                yield Fault(f"{name} began before {before}, which had been submitted earlier", turn_id)


def _turn_frames(evidence: Evidence) -> Iterator[Fault]:
    """The stored frames of a turn tell what the turn is: each call and result once, its tokens once, `done` once and last."""
    submissions = evidence.submissions()
    for conversation_id, stored in evidence.frames.items():
        tokens = {
            submission.script.get("tokens", 0)
            for name, submission in submissions.items()
            if f"chaos-{name.split('-')[0]}" == conversation_id
        }
        of_turn: dict[str, list[dict[str, Any]]] = {}
        for _, turn_id, frame in stored:
            of_turn.setdefault(turn_id, []).append(frame)
        for turn_id, frames in of_turn.items():
            if turn_id in evidence.turns:
                for what in _one_turn(evidence.turns[turn_id], frames, tokens):
                    yield Fault(what, turn_id)


def _one_turn(turn: dict[str, Any], frames: list[dict[str, Any]], tokens: set[int]) -> Iterator[str]:
    kinds = Counter(frame["kind"] for frame in frames)
    if kinds["done"] != 1 or frames[-1]["kind"] != "done":
        yield f"{kinds['done']} done frames, and the last frame is {frames[-1]['kind']}"
    elif frames[-1]["stop_reason"] != turn["stop_reason"]:
        yield f"done says {frames[-1]['stop_reason']}, and the turn {turn['stop_reason']}"
    calls = Counter({call["call_id"]: 1 for call in turn["calls"]})
    for kind in ("tool_call", "tool_result"):
        told = Counter(frame["tool_call_id"] for frame in frames if frame["kind"] == kind)
        if told != calls:
            yield f"{kind} frames {dict(told)} for the calls {list(calls)}"
    asked = Counter(frame["approval_id"] for frame in frames if frame["kind"] == "approval_request")
    answered = Counter(frame["approval_id"] for frame in frames if frame["kind"] == "approval_decision")
    wanted = Counter({call["approval_id"]: 1 for call in turn["calls"] if "approval_id" in call})
    if not asked == answered == wanted:
        yield f"approvals {list(wanted)}, asked for {dict(asked)} times, answered {dict(answered)} times"
    told_text: dict[int, list[str]] = {}
    for frame in frames:
        if frame["kind"] == "token":
            told_text.setdefault(frame["round"], []).extend(frame["text"].split())
        elif frame["kind"] == "retry":
            told_text[frame["round"]] = []
    for round_, words in told_text.items():
        whole = turn["state"] == "completed"
        if words != [str(number) for number in range(len(words))] or (whole and len(words) not in tokens):
            yield f"the tokens of round {round_} are {' '.join(words)}"


def _watches(evidence: Evidence) -> Iterator[Fault]:
    """Each watcher saw each frame once, in order, with the bytes that are stored; of a turn up to its `done`, and nothing after."""
    for watch in evidence.record.watches:
        for what in _one_watch(evidence, watch):
            yield Fault(
                f"a watcher of {'a turn' if watch.turn_id else watch.conversation_id} ({watch.connections} connections): {what}",
                watch.turn_id,
            )


def _one_watch(evidence: Evidence, watch: Watch) -> Iterator[str]:
    stored = [(seq, turn_id, frame) for seq, turn_id, frame in evidence.frames[watch.conversation_id] if watch.turn_id in ("", turn_id)]
    seen = [frame for frame in watch.frames if frame.seq]
    numbers = [frame.seq for frame in seen]
    if unnumbered := [frame.data for frame in watch.frames if not frame.seq]:
        yield f"was told {unnumbered[:3]}"
    if repeated := [number for number, count in Counter(numbers).items() if count > 1]:
        yield f"saw twice: {repeated[:5]}"
    if numbers != sorted(numbers):
        yield "saw frames out of order"
    expected = [seq for seq, _, _ in stored]
    if missed := sorted(set(expected) - set(numbers)):
        yield f"missed {len(missed)} of {len(expected)} frames: {missed[:5]}"
    if invented := sorted(set(numbers) - set(expected)):
        yield f"saw frames that are not stored: {invented[:5]}"
    bodies = {seq: frame for seq, _, frame in stored}
    for frame in seen:
        body = {name: value for name, value in frame.data.items() if name not in ("seq", "ts")}
        if frame.data["seq"] != frame.seq or frame.event != frame.data["kind"] or body != bodies.get(frame.seq, body):
            yield f"frame {frame.seq} is not what is stored: {str(frame.data)[:200]}"
            return


def _script_name(data: Any) -> str:
    return str(json.loads(data)["name"])
