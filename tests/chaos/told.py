"""What was told of turns in a chaos run: their conversations' histories, their frames, and what watchers and callbacks heard of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.chaos.evidence import Evidence, Fault
from tests.chaos.record import Watch


def histories(evidence: Evidence) -> Iterator[Fault]:
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
    submissions = evidence.submissions
    for place, turn_id in enumerate(began):
        name = evidence.names[turn_id]
        for later in began[place + 1 :]:
            before = evidence.names[later]
            if name in sent and before in sent and sent.index(before) < sent.index(name) and submissions[name].on_busy != "interrupt":
                yield Fault(f"{name} began before {before}, which had been submitted earlier", turn_id)


def turn_frames(evidence: Evidence) -> Iterator[Fault]:
    """The stored frames of a turn tell what the turn is: each call and result once, its tokens once, `done` once and last."""
    tokens_in: dict[str, set[int]] = {}
    for conversation_id, submission in evidence.record.sent:
        tokens_in.setdefault(conversation_id, set()).add(submission.script.get("tokens", 0))
    for conversation_id, stored in evidence.frames.items():
        of_turn: dict[str, list[dict[str, Any]]] = {}
        for _, turn_id, frame in stored:
            of_turn.setdefault(turn_id, []).append(frame)
        for turn_id, frames in of_turn.items():
            if turn_id in evidence.turns:
                # of the other inputs of a conversation one may have joined the turn
                tokens = tokens_in.get(conversation_id) or {evidence.scripts[evidence.names[turn_id]].get("tokens", 0)}
                for what in _one_turn(evidence, evidence.turns[turn_id], frames, tokens):
                    yield Fault(what, turn_id)


def _one_turn(evidence: Evidence, turn: dict[str, Any], frames: list[dict[str, Any]], tokens: set[int]) -> Iterator[str]:
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
    requests = [frame for frame in frames if frame["kind"] == "approval_request"]
    asked = Counter(frame["approval_id"] for frame in requests if not frame.keys() & {"reopened", "state"})
    again = Counter(frame["approval_id"] for frame in requests if frame.get("reopened"))
    answered = Counter(frame["approval_id"] for frame in frames if frame["kind"] == "approval_decision")
    wanted = Counter({call["approval_id"]: 1 for call in turn["calls"] if "approval_id" in call})
    if not asked == answered == wanted:
        yield f"approvals {list(wanted)}, asked for {dict(asked)} times, answered {dict(answered)} times"
    let_go = Counter(frame["approval_id"] for frame in requests if "state" in frame)
    if again - evidence.record.reopened or again - let_go:
        yield f"approvals let go {dict(let_go)} times, and asked for again {dict(again)} times"
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


def watchers(evidence: Evidence) -> Iterator[Fault]:
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


def callbacks(evidence: Evidence) -> Iterator[Fault]:
    """Whoever wished to be called back was told of the turn's end and of each approval, those of the agents that it asked included,
    under one id each; nobody else was."""
    heard: dict[str, set[str]] = {}
    for call in evidence.calls:
        if call.taken:
            heard.setdefault(call.subject, set()).add(call.message_id)
    expected: set[str] = set()
    for turn_id, turn in evidence.turns.items():
        submission = evidence.submission_of(evidence.parents.get(turn_id, turn_id))
        if submission is None or not submission.called_back:
            continue
        subjects = {} if turn_id in evidence.parents else {turn_id: f"callback-turn_ended-{turn_id}-1"}
        for approval_id in (call["approval_id"] for call in turn["calls"] if "approval_id" in call):
            subjects[approval_id] = f"callback-approval_requested-{approval_id}-1"
        expected |= subjects.keys()
        for subject, message_id in subjects.items():
            ids = heard.get(subject, set())
            times = 1 + evidence.record.reopened[subject]
            if message_id not in ids or not ids <= {f"{message_id[:-1]}{number}" for number in range(1, times + 1)}:
                yield Fault(f"of {subject} the receiver was told as {sorted(ids)}", turn_id)
        ends = [call.data for call in evidence.calls if call.type == "turn.ended" and call.subject == turn_id]
        if any((told["state"], told["stop_reason"]) != (turn["state"], turn["stop_reason"]) for told in ends):
            yield Fault(f"the receiver was told another end than {turn['state']}: {ends}", turn_id)
    if strangers := heard.keys() - expected:
        yield Fault(f"the receiver was told of {sorted(strangers)}, which nobody had wished")
